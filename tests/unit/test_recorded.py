"""From what a run wrote down, policies see again what they saw."""

import json
import math
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import unisono
from unisono.adapt.norms import Noise
from unisono.adapt.view import Figure, Policy, View
from unisono.errors import JobError
from unisono.plan.topology import Links
from unisono_lab.recorded.policy_replay import gaps, recorded_steps, replay
from unisono_lab.recorded.record import Record, compared, valid_decisions

pytestmark = pytest.mark.unit

LINE = {
    "step": 0,
    "epoch": 0,
    "position": 0,
    "batch_size": 64,
    "loss": 1.0,
    "lr": 0.1,
    "generation": 1,
    "world_size": 2,
    "seconds": {"total": 0.5},
    "samples_per_s": 128.0,
}


def lines(*changes: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**LINE, "step": step, "position": 64 * step, **change} for step, change in enumerate(changes)]


def test_the_noise_stays_known_between_the_steps_that_are_watched() -> None:
    figures = {"gradient_variance": 8.0, "gradient_signal": -1.0}
    steps = recorded_steps(lines({}, figures, {}), 64, 8)
    assert [step.view.noise for step in steps] == [None, Noise(8.0, -1.0), Noise(8.0, -1.0)]


def test_links_stay_as_they_were_measured_last() -> None:
    links = {"latency_s": [[0.0, 0.1], [0.1, 0.0]], "bytes_per_s": [[0.0, 5.0], [5.0, 0.0]]}
    steps = recorded_steps(lines({}, {"links": links}, {}), 64, 8)
    assert [step.view.links for step in steps] == [None, Links.from_json(links), Links.from_json(links)]


def test_a_loss_that_was_no_number_is_none_again() -> None:
    (step,) = recorded_steps(lines({"loss": None, "losses": [1.0, None]}), 64, 8)
    assert math.isnan(step.view.metrics["loss"])
    assert math.isnan(step.view.metrics["losses"][1])


def test_what_a_script_logged_beside_its_steps_is_no_step() -> None:
    assert len(recorded_steps([*lines({}), {"step": 1, "accuracy": 0.9}], 64, 8)) == 1


def test_steps_that_nobody_wrote_down_are_known() -> None:
    written = lines(*[{} for _ in range(6)])
    assert gaps(recorded_steps([written[0], written[3], written[5]], 64, 8)) == [1, 2, 4]


def test_a_line_that_lacks_something_is_named_with_the_field() -> None:
    with pytest.raises(JobError, match="step 0 that policies read: lr: Field required"):
        recorded_steps([{name: value for name, value in LINE.items() if name != "lr"}], 64, 8)


class Curious(Policy):
    """Changes batch and rate now and then, stops once, and remembers all it sees."""

    needs_monitor: ClassVar[bool] = True
    observe_every = 4

    def __init__(self, *, stops: bool = True) -> None:
        self._seen: list[tuple[str, View]] = []
        self._stops = stops

    def observe(self, view: View) -> dict[str, Figure]:
        return {"price": 1.5 + view.step}

    def before_train(self, view: View) -> None:
        self._seen.append(("before_train", view))
        self.set_learning_rate(0.7 * view.learning_rate)

    def after_step(self, view: View) -> None:
        self._seen.append(("after_step", view))
        if view.step % 3 == 0:
            shards = 16 if view.step % 2 else None
            self.set_batch_size(16 + 8 * (view.step % 5), shards, loss=view.metrics["loss"])
            price = view.observed["curious"]["price"]
            self.set_learning_rate(view.learning_rate * 1.1, price=price, steady=view.steady)
        if self._stops and view.step == 10:
            self.stop(seconds=view.seconds)

    def after_epoch(self, view: View) -> None:
        self._seen.append(("after_epoch", view))


def train(folder: Path, policy: Policy, *, loops: int = 1, lost_at: int | None = None, **settings: Any) -> None:
    draw = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(100, 10, generator=draw))
    with unisono.init(batch_size=32, shards=8, seed=3, run_dir=folder, policies=[policy], **settings) as run:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(10, 20), nn.Dropout(0.1), nn.Linear(20, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        run.prepare(model, optimizer)
        for _ in range(loops):
            for step in run.steps(data, epochs=3):
                if step.number == lost_at:
                    return
                # Before step.run: the rate that a line tells of is not the one between this step and the next.
                optimizer.param_groups[0]["lr"] = 0.1 * 0.98**step.number
                step.run(lambda model, batch: model(batch[0]).square().mean())
        run.finish()


@pytest.fixture
def recorded(tmp_path: Path, one_worker: None) -> tuple[Path, Curious]:
    policy = Curious()
    train(tmp_path / "run", policy, loops=2)  # the second loop goes on where the policy has stopped the first
    return tmp_path / "run", policy


def test_the_same_policy_sees_and_decides_the_same_again(recorded: tuple[Path, Curious]) -> None:
    folder, policy = recorded
    again = Curious()
    replayed = replay(Record.read(folder), [again])
    assert {hook for hook, _ in policy._seen} == {"before_train", "after_step", "after_epoch"}
    assert len(policy._seen) > 12
    assert again._seen == policy._seen
    journal = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    decided = [line for line in journal if line["event"] == "decided"]
    assert [line["value"] for line in decided] == [decision.value for _, decision in replayed.decisions]
    assert [line["why"] for line in decided] == [decision.why for _, decision in replayed.decisions]
    assert [line["step"] for line in decided] == [step for step, _ in replayed.decisions]
    assert "stop" in {line["verb"] for line in decided}


def test_a_policy_that_ends_the_loop_where_the_run_went_on_is_asked_no_more(recorded: tuple[Path, Curious]) -> None:
    folder, _ = recorded

    class Hasty(Policy):
        def after_step(self, view: View) -> None:
            if view.step >= 4:
                self.stop()

    replayed = replay(Record.read(folder), [Hasty()])
    assert replayed.stopped == 4
    assert [(step, one.verb) for step, one in replayed.decisions] == [(4, "stop")]


def test_a_run_that_went_on_from_a_checkpoint_is_replayed_as_one(tmp_path: Path, one_worker: None) -> None:
    folder = tmp_path / "run"
    train(folder, Curious(stops=False), lost_at=9, checkpoints={"every": 8})
    train(folder, Curious(stops=False), checkpoints={"every": 8})
    record = Record.read(folder)
    decided = [line["step"] for line in record.journal if line["event"] == "decided"]
    assert "resumed" in {line["event"] for line in record.journal}
    assert decided.count(9) == 2 * decided.count(3)  # it was taken again
    pairs = compared(valid_decisions(record.journal), replay(record, [Curious(stops=False)]).decisions)
    assert {pair.likeness for pair in pairs} == {"alike"}
    assert [pair.step for pair in pairs] == [0, 3, 3, 6, 6, 9, 9]
