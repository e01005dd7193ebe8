"""Traces made by hand: for each way in which a script can break the promise, where and why is it said to part?"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from unisono.launch.comparison import (
    Difference,
    Finding,
    Parting,
    RunTrace,
    Stage,
    compare,
    compare_ranks,
    find_parting,
    read_moments,
)
from unisono.launch.hints import Topic
from unisono.launch.settings import Size
from unisono.launch.verify_runs import Case, equal_until_then, explain, repeated_text, weights_text, where
from unisono.plan.split import Split

pytestmark = pytest.mark.unit

SHARDS = 4
JOB = {"batch_size": 64, "shards": SHARDS, "reduction": "exact", "deterministic": True, "bucket_mb": 25.0}
TRAINED = ("0.weight", "0.bias", "2.weight")
TENSORS = ("0.weight", "0.bias", "1.running_mean", "2.weight")

Line = dict[str, Any]
Change = Callable[[Line, int], None]


def unchanged(line: Line, rank: int) -> None:
    """The sane script."""


def weights(step: int) -> Line:
    return {
        "kind": "weights",
        "step": step,
        "tensors": {name: f"{name}@{step}" for name in TENSORS},
        "sha256": f"{step}",
    }


def call(step: int, shards: range) -> Line:
    return {
        "kind": "call",
        "step": step,
        "call": 0,
        "before": {name: f"{name}@{step}" for name in TRAINED},
        "samples": [16] * SHARDS,
        "inputs": {str(shard): f"batch {step} {shard}" for shard in shards},
        "losses": [float(step + shard).hex() for shard in range(SHARDS)],
        "shares": [(16.0).hex()] * SHARDS,
        "clip": {"clip_norm": 1.0, "clip_value": None},
    }


def update(step: int) -> Line:
    return {
        "kind": "update",
        "step": step,
        "call": 0,
        "optimizer": 0,
        "gradients": {name: f"gradient of {name}@{step}" for name in TRAINED},
        "options": {"lr": 0.1, "momentum": 0.9},
        "after": {name: f"{name}@{step + 1}" for name in TRAINED},
    }


def traced(
    workers: int = 1,
    change: Change = unchanged,
    *,
    steps: int = 3,
    job: Mapping[str, Any] | None = None,
    complete: bool = True,
) -> RunTrace:
    """A run as its workers would trace it, each line after a change."""
    split = Split.even(SHARDS, workers)
    ranks = []
    for rank in range(workers):
        lines = [weights(0)]
        for step in range(steps):
            lines += [call(step, split.of(rank)), update(step), weights(step + 1)]
        for line in lines:
            change(line, rank)
        ranks.append(read_moments(lines))
    return RunTrace(Size(workers), tuple(ranks), {**JOB, **(job or {})}, complete)


def other(values: dict[str, str], *names: str) -> None:
    for name in names or values:
        values[name] = f"other {values[name]}"


def at(kind: str, edit: Callable[[Line], object], step: int | None = None, rank: int | None = None) -> Change:
    """Lines of a kind are edited, perhaps only of one step or one rank."""

    def change(line: Line, own: int) -> None:
        if line["kind"] == kind and step in (None, line["step"]) and rank in (None, own):
            edit(line)

    return change


def differs(kind: str, part: str, *names: str, step: int | None = None) -> Change:
    return at(kind, lambda line: other(line[part], *names), step)


def has(kind: str, *path: str, value: Any, step: int | None = None, rank: int | None = None) -> Change:
    def edit(line: Line) -> None:
        for name in path[:-1]:
            line = line[name]
        line[path[-1]] = value

    return at(kind, edit, step, rank)


def later(step: int, *names: str, rank: int | None = None) -> Change:
    """All weights differ after a step."""

    def change(line: Line, own: int) -> None:
        if line["kind"] == "weights" and line["step"] > step and rank in (None, own):
            other(line["tensors"], *names)

    return change


def all_of(*changes: Change) -> Change:
    def change(line: Line, rank: int) -> None:
        for one in changes:
            one(line, rank)

    return change


def found(workers: int, *changes: Change, **options: Any) -> Finding:
    finding = compare(traced(), traced(workers, all_of(*changes), **options))
    assert finding is not None
    return finding


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_a_sane_script_parts_nowhere(workers: int) -> None:
    run = traced(workers)
    assert compare(traced(), run) is None
    assert compare_ranks(run) is None
    assert (run.steps, run.tensors, run.sha256) == (3, 4, "3")


def test_a_run_in_which_only_buffers_change_has_trained_nothing() -> None:
    kept = at("weights", lambda line: line["tensors"].update({name: f"{name}@0" for name in TRAINED}))
    assert not traced(2, kept).has_trained
    assert traced(2, all_of(kept, has("weights", "tensors", "0.bias", value="0.bias@1", step=2))).has_trained
    assert traced().has_trained


def test_devices_that_hold_other_stages_part_nowhere_and_are_found_where_they_hold_the_same() -> None:
    def staged(line: Line, rank: int) -> None:
        if line["kind"] == "update":
            kept = TRAINED[:1] if rank == 0 else TRAINED[1:]
            for part in ("gradients", "after"):
                line[part] = {name: value for name, value in line[part].items() if name in kept}

    run = replace(traced(2, staged), size=Size(1, 2))
    assert compare_ranks(run) is None
    assert compare(traced(), run) is None
    assert run.trained == traced().trained
    wrong = all_of(staged, later(0, "0.bias", rank=1))
    finding = compare_ranks(replace(traced(2, wrong), size=Size(1, 2)))
    assert finding is not None
    assert finding.parting.counts.names == ("0.bias",)


OTHER_BATCHES = all_of(
    differs("call", "inputs", step=1), has("call", "losses", value=["0x1.0p+9"] * SHARDS, step=1), later(1)
)
OTHER_GRADIENTS = all_of(differs("update", "gradients", "2.weight", step=1), later(1, "2.weight"))


def loss_by_rank(line: Line, rank: int) -> None:
    if line["kind"] == "call" and line["step"] == 1:
        line["losses"][2:] = [(7.5).hex(), (8.5).hex()]


LOSS_BY_RANK = all_of(loss_by_rank, later(1))


def own_generator(line: Line, rank: int) -> None:
    if line["kind"] == "call" and rank > 0:
        other(line["inputs"])


PARTINGS: dict[str, tuple[int, Change, bool | None, str, str, Topic | None]] = {
    "weights drawn without a seed": (2, later(-1, "0.bias", "2.weight"), False,
        "before any step, after run.prepare: 0.bias and 1 other", "unseeded randomness", Topic.EARLY),
    "weights by the number of workers": (2, later(-1), True,
        "before any step, after run.prepare: 0.weight and 3 others", "depend on the number of workers", None),
    "a parameter more": (2, has("weights", "tensors", "3.weight", value="more"), True,
        "before any step, after run.prepare: 3.weight (which only one side has)",
        "the model itself is not the same", None),
    "other batches": (3, OTHER_BATCHES, False,
        "step 1: the batch of shards 0, 1, 2, 3 does not hold the same values",
        "unseeded randomness in the data", Topic.UNSEEDED),
    "batches of other workers": (2, all_of(own_generator, later(0)), True,
        "step 0: the batch of shards 2, 3 does not hold the same values", "host-dependent data", Topic.GENERATOR),
    "data cut by rank": (2, all_of(differs("call", "inputs"), later(0)), True,
        "step 0: the batch of shards 0, 1, 2, 3 does not hold the same values", "cut by rank", None),
    "losses of some ranks": (2, LOSS_BY_RANK, True,
        "step 1: the loss of shard 2 is 3.0 with 1 worker and 7.5 with 2 workers; also shard 3",
        "depends on the rank: only shards of rank 1 differ", Topic.RANK),
    "losses by the number of workers": (2, all_of(has("call", "losses", value=[(2.0).hex()] * SHARDS), later(0)), True,
        "step 0: the loss of shard 0 is 0.0 with 1 worker and 2.0 with 2 workers; also shards 1, 3",
        "the loss depends on the number of workers", Topic.WORLD),
    "losses that do not repeat": (2, LOSS_BY_RANK, False,
        "step 1: the loss of shard 2 is 3.0 with 1 worker and 7.5 with 2 workers; also shard 3",
        "unseeded randomness", None),
    "a weight of a shard": (2, all_of(at("call", lambda line: line["shares"].__setitem__(1, (8.0).hex())), later(0)),
        True, "step 0: the weight of shard 1 is 16.0 with 1 worker and 8.0 with 2 workers",
        "weight that the loss function returns", None),
    "gradients": (3, OTHER_GRADIENTS, True, "step 1: the gradient of 2.weight", "gradient hook", None),
    "gradients, or a defect": (3, OTHER_GRADIENTS, True, "step 1: the gradient of 2.weight", "defect of Unisono", None),
    "a learning rate": (3, all_of(has("update", "options", "lr", value=0.3), differs("update", "after"), later(0)),
        None, "step 0: lr is 0.1 with 1 worker and 0.3 with 3 workers",
        "settings depend on the number of workers", None),
    "a limit for clipping": (2, all_of(has("call", "clip", "clip_norm", value=2.0), later(0)), None,
        "step 0: clip_norm is 1.0 with 1 worker and 2.0 with 2 workers", "clipping", None),
    "an update": (2, all_of(differs("update", "after", "0.bias", step=2), later(2, "0.bias")), True,
        "step 2, right after the optimizer's update: 0.bias", "made something else of the same gradients", None),
    "code before the step": (2, all_of(differs("call", "before", "0.weight", step=1), later(1)), True,
        "between the end of step 0 and step.run in step 1: 0.weight", "code before step.run changed the weights", None),
    "code after the step": (2, later(1, "0.weight"), True,
        "step 1, at the end of the loop's body: 0.weight", "code after step.run changed the weights", None),
    "buffers alone": (2, later(0, "1.running_mean"), True,
        "step 0, at the end of the loop's body: 1.running_mean", "only buffers differ", None),
    "data of another length": (2,
        all_of(has("call", "samples", value=[12] * SHARDS, step=2), differs("call", "inputs", step=2), later(2)), True,
        "step 2: shard 0 has 16 samples with 1 worker and 12 with 2 workers; also shards 1, 2, 3",
        "the data set has another length", None),
    "the same number of workers": (1, OTHER_BATCHES, None,
        "step 1: the batch of shards 0, 1, 2, 3 does not hold the same values", "in the data", None),
}  # fmt: skip
"""Workers, what differs, whether a repetition has shown the same, and where it is said to begin, why, and on what."""


@pytest.mark.parametrize(
    ("workers", "change", "repeats", "place", "likely", "topic"), PARTINGS.values(), ids=PARTINGS.keys()
)
def test_each_way_to_part_is_told_with_its_place_and_likely_cause(
    workers: int, change: Change, repeats: bool | None, place: str, likely: str, topic: Topic | None
) -> None:
    finding = found(workers, change)
    cause = explain(Case(finding, repeats))
    assert where(finding) == place
    assert likely in cause.likely
    assert topic in (None, cause.topics[0])
    assert finding.needs_repetition == (repeats is not None)


def test_what_was_equal_until_then_and_which_weights_follow_is_told() -> None:
    assert equal_until_then(found(2, later(-1))) == ""
    assert equal_until_then(found(3, OTHER_BATCHES)) == "the weights"
    assert weights_text(found(3, OTHER_BATCHES)) == "0.weight and 3 others after step 1"
    assert equal_until_then(found(2, LOSS_BY_RANK)) == "the weights, every batch"
    assert found(2, LOSS_BY_RANK).ranks == {1}
    assert equal_until_then(found(3, OTHER_GRADIENTS)) == "the weights, every batch, every loss"


def test_a_batch_that_holds_what_nobody_computes_with_does_not_matter() -> None:
    assert compare(traced(), traced(2, differs("call", "inputs"))) is None


def third_loss(value: str, step: int | None = None) -> Change:
    return at("call", lambda line: line["losses"].__setitem__(3, value), step)


def test_a_batch_is_not_to_blame_for_what_began_in_another_step() -> None:
    finding = found(2, differs("call", "inputs", step=0), third_loss("0x1.8p+1", step=2))
    assert (finding.stage, finding.began.step) == (Stage.LOSSES, 2)


def test_a_loss_that_is_not_the_same_twice_may_be_an_operation_that_the_job_allows() -> None:
    relaxed = {"deterministic": False}
    finding = compare(traced(job=relaxed), traced(2, LOSS_BY_RANK, job=relaxed))
    assert finding is not None
    assert "without a deterministic version" in explain(Case(finding, repeats=False)).likely


def test_another_loss_counts_although_the_weights_stay_the_same() -> None:
    finding = found(2, third_loss("0x1.8p+3"))
    assert finding.parting.weights is None
    assert weights_text(finding) == "the same in all steps that both have"


def test_the_native_reduction_is_named_and_needs_no_repetition() -> None:
    native = {"reduction": "native"}
    finding = compare(traced(job=native), traced(3, OTHER_GRADIENTS, job=native))
    assert finding is not None
    assert not finding.needs_repetition
    assert '"reduction": "native"' in explain(Case(finding)).likely


def test_a_gradient_that_shows_in_the_weights_only_later_is_still_where_it_began() -> None:
    finding = found(3, differs("update", "gradients", "2.weight", step=0), later(1, "2.weight"))
    assert (finding.stage, finding.began.step, finding.parting.counts.step) == (Stage.GRADIENTS, 0, 1)


def test_other_settings_of_the_job_explain_all_that_follows_if_they_decide_bits() -> None:
    finding = found(2, later(0), job={"batch_size": 128})
    assert where(finding) == "batch_size is 64 with 1 worker and 128 with 2 workers"
    assert "two different jobs" in explain(Case(finding)).likely
    assert not finding.needs_repetition
    assert found(2, LOSS_BY_RANK, job={"bucket_mb": 1.0}).stage is Stage.LOSSES
    assert compare(traced(), traced(2, job={"threads": 2})) is None


def test_ranks_of_one_run_that_differ_were_changed_on_some_workers_only() -> None:
    finding = found(3, later(1, "0.weight", rank=2))
    cause = explain(Case(finding))
    assert (finding.against, finding.rank, finding.needs_repetition) == (None, 2, False)
    assert "on some workers only" in cause.likely
    assert cause.topics == (Topic.RANK,)
    rate = found(2, has("update", "options", "lr", value=0.2, rank=1), later(0, rank=1))
    assert where(rate) == "step 0: lr is 0.1 on rank 0 and 0.2 on rank 1"


@pytest.mark.parametrize(("ranks_part", "losses_part", "rank"), [(0, 1, 1), (1, 0, None)])
def test_ranks_that_differ_and_a_run_that_parts_from_the_first_are_told_in_their_order(
    ranks_part: int, losses_part: int, rank: int | None
) -> None:
    finding = found(2, later(ranks_part, rank=1), third_loss((9.0).hex(), step=losses_part))
    assert (finding.rank, finding.against) == ((rank, None) if rank else (finding.rank, Size(1)))


def test_a_loop_of_another_length_is_the_loops_own_fault() -> None:
    finding = found(2, steps=2)
    assert where(finding) == "3 steps with 1 worker and 2 with 2 workers; equal as far as both go"
    assert "the loop itself depends on the number of workers" in explain(Case(finding)).likely
    assert not finding.needs_repetition


def test_another_number_of_calls_in_a_step_is_another_path() -> None:
    def lines(calls: int) -> Sequence[Line]:
        return [weights(0), *(call(0, range(SHARDS)) | {"call": number} for number in range(calls)), weights(1)]

    reference, twice = (RunTrace(Size(1), (read_moments(lines(calls)),), JOB) for calls in (1, 2))
    finding = compare(reference, twice)
    assert finding is not None
    assert where(finding).startswith("step 0: the end of step 0 ")
    assert "another path" in explain(Case(finding)).likely


def test_a_run_that_failed_is_compared_as_far_as_it_came() -> None:
    assert compare(traced(), traced(2, steps=1, complete=False)) is None
    finding = compare(traced(), traced(2, OTHER_BATCHES, steps=2, complete=False))
    assert finding is not None
    assert finding.began.step == 1


def test_a_run_that_never_began_has_nothing_to_compare() -> None:
    assert compare(traced(), RunTrace(Size(2), ((), ()), complete=False)) is None


def test_a_repetition_is_compared_up_to_the_step_in_question() -> None:
    reference, again = traced(steps=3), traced(steps=2)
    assert find_parting(reference.until(1).whole, again.whole) is None
    assert find_parting(reference.whole, again.whole) is not None


def test_what_the_repetition_showed_is_said() -> None:
    finding = found(2, LOSS_BY_RANK)
    assert repeated_text(Case(finding)) == ""
    assert "not chance" in repeated_text(Case(finding, repeats=True))
    assert "not to blame" in repeated_text(Case(finding, repeats=False))


def test_a_second_prepare_shows_weights_and_is_no_step() -> None:
    run = RunTrace(Size(1), (read_moments([weights(0), call(0, range(SHARDS)), weights(1), weights(1)]),))
    assert [moment.stage for moment in run.whole if moment.call != 0] == [Stage.START, Stage.WEIGHTS, Stage.START]
    assert run.steps == 1


@pytest.mark.parametrize("stage", Stage)
def test_every_stage_has_a_cause_with_something_to_do(stage: Stage) -> None:
    job = {"batch_size": 1} if stage is Stage.JOB else JOB
    began = Difference(stage, 1, 0, ("2",), "0x1p+0", "0x1p+1")
    finding = Finding(Parting(began, began, None), size=Size(2), against=Size(1), jobs=(JOB, job))

    for repeats in (True, False, None):
        cause = explain(Case(finding, repeats))
        assert cause.likely
        assert cause.todo
        assert where(finding)
