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


def weights_from(line: Line, step: int, *names: str) -> None:
    """All weights differ after a step."""
    if line["kind"] == "weights" and line["step"] > step:
        other(line["tensors"], *names)


def found(workers: int, change: Change, **options: Any) -> Finding:
    finding = compare(traced(), traced(workers, change, **options))
    assert finding is not None
    return finding


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_a_sane_script_parts_nowhere(workers: int) -> None:
    assert compare(traced(), traced(workers)) is None
    assert compare_ranks(traced(workers)) is None


def test_a_run_in_which_only_buffers_change_has_trained_nothing() -> None:
    def kept(line: Line, rank: int) -> None:
        if line["kind"] == "weights":
            line["tensors"] |= {name: f"{name}@0" for name in TRAINED}

    def one_of_them(line: Line, rank: int) -> None:
        kept(line, rank)
        if line["kind"] == "weights" and line["step"] > 1:
            line["tensors"]["0.bias"] = "0.bias@1"

    assert not traced(2, kept).has_trained
    assert traced(2, one_of_them).has_trained
    assert traced().has_trained


def test_devices_that_hold_other_stages_part_nowhere_and_are_found_where_they_hold_the_same() -> None:
    def staged(line: Line, rank: int) -> None:
        if line["kind"] == "update":
            kept = TRAINED[:1] if rank == 0 else TRAINED[1:]
            for part in ("gradients", "after"):
                line[part] = {name: value for name, value in line[part].items() if name in kept}

    def wrong(line: Line, rank: int) -> None:
        staged(line, rank)
        if rank == 1:
            weights_from(line, 0, "0.bias")

    run = replace(traced(2, staged), size=Size(1, 2))
    assert compare_ranks(run) is None
    assert compare(traced(), run) is None
    assert run.trained == traced().trained
    finding = compare_ranks(replace(traced(2, wrong), size=Size(1, 2)))
    assert finding is not None
    assert finding.parting.counts.names == ("0.bias",)


def test_the_steps_the_tensors_and_the_last_weights_are_counted() -> None:
    run = traced(3)
    assert (run.steps, run.tensors, run.sha256) == (3, 4, "3")


def test_weights_that_differ_before_any_step_come_from_unseeded_randomness_if_the_run_does_not_repeat_itself() -> None:
    def early(line: Line, rank: int) -> None:
        weights_from(line, -1, "0.bias", "2.weight")

    finding = found(2, early)
    cause = explain(Case(finding, repeats=False))

    assert finding.stage is Stage.START
    assert finding.needs_repetition
    assert where(finding) == "before any step, after run.prepare: 0.bias and 1 other"
    assert "unseeded randomness" in cause.likely
    assert cause.topics[0] is Topic.EARLY
    assert equal_until_then(finding) == ""


def test_weights_that_differ_before_any_step_and_repeat_themselves_depend_on_the_number_of_workers() -> None:
    finding = found(2, lambda line, rank: weights_from(line, -1))
    assert "depend on the number of workers" in explain(Case(finding, repeats=True)).likely


def test_a_parameter_that_only_one_run_has_makes_another_model() -> None:
    def wider(line: Line, rank: int) -> None:
        if line["kind"] == "weights":
            line["tensors"]["3.weight"] = "more"

    finding = found(2, wider)
    assert where(finding).endswith("3.weight (which only one side has)")
    assert "the model itself is not the same" in explain(Case(finding, repeats=True)).likely


def other_batches(line: Line, rank: int) -> None:
    if line["kind"] == "call" and line["step"] == 1:
        other(line["inputs"])
        line["losses"] = ["0x1.0p+9"] * SHARDS
    weights_from(line, 1)


def test_other_batches_are_named_by_step_and_shard_before_the_losses_that_follow_from_them() -> None:
    finding = found(3, other_batches)
    assert finding.stage is Stage.INPUTS
    assert where(finding) == "step 1: the batch of shards 0, 1, 2, 3 does not hold the same values"
    assert weights_text(finding) == "0.weight and 3 others after step 1"
    assert equal_until_then(finding) == "the weights"


