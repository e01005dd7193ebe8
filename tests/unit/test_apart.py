"""Rounds from strategy to strategy."""

from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from side_by_side import side_by_side
from unisono.errors import WorkerLost
from unisono.sync.all_reduce import AllReduce
from unisono.train import rounds
from unisono.train.apart import Apart
from unisono.train.rounds import Rounds
from unisono.train.workers import Workers

pytestmark = pytest.mark.unit


def test_what_a_strategy_keeps_is_forgotten_in_steps_of_all_reduce() -> None:
    kept = ("model-averaging:momentum=0.9", {"previous": [torch.ones(3)]})
    trained = SimpleNamespace(adaptation=SimpleNamespace(strategy=AllReduce()), prepared=object(), strategy=kept)
    nothing = cast("Any", SimpleNamespace(is_elastic=False))
    apart = Apart(nothing, torch.device("cpu"), cast("Any", trained), nothing, nothing, timeout_s=1.0)
    apart.make()
    assert apart.rounds is None
    assert trained.strategy == ("", {})


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


def test_what_one_had_exchanged_when_a_worker_was_lost_nobody_exchanges_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_synchroniser", lambda strategy, ground: Mock())

    def work(workers: Workers) -> list[int]:
        before: Any = SimpleNamespace(is_open=True, exchanged=6 - workers.rank, synchroniser=None, tally=None)
        mine = Rounds(cast("Any", Mock()), workers, before)
        for step in range(6 - workers.rank, 9):  # one was lost in the exchange that the first had behind it
            mine.step_ends(step, ends_round=False)
        synchroniser: Any = mine.synchroniser
        return [call.args[0] for call in synchroniser.step_ends.call_args_list]

    assert side_by_side(2, work) == [[7, 8], [7, 8]]
