"""Runs whose policies change them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unisono
from unisono.adapt.view import Policy, View
from unisono.errors import PolicyError

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_worker")]


class Restless(Policy):
    """Changes something at every third step."""

    def __init__(self) -> None:
        self.changes = 0
        self.heard: list[str] = []

    def before_train(self, view: View) -> None:
        self.heard.append("before_train")
        self.set_batch_size(32)

    def after_step(self, view: View) -> None:
        if view.step % 3 == 0:
            self.changes += 1
            self.set_batch_size(16 + 8 * (self.changes % 5))
            self.set_learning_rate(view.learning_rate * (1.1 if self.changes % 2 else 0.95), changes=self.changes)

    def after_epoch(self, view: View) -> None:
        self.heard.append(f"after_epoch {view.epoch}")

    def after_train(self, view: View) -> None:
        self.heard.append("after_train")


def data() -> torch.utils.data.TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset(torch.randn(200, 10, generator=draw), torch.arange(200) % 3)


def loss_of(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


Train = Callable[..., tuple[str, list[dict[str, Any]]]]


@pytest.fixture
def train(tmp_path: Path) -> Train:
    def run_it(*policies: Policy, folder: str = "run", **settings: Any) -> tuple[str, list[dict[str, Any]]]:
        path = tmp_path / folder
        with unisono.init(batch_size=64, shards=8, seed=3, run_dir=path, policies=policies, **settings) as run:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(10, 20), nn.LayerNorm(20), nn.ReLU(), nn.Linear(20, 3))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            run.prepare(model, optimizer)
            scheduler = run.register("scheduler", torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9))
            for step in run.steps(data(), epochs=3):
                step.run(loss_of)
                scheduler.step()
            digest = run.finish()
        return digest, [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]

    return run_it


def test_batches_change_between_steps_and_every_epoch_uses_every_sample_once(train: Train) -> None:
    policy = Restless()
    _, lines = train(policy)
    sizes = [line["batch_size"] for line in lines]
    assert sizes[:8] == [32, 32, 32, 24, 24, 24, 32, 32]
    for epoch in range(3):
        assert sum(line["batch_size"] for line in lines if line["epoch"] == epoch) == 200
    assert [line["position"] for line in lines] == [sum(sizes[:number]) for number in range(len(sizes))]
    assert policy.heard == ["before_train", "after_epoch 0", "after_epoch 1", "after_epoch 2", "after_train"]


@pytest.mark.parametrize("steps", [1, 7, 11])
def test_a_run_that_was_cut_off_goes_on_with_what_its_policies_had_changed(
    steps: int, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, lines = train(Restless())
    monkeypatch.setenv("UNISONO_STOP_AFTER", f"{steps}")
    cut, _ = train(Restless(), folder="cut", checkpoints={"every": 1})
    monkeypatch.delenv("UNISONO_STOP_AFTER")
    again, found = train(Restless(), folder="cut")
    assert cut != whole
    assert again == whole
    assert [line["batch_size"] for line in found] == [line["batch_size"] for line in lines]


class Stops(Policy):
    def after_step(self, view: View) -> None:
        if view.step == 2:
            self.checkpoint()
            self.stop(loss=view.metrics["loss"])


def test_a_policy_ends_the_loop_and_asks_for_a_checkpoint_and_the_journal_says_why(
    train: Train, tmp_path: Path
) -> None:
    _, lines = train(Stops())
    assert len(lines) == 2
    journal = [json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    decided = [line for line in journal if line["event"] == "decided"]
    assert [(line["step"], line["policy"], line["verb"]) for line in decided] == [
        (2, "stops", "checkpoint"),
        (2, "stops", "stop"),
    ]
    assert decided[1]["why"] == {"loss": lines[-1]["loss"]}
    assert any(line["event"] == "checkpoint" and line["step"] == 2 for line in journal)


def test_a_run_that_goes_on_from_where_a_policy_has_stopped_a_loop_does_not_go_on_with_it(tmp_path: Path) -> None:
    def begin() -> tuple[unisono.Run, int]:
        run = unisono.init(batch_size=64, shards=8, seed=3, run_dir=tmp_path / "run", policies=[Stops()])
        model = nn.Linear(10, 3)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return run, sum(step.run(loss_of) is not None for step in run.steps(data(), epochs=3))

    run, steps = begin()  # it leaves a checkpoint at the boundary where it stops, and is lost right after
    run.close()
    assert steps == 2
    again, more = begin()
    assert more == 0
    again.finish()
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == 2


class Rates(Policy):
    """Changes the rate now and then, and remembers what it saw."""

    def __init__(self) -> None:
        self._seen: list[float] = []

    def after_step(self, view: View) -> None:
        self._seen.append(view.learning_rate)
        if view.step in (2, 6):
            self.set_learning_rate(view.learning_rate * 3)


def test_lines_tell_the_rate_that_policies_saw_and_what_they_had_made_of_the_scripts(train: Train) -> None:
    policy = Rates()
    _, lines = train(policy)
    assert [line["learning_rate"] for line in lines] == policy._seen
    assert [line["lr_factor"] for line in lines] == pytest.approx([1, 1, 3, 3, 3, 3, 9, 9, 9, 9, 9, 9])
    after = [line["lr"] for line in lines[1:]]  # the scheduler's work, which the loop's body does last
    factors = [line["lr_factor"] for line in lines]
    assert policy._seen[:-1] == pytest.approx([rate * by for rate, by in zip(after, factors, strict=False)])


class Late(Policy):
    def after_train(self, view: View) -> None:
        self.set_batch_size(8)


def test_what_a_policy_asks_for_after_the_training_changes_nothing(train: Train, tmp_path: Path) -> None:
    train(Late())
    assert '"decided"' not in (tmp_path / "run" / "journal.jsonl").read_text()


class Greedy(Policy):
    def after_step(self, view: View) -> None:
        self.set_batch_size(10 * view.batch_size)


def test_a_batch_that_the_data_set_cannot_fill_is_refused(train: Train) -> None:
    with pytest.raises(PolicyError, match="the policy greedy wants batches of 640 samples, and the data set has 200"):
        train(Greedy())


def test_policies_come_from_the_environment_too(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_POLICIES", "noise-scale")
    _, lines = train()
    assert all("gradient_variance" in line and line["batch_size"] for line in lines)


class Sees(Policy):
    """Notes the batches and shards that there were."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def after_step(self, view: View) -> None:
        self.seen.append([view.batch_size, view.shards, view.base_shards])


