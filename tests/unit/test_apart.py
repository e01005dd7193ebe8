"""Rounds from strategy to strategy."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock, call

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from side_by_side import PATIENCE_S, side_by_side
from unisono.errors import WorkerLost
from unisono.job import Job
from unisono.plan.batches import Batches, Position
from unisono.sync.averaging import DiLoCo, LocalSGD
from unisono.sync.strategy import AllReduce
from unisono.train.group.workers import Workers
from unisono.train.model.prepared import Prepared
from unisono.train.step.engine import Call, Clip
from unisono.train.strategies import rounds
from unisono.train.strategies.apart import Apart
from unisono.train.strategies.rounds import Recipe, Rounds, Tally

pytestmark = pytest.mark.unit


def test_what_a_strategy_keeps_is_forgotten_in_steps_of_all_reduce() -> None:
    kept = ("model-averaging:momentum=0.9", {"previous": [torch.ones(3)]})
    trained = SimpleNamespace(adaptation=SimpleNamespace(strategy=AllReduce()), prepared=object(), strategy=kept)
    nothing = cast("Any", SimpleNamespace(is_elastic=False))
    apart = Apart(nothing, torch.device("cpu"), cast("Any", trained), nothing, nothing, timeout_s=1.0)
    apart.make()
    assert apart.rounds is None
    assert trained.strategy == ("", {})


def test_whoever_watches_a_worker_sees_it_get_on_with_each_shard_that_it_computes_by_itself() -> None:
    def work(workers: Workers) -> list[tuple[bool, int]]:
        def loss_fn(model: Any, batch: Tensor) -> Tensor:
            seen.append((workers.is_called, workers.ticks))
            return F.mse_loss(model(batch), batch)

        seen = list[tuple[bool, int]]()
        model = nn.Linear(3, 3)
        prepared = Prepared.of(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
        job = Job.create(batch_size=8, shards=4)
        recipe = Recipe(LocalSGD(), job, prepared, torch.device("cpu"), lambda optimizers: nullcontext(), PATIENCE_S)
        mine = Rounds(recipe, workers, None)
        batch = Batches(8, 8, 4).at(Position())
        shards = [torch.ones(2, 3)] * 4
        mine.train(Call(0, 0, batch, shards, loss_fn, prepared.optimizers, Clip()))
        mine.close()
        return [*seen, (workers.is_called, workers.ticks)]

    for seen in side_by_side(2, work):
        assert seen == [*((True, number) for number in range(4)), (False, 4)]


class Recorded:
    """Rounds in which a worker is lost as often as is said, and what was asked of them."""

    def __init__(self, losses: int) -> None:
        self.losses, self.is_open, self.steps = losses, False, list[int]()

    def begin(self) -> None:
        self._lose()
        self.is_open = True

    def step_ends(self, step: int, *, ends_round: bool) -> None:
        self._lose()
        self.steps.append(step)

    def _lose(self) -> None:
        self.losses -= 1
        if self.losses >= 0:
            raise WorkerLost("gone")


def apart_with(losses: int) -> tuple[Apart, Recorded, Mock]:
    acts, membership = Mock(), Mock(is_elastic=True)
    membership.workers.is_aborted = False
    apart = Apart(cast("Any", None), torch.device("cpu"), cast("Any", None), membership, acts, timeout_s=1.0)
    recorded = Recorded(losses)
    apart._rounds = cast("Any", recorded)
    return apart, recorded, acts


def test_whoever_loses_a_worker_as_a_step_begins_is_in_the_round_with_the_others_afterwards() -> None:
    apart, recorded, acts = apart_with(losses=2)
    apart._with_others(lambda rounds: rounds.begin())
    assert recorded.is_open
    assert acts.regroup.call_count == 2


def test_an_exchange_in_which_a_worker_is_lost_is_made_with_those_who_are_left() -> None:
    apart, recorded, _ = apart_with(losses=1)
    apart.step_ends(7, ends_round=False)
    assert recorded.steps == [7]


def broken_off(*, is_open: bool, exchanged: int = 4) -> Any:
    return SimpleNamespace(is_open=is_open, exchanged=exchanged, synchroniser=object(), tally=Tally())


@pytest.mark.parametrize("is_open", [(True, False), (False, True), (False, False)])
def test_whoever_had_not_begun_the_round_comes_along_with_those_who_had(
    monkeypatch: pytest.MonkeyPatch, is_open: tuple[bool, bool]
) -> None:
    monkeypatch.setattr(rounds, "_synchroniser", lambda strategy, ground: Mock())
    before = [broken_off(is_open=each) for each in is_open]

    def work(workers: Workers) -> Rounds:
        return Rounds(cast("Any", Mock()), workers, before[workers.rank])

    for rank, mine in enumerate(side_by_side(2, work)):
        assert (mine.goes_on, mine.is_open) == (any(is_open), any(is_open))
        synchroniser: Any = mine.synchroniser
        assert synchroniser.follow.call_args_list == ([call(before[rank].synchroniser)] if any(is_open) else [])
        assert synchroniser.settle.called == any(is_open)


def test_a_step_in_whose_body_all_came_together_exchanges_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_synchroniser", lambda strategy, ground: Mock(figures=dict))

    def work(workers: Workers) -> list[int]:
        mine = Rounds(cast("Any", Mock()), workers, None)
        for step in range(3):
            mine.begin()
            if step == 1:  # an evaluation
                mine.end(step, {})()
            mine.step_ends(step, ends_round=False)
        synchroniser: Any = mine.synchroniser
        return [one.args[0] for one in synchroniser.step_ends.call_args_list]

    assert side_by_side(2, work) == [[0, 2], [0, 2]]


def test_rounds_of_another_strategy_are_not_gone_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Rounds | None] = []

    def made(recipe: object, workers: Workers, before: Rounds | None) -> Any:
        seen.append(before)
        return Mock(goes_on=False)

    monkeypatch.setattr("unisono.train.strategies.apart.Rounds", made)
    trained = SimpleNamespace(
        adaptation=SimpleNamespace(strategy=LocalSGD(), scaled=None), prepared=object(), strategy=("", {})
    )
    membership = Mock(is_elastic=True)
    apart = Apart(cast("Any", None), torch.device("cpu"), cast("Any", trained), membership, Mock(), timeout_s=1.0)
    for strategy in (LocalSGD(), LocalSGD(), DiLoCo()):
        before: Any = Mock(strategy=strategy)
        apart._rounds, apart._trained.adaptation.strategy = before, cast("Any", LocalSGD())
        apart.drop()
        apart.make()
    assert [None if one is None else one.strategy for one in seen] == [LocalSGD(), LocalSGD(), None]


def test_what_one_had_exchanged_when_a_worker_was_lost_nobody_exchanges_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_synchroniser", lambda strategy, ground: Mock())

    def work(workers: Workers) -> list[int]:
        before = broken_off(is_open=True, exchanged=6 - workers.rank)
        mine = Rounds(cast("Any", Mock()), workers, before)
        mine.begin()
        for step in range(6 - workers.rank, 9):  # one was lost in the exchange that the first had behind it
            mine.step_ends(step, ends_round=False)
        synchroniser: Any = mine.synchroniser
        return [one.args[0] for one in synchroniser.step_ends.call_args_list]

    assert side_by_side(2, work) == [[7, 8], [7, 8]]
