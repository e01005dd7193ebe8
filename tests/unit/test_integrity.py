"""A bit that flips in a worker's memory ends in the right bits."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import unisono
from unisono.errors import JobMismatch, UnisonoWarning
from unisono.plan.audits import AuditResult
from unisono.train.recovery.integrity import HeldStates
from unisono.train.recovery.known_states import BOUNDARY
from unisono.word_sums import flipped_bits
from unisono_lab.faults.faults import FlippedPlace
from unisono_lab.faults.injector import flip_in

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_worker")]

Start = Callable[..., unisono.Run]
Disturb = Callable[[unisono.Run, str, int], None]

EXPONENT, LOWEST, HUGE = 23, 0, 30
"""A bit that no update rounds away, one that it may, and one that makes a number too large to compute with."""


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(70, 6, generator=generator), torch.randint(0, 3, (70,), generator=generator))


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))


def cross_entropy(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def prepared(run: unisono.Run, momentum: float = 0.0) -> tuple[unisono.Run, nn.Sequential]:
    """A run that trains a network."""
    model = net()
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum))
    return run, model


class Average:
    """Of the weights, over all steps."""

    def __init__(self, model: nn.Module) -> None:
        self.values = [parameter.detach().clone() for parameter in model.parameters()]

    def update(self, model: nn.Module) -> None:
        for mine, theirs in zip(self.values, model.parameters(), strict=True):
            mine.lerp_(theirs.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for mine, theirs in zip(self.values, state["values"], strict=True):
            mine.copy_(theirs)


class Once:
    """Flips one bit, in the step and at the moment where it is to."""

    def __init__(self, place: FlippedPlace, bit: int, moment: str, step: int) -> None:
        self.place, self.bit, self.at = place, bit, (moment, step)
        self.done = False

    def __call__(self, run: unisono.Run, moment: str, step: int) -> None:
        if (moment, step) == self.at and not self.done:
            self.done = True
            flip_in(run, self.place, self.bit)


def never(run: unisono.Run, moment: str, step: int) -> None:
    """Nothing happens."""


def train(run: unisono.Run, disturb: Disturb = never, **looping: Any) -> tuple[str, list[Tensor]]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.prepare(model, optimizer)
    scheduler = run.register("scheduler", torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5))
    average = run.register("average", Average(model))
    for step in run.steps(data(), epochs=4):
        disturb(run, "begin", step.number)
        step.run(cross_entropy)
        disturb(run, "after", step.number)
        scheduler.step()
        average.update(model)
    return run.finish(), average.values


@pytest.mark.parametrize("place", ["weights", "buffers", "optimizer"])
@pytest.mark.parametrize("bit", [EXPONENT, LOWEST])
@pytest.mark.parametrize(("moment", "number"), [("begin", 4), ("after", 4), ("after", 5)])
def test_a_flipped_bit_of_the_only_copy_is_found_and_the_steps_are_computed_again(
    start: Start, tmp_path: Path, place: FlippedPlace, bit: int, moment: str, number: int
) -> None:
    expected, averages = train(start(run_dir=tmp_path / "undisturbed"))
    run = start(faults={"verify_every": 3})
    with pytest.warns(UnisonoWarning, match="goes back to step 3"):
        digest, found = train(run, Once(place, bit, moment, number))
    assert digest == expected
    assert all(map(torch.equal, found, averages))
    result = json.loads((run.dir / "result.json").read_text())
    assert [(one["step"], one["to"]) for one in result["rolled_back"]] == [(number + (moment == "after"), 3)]
    assert result["healed"] == []
    lines = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(12))


@pytest.mark.parametrize(("place", "moment"), [("weights", "begin"), ("optimizer", "begin"), ("optimizer", "after")])
def test_a_flipped_bit_by_which_losses_are_not_finite_is_gone_back_from(
    start: Start, tmp_path: Path, place: FlippedPlace, moment: str
) -> None:
    expected, _ = train(start(run_dir=tmp_path / "undisturbed"))
    with pytest.warns(UnisonoWarning, match="a bit in the memory of rank 0 .* goes back to step 3"):
        assert train(start(faults={"verify_every": 3}), Once(place, HUGE, moment, 4))[0] == expected


@pytest.mark.filterwarnings("ignore::unisono.errors.UnisonoWarning")
def test_a_bit_of_weights_that_the_script_has_written_is_found_if_it_flips_in_the_step_after(
    start: Start, tmp_path: Path
) -> None:
    def digest(run: unisono.Run, disturb: Disturb = never) -> str:
        model = net()
        run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        run.on("step_computed", lambda run, step: disturb(run, "computed", step.number))
        for step in run.steps(data(), epochs=2):
            step.run(cross_entropy)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.clamp_(-0.3, 0.3)
        return run.finish()

    expected = digest(start(run_dir=tmp_path / "undisturbed"))
    strike = Once("weights", EXPONENT, "computed", 4)
    assert digest(start(faults={"verify_every": 2}), strike) == expected
    assert strike.done


def test_checkpoints_say_that_all_workers_held_what_is_in_them(start: Start) -> None:
    run = start(checkpoints={"every": 5})
    digest, _ = train(run)
    manifests = sorted((run.dir / "checkpoints").glob("step-*/manifest.json"))
    assert [json.loads(each.read_text())["verified"] for each in manifests] == [True] * 3
    again = start(checkpoints={"every": 5})
    assert train(again)[0] == digest


def test_a_checkpoint_is_written_of_the_right_state_even_if_a_bit_flips_just_before(
    start: Start, tmp_path: Path
) -> None:
    expected, _ = train(start(run_dir=tmp_path / "undisturbed", checkpoints={"every": 6}))
    run = start(checkpoints={"every": 6, "keep": 9})
    with pytest.warns(UnisonoWarning, match="goes back to step 0"):
        assert train(run, Once("weights", LOWEST, "after", 5))[0] == expected
    checkpoints = [
        unisono.load(net(), folder / "checkpoints" / "step-00000006").state_dict()
        for folder in (run.dir, tmp_path / "undisturbed")
    ]
    assert all(torch.equal(checkpoints[0][name], checkpoints[1][name]) for name in checkpoints[0])


def test_a_bit_that_flips_after_the_last_step_is_an_error(start: Start) -> None:
    run, _ = prepared(start())
    for step in run.steps(data()):
        step.run(cross_entropy)
    flip_in(run, "weights", LOWEST)
    with pytest.raises(JobMismatch, match="a bit in the memory of rank 0"):
        run.finish()


def test_a_script_may_change_weights_between_steps_in_any_way(start: Start, recwarn: pytest.WarningsRecorder) -> None:
    run, model = prepared(start(), momentum=0.9)
    for step in run.steps(data(), epochs=2):
        step.run(cross_entropy)
        for parameter in model.parameters():
            parameter.data.clamp_(-0.1, 0.1)
        with torch.no_grad():
            next(model.parameters())[0, 0] = 0.5
        next(model.buffers()).zero_()
    run.finish()
    assert not [warning for warning in recwarn if issubclass(warning.category, UnisonoWarning)]


@pytest.mark.filterwarnings("ignore::unisono.errors.UnisonoWarning")
def test_a_script_that_changes_a_single_bit_by_itself_is_believed_the_second_time(start: Start) -> None:
    run, _ = prepared(start())
    seen = []
    for step in run.steps(data()):
        seen.append(step.number)
        step.run(cross_entropy)
        flip_in(run, "weights", LOWEST)
    run.finish()
    assert seen == [0, 1, 0, 1, 2]


@pytest.mark.filterwarnings("ignore::unisono.errors.UnisonoWarning")
def test_a_script_whose_replay_comes_by_other_weights_is_told_so(start: Start) -> None:
    run, _ = prepared(start())
    disturb, rates = Once("weights", EXPONENT, "begin", 4), [0.1]

    def loss_fn(model: Any, batch: Any) -> Tensor:
        return rates[-1] * cross_entropy(model, batch)

    def loop() -> None:
        for step in run.steps(data(), epochs=2):
            disturb(run, "begin", step.number)
            rates.append(rates[-1] * 0.9)  # known to nobody, as in a scheduler that is not registered
            step.run(loss_fn)

    with pytest.raises(JobMismatch, match=r"step \d was computed again, after a fault, with other .* another loss"):
        loop()


@pytest.mark.filterwarnings("ignore::unisono.errors.UnisonoWarning")
@pytest.mark.parametrize(
    ("moment", "number"), [("begin", 0), ("begin", 1), ("begin", 2), ("begin", 5), ("after", 0), ("after", 2)]
)
def test_a_rate_that_follows_from_what_is_not_restored_is_refused_when_steps_are_computed_again(
    start: Start, number: int, moment: str
) -> None:
    run, model = start(faults={"verify_every": 3}), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.prepare(model, optimizer)
    disturb, rates = Once("weights", EXPONENT, moment, number), [0.1]

    def loop() -> None:
        for step in run.steps(data(), epochs=4):
            disturb(run, "begin", step.number)
            step.run(cross_entropy)
            disturb(run, "after", step.number)
            rates.append(rates[-1] * 0.8)
            optimizer.param_groups[0]["lr"] = rates[-1]

    with pytest.raises(JobMismatch, match=r"step \d was computed again, .*with other settings|registers nothing"):
        loop()


@pytest.mark.filterwarnings("ignore::unisono.errors.UnisonoWarning")
@pytest.mark.parametrize(
    ("scheduled", "every", "number"),
    [(False, 2, 0), (False, 2, 2), (False, 2, 4), (True, 100, 1), (True, 100, 2), (True, 100, 9)],
)
def test_a_rate_by_the_steps_number_or_of_a_scheduler_that_is_not_registered_goes_back_with_the_run(
    start: Start, tmp_path: Path, scheduled: bool, every: int, number: int
) -> None:
    def digest(run: unisono.Run, disturb: Disturb = never) -> str:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8) if scheduled else None
        run.prepare(model, optimizer)
        for step in run.steps(data(), epochs=4):
            if scheduler is None:
                optimizer.param_groups[0]["lr"] = 0.1 * 0.8**step.number
            disturb(run, "begin", step.number)
            step.run(cross_entropy, clip_norm=1 / (1 + step.number))
            if scheduler is not None:
                scheduler.step()
        return run.finish()

    expected = digest(start(run_dir=tmp_path / "undisturbed"))
    assert digest(start(faults={"verify_every": every}), Once("weights", EXPONENT, "begin", number)) == expected


@pytest.mark.filterwarnings("ignore::unisono.errors.UnisonoWarning")
@pytest.mark.parametrize("place", ["weights", "buffers", "optimizer"])
def test_what_the_last_step_before_a_fault_leaves_is_compared_when_it_is_computed_again(
    start: Start, place: FlippedPlace
) -> None:
    run, model = prepared(start(faults={"verify_every": 3}), momentum=0.9)
    disturb, factors = Once(place, EXPONENT, "begin", 4), [1.0]
    # What no loss and no setting shows:
    list(model.parameters())[-1].register_hook(lambda gradient: gradient * factors[-1])

    def loop() -> None:
        for step in run.steps(data(), epochs=4):
            disturb(run, "begin", step.number)
            step.run(cross_entropy)
            factors.append(factors[-1] * 0.5)

    with pytest.raises(JobMismatch, match="step 4 was computed again, after a fault, with other weights"):
        loop()


def test_workers_that_differed_have_to_end_in_what_one_of_them_held_when_steps_are_computed_again(
    start: Start,
) -> None:
    run, _ = prepared(start())
    integrity = run.inside.integrity
    integrity.know(0, run.inside.trained.capture().digests())
    integrity.judge((1, 0), HeldStates([1, 2], [False] * 2, [0, 0]))[1]()
    integrity.judge((1, 0), HeldStates([2, 2], [False] * 2, [0, 0]))
    with pytest.raises(JobMismatch, match="with other weights"):
        integrity.judge((1, 0), HeldStates([3, 3], [False] * 2, [0, 0]))
    integrity.go_back_from((2, 0), "they differ", (2, BOUNDARY), [1, 2, 3, 4])()
    integrity.require_held(2, [3, 4])
    with pytest.raises(JobMismatch, match="step 1 was computed again, after a fault, with another state"):
        integrity.require_held(2, [2, 3])


def test_a_scheduler_is_found_beside_another_one_that_the_script_has_registered(start: Start) -> None:
    model, run = net(), start()
    optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model[4].parameters(), lr=0.1)]
    run.prepare(model, optimizers)
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 1, 0.8) for one in optimizers]
    run.register("scheduler", schedulers[0])
    schedulers[1].state_dict()  # from now on its attributes lie in a dictionary of their own
    next(iter(run.steps(data())))
    registered = run.inside.trained.registry.objects
    assert sorted(registered) == ["scheduler", "unisono StepLR of optimizer 1"]
    assert list(registered.values()) == schedulers


@pytest.mark.parametrize("bits", [(3,), (40,), (63,), (3, 40), (3, 4), (62, 63)])
@pytest.mark.parametrize("is_set", [False, True])
def test_two_bits_are_counted_whether_they_are_set_or_cleared(bits: tuple[int, ...], is_set: bool) -> None:
    words = sum(1 << bit for bit in bits)
    before, after = (0, words) if is_set else (words, 0)
    assert 0 < flipped_bits([before + 5], [after + 5]) <= len(bits)


@pytest.mark.filterwarnings("error::unisono.errors.UnisonoWarning")
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_what_the_script_writes_to_all_of_a_tensors_data_is_no_flipped_bit(start: Start, factor: float) -> None:
    run = start(faults={"verify_every": 3})
    middle = nn.Linear(8, 8)
    model = nn.Sequential(nn.Linear(6, 8), middle, nn.Linear(8, 3))
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps(data(), epochs=4):
        step.run(cross_entropy)
        middle.weight.data.mul_(factor)  # the sum of its 32 words changes by two powers of two
    run.finish()
    assert json.loads((run.dir / "result.json").read_text())["rolled_back"] == []


def test_a_loop_that_is_left_before_the_run_could_go_back_is_an_error(start: Start) -> None:
    run, _ = prepared(start())
    disturb = Once("weights", EXPONENT, "begin", 1)
    for step in run.steps(data()):
        disturb(run, "begin", step.number)
        step.run(cross_entropy)
        if step.number == 1:
            break
    with pytest.raises(JobMismatch, match="the script has left the loop before"):
        run.finish()


def test_without_comparisons_nothing_is_kept(start: Start) -> None:
    run = start(faults={"verify_every": 0})
    assert train(run, Once("weights", EXPONENT, "begin", 4))[0]
    assert run.inside.integrity.known.right is None


@pytest.mark.filterwarnings("ignore::unisono.errors.UnisonoWarning")
def test_a_new_generation_does_not_forget_that_an_update_was_made_from_a_wrong_gradient(
    start: Start, tmp_path: Path
) -> None:
    expected, _ = train(start(run_dir=tmp_path / "undisturbed"))
    lost: list[int] = []

    def lose(run: unisono.Run, moment: str, step: int) -> None:
        if (moment, step) == ("after", 4) and not lost:
            lost.append(step)
            run.inside.exact.memory.has_lost = True
            flip_in(run, "weights", EXPONENT)
            run.inside.recovery.renew()  # another worker was lost

    run = start(faults={"verify_every": 3})
    assert train(run, lose)[0] == expected
    assert [one["to"] for one in json.loads((run.dir / "result.json").read_text())["rolled_back"]] == [3]


def test_what_is_decided_in_a_call_is_set_in_its_change_and_not_before(start: Start) -> None:
    run, _ = prepared(start(faults={"verify_every": 3}))
    integrity, trained = run.inside.integrity, run.inside.trained
    integrity.know(0, trained.capture().digests())
    finding = AuditResult(0, frozenset({0}), 1)
    decisions: list[Callable[[], Callable[[], None]]] = [
        lambda: integrity.judge((1, 0), HeldStates([0], [False], [0]), lost=[True])[1],
        lambda: integrity.judge((1, 0), HeldStates([1, 2], [False] * 2, [0, 0]))[1],
        lambda: integrity.judge((1, 0), HeldStates([1], [True], [0]))[1],
        lambda: integrity.judge((1, 0), HeldStates([1], [False], [0]))[1],
        lambda: integrity.audited([finding], [0, 1], "a worker computes wrongly"),
    ]
    for decide in decisions:
        before = asdict(integrity.known), trained.doubt
        note = decide()
        assert (asdict(integrity.known), trained.doubt) == before
        note()
        assert (asdict(integrity.known), trained.doubt) != before
        trained.doubt, integrity.known.returns = None, 0


def test_a_bit_that_flips_twice_is_not_the_scripts_if_workers_hold_different_weights(start: Start) -> None:
    run, _ = prepared(start())
    integrity, held = run.inside.integrity, HeldStates([1, 2], [True, False], [0, 0])
    integrity.judge((1, 0), held)[1]()
    with pytest.raises(JobMismatch, match="and did so again"), pytest.warns(UnisonoWarning, match="by itself"):
        integrity.judge((1, 0), held)