@pytest.mark.filterwarnings("ignore:BatchNorm with")
@pytest.mark.parametrize("shards", [1, 4])
def test_no_shard_is_ever_larger_than_the_limit_while_the_batch_grows_and_shrinks(shards: int, tmp_path: Path) -> None:
    limited = unisono.BatchSizeSchedule({1: 4, 2: 0.5, 3: 1.5}, largest_shard=6)
    given: list[int] = []

    def loss_fn(model: Any, batch: Any) -> Tensor:
        given.append(len(batch[0]))
        return loss_of(model, batch)

    sees = Sees()
    with unisono.init(batch_size=16, shards=shards, run_dir=tmp_path / "run", policies=[limited, sees]) as run:
        model = nn.Linear(10, 3)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in run.steps(data(), epochs=4):
            step.run(loss_fn)
        run.finish()
    assert sum(given) == 4 * 200
    assert max(given) == 6
    assert {(batch, base) for batch, _, base in sees.seen} == {(16, shards), (64, shards), (32, shards), (48, shards)}


def test_the_journal_and_the_view_have_the_number_of_shards(train: Train, tmp_path: Path) -> None:
    class Once(Policy):
        def after_step(self, view: View) -> None:
            if view.step == 2:
                self.set_batch_size(64, shards=32)

    sees = Sees()
    train(Once(), sees)
    assert [sees.seen[1], sees.seen[2]] == [[64, 8, 8], [64, 32, 8]]
    journal = [json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    (decided,) = (line for line in journal if line["event"] == "decided")
    assert (decided["value"], decided["shards"]) == (64, 32)