def test_batches_that_are_not_the_same_twice_are_unseeded_randomness_in_the_data() -> None:
    cause = explain(Case(found(3, other_batches), repeats=False))
    assert "unseeded randomness in the data" in cause.likely
    assert cause.topics[0] is Topic.UNSEEDED


def test_batches_of_other_workers_that_repeat_themselves_are_host_dependent_data() -> None:
    def own_generator(line: Line, rank: int) -> None:
        if line["kind"] == "call" and rank > 0:
            other(line["inputs"])
        weights_from(line, 0)

    finding = found(2, own_generator)
    cause = explain(Case(finding, repeats=True))

    assert finding.began.names == ("2", "3")
    assert "host-dependent data" in cause.likely
    assert cause.topics[0] is Topic.GENERATOR


def test_a_data_set_that_is_cut_by_rank_shows_in_the_very_first_shard() -> None:
    def cut(line: Line, rank: int) -> None:
        if line["kind"] == "call":
            other(line["inputs"])
        weights_from(line, 0)

    assert "cut by rank" in explain(Case(found(2, cut), repeats=True)).likely


def test_a_batch_that_holds_what_nobody_computes_with_does_not_matter() -> None:
    def time_in_the_batch(line: Line, rank: int) -> None:
        if line["kind"] == "call":
            other(line["inputs"])

    assert compare(traced(), traced(2, time_in_the_batch)) is None


def test_a_batch_is_not_to_blame_for_what_began_in_another_step() -> None:
    def change(line: Line, rank: int) -> None:
        if line["kind"] == "call" and line["step"] == 0:
            other(line["inputs"])
        if line["kind"] == "call" and line["step"] == 2:
            line["losses"][3] = "0x1.8p+1"

    finding = found(2, change)
    assert (finding.stage, finding.began.step) == (Stage.LOSSES, 2)


def loss_by_rank(line: Line, rank: int) -> None:
    if line["kind"] == "call" and line["step"] == 1:
        line["losses"][2:] = [(7.5).hex(), (8.5).hex()]
    weights_from(line, 1)


def test_a_loss_that_differs_only_on_shards_of_other_ranks_depends_on_the_rank() -> None:
    finding = found(2, loss_by_rank)
    cause = explain(Case(finding, repeats=True))

    assert where(finding) == "step 1: the loss of shard 2 is 3.0 with 1 worker and 7.5 with 2 workers; also shard 3"
    assert finding.ranks == {1}
    assert "depends on the rank: only shards of rank 1 differ" in cause.likely
    assert cause.topics[0] is Topic.RANK
    assert equal_until_then(finding) == "the weights, every batch"


def test_a_loss_that_differs_on_the_first_shard_of_all_depends_on_the_number_of_workers() -> None:
    def scaled(line: Line, rank: int) -> None:
        if line["kind"] == "call":
            line["losses"] = [(2.0).hex()] * SHARDS
        weights_from(line, 0)

    cause = explain(Case(found(2, scaled), repeats=True))
    assert cause.likely == "the loss depends on the number of workers"
    assert cause.topics[0] is Topic.WORLD


def test_a_loss_that_is_not_the_same_twice_is_unseeded_randomness() -> None:
    cause = explain(Case(found(2, loss_by_rank), repeats=False))
    assert "unseeded randomness" in cause.likely


def test_a_loss_that_is_not_the_same_twice_may_be_an_operation_that_the_job_allows() -> None:
    relaxed = {"deterministic": False}
    finding = compare(traced(job=relaxed), traced(2, loss_by_rank, job=relaxed))
    assert finding is not None
    assert "without a deterministic version" in explain(Case(finding, repeats=False)).likely


def test_another_loss_counts_although_the_weights_stay_the_same() -> None:
    def shifted(line: Line, rank: int) -> None:
        if line["kind"] == "call":
            line["losses"][3] = "0x1.8p+3"

    finding = found(2, shifted)
    assert finding.parting.weights is None
    assert weights_text(finding) == "the same in all steps that both have"


