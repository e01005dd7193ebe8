"""Batches on their way to a device. No device is needed: what decides is apart from what copies."""

from collections import OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import TensorDataset

from unisono.data.loading import Processes
from unisono.data.sample_order import KeyedOrder
from unisono.data.shards import ShardSource, ShardsRequest
from unisono.errors import DataError
from unisono.train.loop.prefetch import Prefetched, prefetch, to_device

pytestmark = pytest.mark.unit


class Steps:
    """So many steps are there already; an error stands for a step that cannot be loaded."""

    def __init__(self, *steps: Any, there: int) -> None:
        self._steps = deque(steps)
        self.there = there
        self.closed = False

    def __next__(self) -> list[Any]:
        if not self._steps:
            raise StopIteration
        self.there -= 1
        step = self._steps.popleft()
        if isinstance(step, Exception):
            raise step
        return [step]

    def is_ready(self) -> bool:
        return self.there > 0 and bool(self._steps)

    def close(self) -> None:
        self.closed = True


class NotedStream:
    """Notes what is sent and what is received."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def send(self, shards: list[Any]) -> Any:
        self.events.append(f"send {shards[0]}")
        return shards

    def receive(self, sent: Any) -> list[Any]:
        self.events.append(f"receive {sent[0]}")
        return [f"{sent[0]} on the device"]


def test_the_next_step_is_sent_once_the_present_one_is_handed_out() -> None:
    stream = NotedStream()
    batches = Prefetched(Steps("a", "b", "c", there=3), stream)
    assert next(batches) == ["a on the device"]
    assert stream.events == ["send a", "receive a", "send b"]
    assert next(batches) == ["b on the device"]
    assert stream.events[3:] == ["receive b", "send c"]


def test_a_step_that_is_not_loaded_yet_is_not_waited_for() -> None:
    stream = NotedStream()
    steps = Steps("a", "b", there=1)
    batches = Prefetched(steps, stream)
    next(batches)
    assert stream.events == ["send a", "receive a"]
    assert not batches.is_ready()
    steps.there = 1
    assert batches.is_ready()
    assert next(batches) == ["b on the device"]
    with pytest.raises(StopIteration):
        next(batches)


def test_an_error_belongs_to_the_step_that_could_not_be_loaded() -> None:
    batches = Prefetched(Steps("a", DataError("b is broken"), there=2), NotedStream())
    assert next(batches) == ["a on the device"]
    with pytest.raises(DataError, match="b is broken"):
        next(batches)


def test_what_copies_ends_what_loads() -> None:
    steps = Steps(there=0)
    Prefetched(steps, NotedStream()).close()
    assert steps.closed


def test_on_the_cpu_nothing_is_copied() -> None:
    data = TensorDataset(torch.arange(8.0))
    requests = iter([ShardsRequest(0, (range(4),))])
    (batch,) = next(prefetch(ShardSource(data, KeyedOrder(8, 0)), requests, Processes(0, 1.0), torch.device("cpu")))
    assert to_device(batch, torch.device("cpu"))[0] is batch[0]


class Pair(NamedTuple):
    left: Any
    right: Any


def test_tensors_reach_a_device_in_the_containers_they_came_in() -> None:
    one = torch.zeros(2)
    batch = Pair(OrderedDict(a=[one, "text"], b=(one,)), defaultdict(list, {1: one}))
    moved = to_device(batch, torch.device("meta"))
    assert type(moved) is Pair
    assert type(moved.left) is OrderedDict
    assert type(moved.right) is defaultdict
    assert moved.right.default_factory is list
    assert moved.left["a"][1] == "text"
    assert moved.left["a"][0].is_meta
    assert moved.left["a"][0] is moved.left["b"][0] is moved.right[1], "one tensor stays one"
    assert not one.is_meta, "the batch itself is not changed"
