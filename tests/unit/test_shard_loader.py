"""A loop's batches are those of the shards that this worker has now."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from unisono.adapt.view import BatchShape
from unisono.data.shards import ShardsRequest
from unisono.plan.batches import Position
from unisono.train.loop.course import Part, ShardLoader

pytestmark = pytest.mark.unit


class Drawn:
    """Loads by drawing random numbers, as augmentation does."""

    def __init__(self, requests: Iterator[ShardsRequest]) -> None:
        self.requests = requests
        self.closed = False

    def __next__(self) -> list[Any]:
        torch.rand(3)
        return [(next(self.requests).places)]

    def is_ready(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True


class Supplied:
    """A loader whose shards can be changed."""

    def __init__(self) -> None:
        self.shards = range(2)
        self.loaded: list[Drawn] = []
        self.size = 20
        self.cut = 4
        part = lambda: (self.shards, BatchShape(self.size, self.cut))  # noqa: E731
        self.loader = ShardLoader(self._load, self._requests, part)

    def _load(self, requests: Iterator[ShardsRequest]) -> Drawn:
        self.loaded.append(Drawn(requests))
        return self.loaded[-1]

    def _requests(self, position: Position, part: Part) -> Iterator[ShardsRequest]:
        shards, shape = part
        for step in range(position.step, 10):
            places = (shape.samples // 2 * step + shard for shard in shards)
            yield ShardsRequest(0, tuple(range(place, place + 1) for place in places))

    def at(self, step: int) -> list[int]:
        ((*places,),) = self.loader.at(Position(step=step))
        return [place.start for place in places]


def test_steps_come_in_order_and_the_same_step_comes_again_as_it_was() -> None:
    supplied = Supplied()
    assert [supplied.at(0), supplied.at(0), supplied.at(1), supplied.at(1)] == [[0, 1], [0, 1], [10, 11], [10, 11]]
    assert len(supplied.loaded) == 1


def test_whoever_is_given_other_shards_in_a_step_gets_theirs_and_goes_on_with_them() -> None:
    supplied = Supplied()
    supplied.at(0)
    supplied.at(1)
    supplied.shards = range(1, 4)
    assert [supplied.at(1), supplied.at(2)] == [[11, 12, 13], [21, 22, 23]]
    assert [one.closed for one in supplied.loaded] == [True, False]


def test_loading_a_step_again_draws_nothing_from_the_scripts_generators() -> None:
    supplied = Supplied()
    supplied.at(0)
    before = torch.get_rng_state()
    supplied.shards = range(1)
    supplied.at(0)
    assert torch.equal(before, torch.get_rng_state())


def test_closing_ends_what_loads() -> None:
    supplied = Supplied()
    supplied.at(0)
    supplied.loader.close()
    assert supplied.loaded[0].closed


def test_a_batch_that_grows_is_loaded_anew() -> None:
    supplied = Supplied()
    supplied.at(0)
    supplied.size = 40
    assert [supplied.at(1), supplied.at(2)] == [[20, 21], [40, 41]]
    assert [one.closed for one in supplied.loaded] == [True, False]


def test_a_batch_that_is_cut_finer_is_loaded_anew_though_its_size_and_this_workers_numbers_stay() -> None:
    supplied = Supplied()
    supplied.at(0)
    supplied.cut = 8
    supplied.at(1)
    assert [one.closed for one in supplied.loaded] == [True, False]