def test_another_weight_of_a_shard_is_told_from_another_loss() -> None:
    def tokens(line: Line, rank: int) -> None:
        if line["kind"] == "call":
            line["shares"][1] = (8.0).hex()
        weights_from(line, 0)

    finding = found(2, tokens)
    assert where(finding) == "step 0: the weight of shard 1 is 16.0 with 1 worker and 8.0 with 2 workers"
    assert "weight that the loss function returns" in explain(Case(finding, repeats=True)).likely


def other_gradients(line: Line, rank: int) -> None:
    if line["kind"] == "update" and line["step"] == 1:
        other(line["gradients"], "2.weight")
    weights_from(line, 1, "2.weight")


def test_other_gradients_of_the_same_losses_are_the_backward_pass_and_a_defect_is_not_ruled_out() -> None:
    finding = found(3, other_gradients)
    cause = explain(Case(finding, repeats=True))

    assert where(finding) == "step 1: the gradient of 2.weight"
    assert "gradient hook" in cause.likely
    assert "defect of Unisono" in cause.likely
    assert equal_until_then(finding) == "the weights, every batch, every loss"


def test_the_native_reduction_is_named_and_needs_no_repetition() -> None:
    native = {"reduction": "native"}
    finding = compare(traced(job=native), traced(3, other_gradients, job=native))
    assert finding is not None
    cause = explain(Case(finding))

    assert not finding.needs_repetition
    assert '"reduction": "native"' in cause.likely
    assert "not promised" in cause.likely


def test_a_gradient_that_shows_in_the_weights_only_later_is_still_where_it_began() -> None:
    def warm_up(line: Line, rank: int) -> None:
        if line["kind"] == "update" and line["step"] == 0:
            other(line["gradients"], "2.weight")
        weights_from(line, 1, "2.weight")

    finding = found(3, warm_up)
    assert (finding.stage, finding.began.step, finding.parting.counts.step) == (Stage.GRADIENTS, 0, 1)


def test_a_learning_rate_that_depends_on_the_number_of_workers_is_named_with_both_values() -> None:
    def scaled(line: Line, rank: int) -> None:
        if line["kind"] == "update":
            line["options"]["lr"] = 0.3
            other(line["after"])
        weights_from(line, 0)

    finding = found(3, scaled)
    assert where(finding) == "step 0: lr is 0.1 with 1 worker and 0.3 with 3 workers"
    assert not finding.needs_repetition
    assert "settings depend on the number of workers" in explain(Case(finding)).likely


def test_another_limit_for_clipping_is_named() -> None:
    def clipped(line: Line, rank: int) -> None:
        if line["kind"] == "call":
            line["clip"]["clip_norm"] = 2.0
        weights_from(line, 0)

    finding = found(2, clipped)
    assert where(finding) == "step 0: clip_norm is 1.0 with 1 worker and 2.0 with 2 workers"
    assert "clipping" in explain(Case(finding)).likely


def test_another_update_of_the_same_gradients_is_the_optimizers() -> None:
    def momentum(line: Line, rank: int) -> None:
        if line["kind"] == "update" and line["step"] == 2:
            other(line["after"], "0.bias")
        weights_from(line, 2, "0.bias")

    finding = found(2, momentum)
    assert where(finding) == "step 2, right after the optimizer's update: 0.bias"
    assert "made something else of the same gradients" in explain(Case(finding, repeats=True)).likely


def test_weights_changed_between_the_steps_are_told_from_the_update() -> None:
    def before(line: Line, rank: int) -> None:
        if line["kind"] == "call" and line["step"] == 1:
            other(line["before"], "0.weight")
        weights_from(line, 1)

    finding = found(2, before)
    assert where(finding) == "between the end of step 0 and step.run in step 1: 0.weight"
    assert "code before step.run changed the weights" in explain(Case(finding, repeats=True)).likely


def test_weights_changed_after_the_update_are_code_behind_it() -> None:
    finding = found(2, lambda line, rank: weights_from(line, 1, "0.weight"))
    assert where(finding) == "step 1, at the end of the loop's body: 0.weight"
    assert "code after step.run changed the weights" in explain(Case(finding, repeats=True)).likely


def test_a_buffer_that_differs_alone_is_told_from_the_weights() -> None:
    finding = found(2, lambda line, rank: weights_from(line, 0, "1.running_mean"))
    assert "only buffers differ" in explain(Case(finding, repeats=True)).likely


