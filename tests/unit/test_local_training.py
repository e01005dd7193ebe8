"""Rounds from strategy to strategy."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unisono
from side_by_side import PATIENCE_S, side_by_side
from unisono.errors import WorkerLost
from unisono.job import Job
from unisono.plan.batches import Batches, Position
from unisono.sync import DiLoCo, LocalSGD, Strategy
from unisono.train.config.run_config import Connection, RunConfig
from unisono.train.group.workers import Workers
from unisono.train.model.prepared import Prepared
from unisono.train.state.policy_state import PolicyState
from unisono.train.state.trained import Trained
from unisono.train.step.listeners import Listeners
from unisono.train.step.step import Call, Clip, Step
from unisono.train.strategies.local_rounds import LocalRounds, RoundProgress, begin_local_rounds
from unisono.train.strategies.local_training import LocalTraining
from unisono_lab.faults.injector import flip

pytestmark = pytest.mark.unit

Start = Callable[..., unisono.Run]


JOB = Job.create(batch_size=8, shards=4)
CONFIG = RunConfig(JOB, torch.device("cpu"), connection=Connection(timeout_s=PATIENCE_S))


def prepared_model() -> Prepared:
    model = nn.Linear(3, 3)
    return Prepared.of(model, [torch.optim.SGD(model.parameters(), lr=0.1)])


def trained_under(strategy: Strategy) -> Trained:
    trained = Trained({}, PolicyState((), JOB.require_batch_size("policies"), JOB.shards, strategy=strategy))
    trained.prepared = prepared_model()
    return trained


def test_what_a_strategy_keeps_is_forgotten_in_steps_of_all_reduce(start: Start) -> None:
    run = start()
    run.inside.trained.strategy = ("model-averaging:momentum=0.9", {"previous": [torch.ones(3)]})
    model = nn.Linear(3, 3)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert not run.inside.steps.computer.has_own_weights
    assert run.inside.trained.strategy == ("", {})


@pytest.mark.parametrize("struck", [0, 1, 2])
def test_a_bit_that_flips_in_a_partial_sum_of_one_worker_leaves_no_trace_in_its_weights(struck: int) -> None:
    def work(workers: Workers) -> list[list[float]]:
        torch.manual_seed(0)
        trained, seen = trained_under(LocalSGD(every=4)), list[Tensor]()
        rounds = begin_local_rounds(CONFIG, trained, workers, None)

        def strike(what: str, values: Tensor) -> None:
            seen.append(values)
            if len(seen) == 1 + struck:
                flip(values, 1, 20)

        for number in range(3):
            rounds.begin()
            batch = Batches.even(8, 8, 4).at(Position(step=number))
            shards = [torch.ones(len(batch.shard(shard)), 3) * (1 + shard + number) for shard in range(4)]
            call = Call(number, 0, batch, shards, loss_of, trained.require_prepared().optimizers, Clip())
            rounds._engine_for(4).witness = strike if number == 1 and struck >= 0 and is_struck[0] else None
            rounds.train(call)
        rounds.close()
        return [each.tolist() for each in trained.require_prepared().parameters.values()]

    def loss_of(model: Any, batch: Tensor) -> Tensor:
        return F.mse_loss(model(batch), torch.zeros(len(batch), 3))

    is_struck = [False]
    expected = side_by_side(1, work, shards=4)
    is_struck[0] = True
    assert side_by_side(1, work, shards=4) == expected


def test_whoever_watches_a_worker_sees_it_get_on_with_each_shard_that_it_computes_by_itself() -> None:
    def work(workers: Workers) -> list[tuple[bool, int]]:
        def loss_fn(model: Any, batch: Tensor) -> Tensor:
            seen.append((workers.is_called, workers.ticks))
            return F.mse_loss(model(batch), batch)

        seen = list[tuple[bool, int]]()
        trained = trained_under(LocalSGD())
        mine = begin_local_rounds(CONFIG, trained, workers, None)
        batch = Batches.even(8, 8, 4).at(Position())
        shards = [torch.ones(2, 3)] * 4
        mine.train(Call(0, 0, batch, shards, loss_fn, trained.require_prepared().optimizers, Clip()))
        mine.close()
        return [*seen, (workers.is_called, workers.ticks)]

    for seen in side_by_side(2, work):
        assert seen == [*((True, number) for number in range(4)), (False, 4)]


class Recorded:
    """Rounds in which a worker is lost as often as is said, and what was asked of them."""

    def __init__(self, losses: int) -> None:
        self.losses, self.is_open, self.steps = losses, False, list[int]()
        self.strategy = LocalSGD()
        self.is_resumed = True

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


def steps_with(losses: int) -> tuple[LocalTraining, Recorded, Mock]:
    acts, membership = Mock(), Mock(is_elastic=True)
    membership.workers.is_aborted = False
    recorded = Recorded(losses)
    begin = Mock(return_value=recorded)
    trained = trained_under(LocalSGD())
    steps = LocalTraining(CONFIG, trained, membership, Listeners([]), begin)
    steps.make(membership.workers)
    return steps, recorded, acts


def test_whoever_loses_a_worker_as_a_step_begins_is_in_the_round_with_the_others_afterwards() -> None:
    steps, recorded, acts = steps_with(losses=2)
    steps._with_others(acts, lambda rounds: rounds.begin())
    assert recorded.is_open
    assert acts.regroup.call_count == 2


def test_an_exchange_in_which_a_worker_is_lost_is_made_with_those_who_are_left() -> None:
    steps, recorded, acts = steps_with(losses=1)
    batches = Batches.even(16, 8, 4)
    step = Step(Position(), batches.at(Position()), list, Mock())
    assert not steps.step_ends(step, acts, is_due=False)
    assert recorded.steps == [0]


TRAINED = trained_under(LocalSGD())


def broken_off(*, is_open: bool, exchanged: int = 4) -> Any:
    return SimpleNamespace(is_open=is_open, exchanged=exchanged, synchroniser=object(), progress=RoundProgress())


@pytest.mark.parametrize("is_open", [(True, False), (False, True), (False, False)])
def test_whoever_had_not_begun_the_round_comes_along_with_those_who_had(
    is_open: tuple[bool, bool],
) -> None:
    before = [broken_off(is_open=each) for each in is_open]

    def work(workers: Workers) -> LocalRounds:
        return LocalRounds(CONFIG, TRAINED, workers, Mock(), before[workers.rank])

    for rank, mine in enumerate(side_by_side(2, work)):
        assert (mine.is_resumed, mine.is_open) == (any(is_open), any(is_open))
        synchroniser: Any = mine.synchroniser
        assert synchroniser.follow.call_args_list == ([call(before[rank].synchroniser)] if any(is_open) else [])
        assert synchroniser.synchronise.called == any(is_open)


def test_a_step_in_whose_body_all_came_together_exchanges_nothing_more() -> None:
    def work(workers: Workers) -> list[int]:
        mine = LocalRounds(CONFIG, TRAINED, workers, Mock(figures=dict))
        for step in range(3):
            mine.begin()
            if step == 1:  # an evaluation
                mine.end(step, {})()
            mine.step_ends(step, ends_round=False)
        synchroniser: Any = mine.synchroniser
        return [one.args[0] for one in synchroniser.step_ends.call_args_list]

    assert side_by_side(2, work) == [[0, 2], [0, 2]]


def test_rounds_of_another_strategy_are_not_gone_on_with() -> None:
    begin = Mock(
        side_effect=lambda config, trained, workers, before: Mock(
            strategy=trained.policy_state.strategy, is_resumed=True
        )
    )
    trained, membership = trained_under(LocalSGD()), Mock(is_elastic=True)
    steps = LocalTraining(CONFIG, trained, membership, Listeners([]), begin)
    for strategy in (LocalSGD(), LocalSGD(), DiLoCo(), LocalSGD()):
        trained.policy_state.strategy = strategy
        steps.drop()
        steps.make(membership.workers)
    before = [made.args[3] for made in begin.call_args_list]
    assert [None if one is None else one.strategy for one in before] == [None, LocalSGD(), None, None]


def test_what_one_had_exchanged_when_a_worker_was_lost_nobody_exchanges_again() -> None:
    def work(workers: Workers) -> list[int]:
        before = broken_off(is_open=True, exchanged=6 - workers.rank)
        mine = LocalRounds(CONFIG, TRAINED, workers, Mock(), before)
        mine.begin()
        for step in range(6 - workers.rank, 9):  # one was lost in the exchange that the first had behind it
            mine.step_ends(step, ends_round=False)
        synchroniser: Any = mine.synchroniser
        return [one.args[0] for one in synchroniser.step_ends.call_args_list]

    assert side_by_side(2, work) == [[7, 8], [7, 8]]