def test_a_data_set_of_another_length_is_named_with_its_last_batch() -> None:
    def shorter(line: Line, rank: int) -> None:
        if line["kind"] == "call" and line["step"] == 2:
            line["samples"] = [12] * SHARDS
            other(line["inputs"])
        weights_from(line, 2)

    finding = found(2, shorter)
    assert where(finding).startswith(
        "step 2: shard 0 has 16 samples with 1 worker and 12 with 2 workers; also shards 1"
    )
    assert "the data set has another length" in explain(Case(finding, repeats=True)).likely


def test_other_settings_of_the_job_explain_all_that_follows() -> None:
    finding = compare(traced(), traced(2, lambda line, rank: weights_from(line, 0), job={"batch_size": 128}))
    assert finding is not None
    assert where(finding) == "batch_size is 64 with 1 worker and 128 with 2 workers"
    assert "two different jobs" in explain(Case(finding)).likely
    assert not finding.needs_repetition


def test_other_settings_that_decide_no_bits_are_not_to_blame() -> None:
    finding = found(2, loss_by_rank, job={"bucket_mb": 1.0})
    assert finding.stage is Stage.LOSSES


def test_settings_that_differ_without_consequence_are_no_difference() -> None:
    assert compare(traced(), traced(2, job={"threads": 2})) is None


def test_ranks_of_one_run_that_differ_were_changed_on_some_workers_only() -> None:
    def on_main(line: Line, rank: int) -> None:
        if rank == 2:
            weights_from(line, 1, "0.weight")

    finding = found(3, on_main)
    cause = explain(Case(finding))

    assert (finding.against, finding.rank) == (None, 2)
    assert not finding.needs_repetition
    assert "on some workers only" in cause.likely
    assert cause.topics == (Topic.RANK,)


def test_ranks_that_differ_come_before_what_follows_from_it_in_the_comparison() -> None:
    def on_main(line: Line, rank: int) -> None:
        if rank == 1:
            weights_from(line, 0)
        if line["kind"] == "call" and line["step"] == 1:
            line["losses"][2] = (9.0).hex()

    assert found(2, on_main).rank == 1


def test_what_parts_from_the_first_run_before_its_ranks_do_comes_first() -> None:
    def both(line: Line, rank: int) -> None:
        if line["kind"] == "call" and line["step"] == 0:
            line["losses"][2] = (9.0).hex()
        if rank == 1:
            weights_from(line, 1)

    assert found(2, both).against == Size(1)


def test_a_learning_rate_of_some_ranks_is_told_with_the_ranks() -> None:
    def by_rank(line: Line, rank: int) -> None:
        if line["kind"] == "update" and rank == 1:
            line["options"]["lr"] = 0.2
        if rank == 1:
            weights_from(line, 0)

    assert where(found(2, by_rank)) == "step 0: lr is 0.1 on rank 0 and 0.2 on rank 1"


def test_a_loop_of_another_length_is_the_loops_own_fault() -> None:
    finding = found(2, unchanged, steps=2)
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


def test_the_same_number_of_workers_twice_needs_no_repetition_to_know_that_it_is_chance() -> None:
    finding = found(1, other_batches)
    assert not finding.needs_repetition
    assert "in the data" in explain(Case(finding)).likely


def test_a_run_that_failed_is_compared_as_far_as_it_came() -> None:
    assert compare(traced(), traced(2, steps=1, complete=False)) is None
    finding = compare(traced(), traced(2, other_batches, steps=2, complete=False))
    assert finding is not None
    assert finding.began.step == 1


def test_a_run_that_never_began_has_nothing_to_compare() -> None:
    assert compare(traced(), RunTrace(Size(2), ((), ()), complete=False)) is None


def test_a_repetition_is_compared_up_to_the_step_in_question() -> None:
    reference, again = traced(steps=3), traced(steps=2)
    assert find_parting(reference.until(1).whole, again.whole) is None
    assert find_parting(reference.whole, again.whole) is not None


def test_what_the_repetition_showed_is_said() -> None:
    finding = found(2, loss_by_rank)
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
