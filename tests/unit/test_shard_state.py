"""What shards keep in the attributes of an object is what one process keeps that computes them in their order."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from copy import deepcopy
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from unisono.errors import UnisonoWarning, Unreadable
from unisono.host.tracebacks import warn
from unisono.integrations.shard_state import MOST_BYTES, ShardState

pytestmark = pytest.mark.unit

SHARDS = 5


class Meter:
    """Adds up."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: float) -> None:
        self.total += value
        self.count += 1


class Script:
    """Keeps all kinds of things."""

    def __init__(self) -> None:
        self.calls, self.total, self.name, self.is_new = 0, 0.5, "begin", True
        self.losses: list[float] = []
        self.outputs: list[Tensor] = []
        self.by_name: dict[str, Any] = {"train": defaultdict(list), "sum": defaultdict(float), "count": Counter()}
        self.newest, self.meter, self.histogram = deque[int](maxlen=3), Meter(), [0, 0, 0]
        self.long = list(range(2000))
        self.same = self.losses
        self.array_total, self.narrow_total = np.float64(1.5), np.float32(0.5)
        self.by_number = dict[int, str]()
        self.pair: tuple[int, ...]
        self.pair, self.ordered, self.history = (0,), OrderedDict[int, float](), {"loss": self.losses}
        self.large = dict.fromkeys(range(2000), 0.0)
        self.loader = iter(())  # nothing that could be kept

    def call(self, shard: int) -> None:
        value = 0.1 * (shard + 1) ** 3
        self.calls += 1
        self.total = value + self.total
        self.total -= np.float64(0.01)
        self.losses.append(value)
        self.outputs += [torch.full((2,), value)]
        self.by_name["train"]["loss"].append(value)
        self.by_name["train"]["calls"] = [self.calls]
        self.by_name["sum"][f"even {shard % 2}"] += value
        self.by_name["count"][shard % 3] += 2
        self.by_name[f"new {shard}"] = [shard]
        self.newest.append(shard)
        self.meter.update(value)
        self.histogram[shard % 3] += 1
        self.long.append(shard)
        self.name, self.is_new = f"shard {shard}", False
        self.last_call = self.calls
        self.array_total += np.float64(value)
        self.narrow_total += np.float32(shard)
        self.pair = (*self.pair[:1], shard)
        self.ordered[shard] = value
        self.by_number[self.calls] = f"call {shard}"
        self.by_number[self.calls + 100] = f"after {shard}"

    def hold(self) -> dict[str, Any]:
        held = {name: value for name, value in vars(self).items() if name != "loader"}
        return held | {"meter": vars(self.meter), "outputs": [tensor.tolist() for tensor in self.outputs]}


def run_of() -> Any:
    def tell(path: str, text: str, *_: Any, breaks: bool) -> None:
        warn(text)

    states = SimpleNamespace(combined=set(), is_trying=False, tell=tell)
    return SimpleNamespace(inside=SimpleNamespace(states=states), device=torch.device("cpu"))


def step(workers: list[tuple[Script, ShardState]], call: Any = Script.call, begin: int = 0) -> list[list[Any]]:
    """Compute a step: neighbouring shards are one worker's; they are numbered from ``begin`` on."""
    notes = list[Tensor]()
    for number, (script, state) in enumerate(workers):
        for shard in range(SHARDS * number // len(workers), SHARDS * (number + 1) // len(workers)):
            with state.of_shard():
                call(script, begin + shard)
                state.say(shard)
        notes += state.notes
    for _, state in workers:
        state.notes = [torch.cat(notes)] if notes else []
    return [state.settle() for _, state in workers]


def workers_of(count: int) -> list[tuple[Script, ShardState]]:
    return [(script, ShardState(run_of(), script, "script")) for script in [Script() for _ in range(count)]]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_all_workers_have_what_one_process_has_that_computes_the_shards_in_order(count: int) -> None:
    serial, workers = Script(), workers_of(count)
    for begin in (0, SHARDS):
        for shard in range(begin, begin + SHARDS):
            serial.call(shard)
        assert step(workers, begin=begin) == [[*range(SHARDS)]] * count
        for script, _ in workers:
            assert script.hold() == serial.hold()
            assert {type(value) for value in (script.calls, script.total, *script.histogram)} == {int, float}


def test_each_shard_finds_what_there_was_when_the_step_began() -> None:
    found = list[Any]()

    def call(script: Script, shard: int) -> None:
        found.append(deepcopy((script.calls, script.losses, dict(script.by_name["train"]), script.meter.count)))
        script.call(shard)

    step(workers_of(2), call)
    assert found == [(0, [], {}, 0)] * SHARDS


def test_what_was_assigned_is_that_of_the_last_shard_that_did_so() -> None:
    def call(script: Script, shard: int) -> None:
        if shard in (1, 2):
            script.calls = script.calls * 2 + shard
            script.losses = [float(shard)]
        if shard == 3:
            del script.name

    for script, _ in (workers := workers_of(3)):
        script.calls, script.losses = 5, [0.0]
    step(workers, call)
    for script, _ in workers:
        assert (script.calls, script.losses, hasattr(script, "name")) == (12, [2.0], False)


def test_what_others_change_behind_the_shards_stays() -> None:
    ((script, state),) = workers_of(1)
    for shard in range(2):
        with state.of_shard():
            script.call(shard)
    state.put_back()
    assert (script.calls, script.losses) == (0, [])
    script.calls += 10
    script.losses.append(9.0)
    state.settle()
    assert script.calls == 12
    assert len(script.losses) == 3


def test_a_worker_that_joins_gets_what_was_changed() -> None:
    workers = workers_of(2)
    step(workers)
    (joiner, state) = workers_of(1)[0]
    state.load(workers[0][1].state())
    assert joiner.hold() == workers[0][0].hold()
    assert type(joiner.by_name["train"]) is defaultdict
    step([*workers, (joiner, state)])
    assert joiner.hold() == workers[0][0].hold()


def test_a_run_that_goes_back_to_its_beginning_has_what_there_was_at_first() -> None:
    ((script, state),) = workers_of(1)
    first = state.state()
    step([(script, state)])
    second, held = state.state(), deepcopy(script.hold())
    step([(script, state)], begin=SHARDS)
    state.load(second)
    assert script.hold() == held
    state.load(first)
    assert script.hold() == Script().hold()
    step([(script, state)])
    assert script.hold() == held


@pytest.mark.parametrize("kind", ["generator", "large", "decimal", "dict"])
def test_what_cannot_be_told_stays_of_each_worker_and_is_named_once(kind: str) -> None:
    def call(script: Script, shard: int) -> None:
        match kind:
            case "decimal":
                script.outputs = Decimal(shard)  # type: ignore[assignment]
            case "dict":
                script.large[-shard - 1] = 1.0
            case _:
                value = random.Random(shard) if kind == "generator" else torch.zeros(MOST_BYTES)
                script.outputs.append(value)  # type: ignore[arg-type]

    ((script, state),) = workers_of(1)
    with pytest.warns(UnisonoWarning, match=r"script\.(outputs|large) changes while shards are computed"):
        step([(script, state)], call)
    step([(script, state)], call)  # a second warning would be an error
    assert len(script.large) == 2000 + SHARDS * (kind == "dict")
    assert kind in ("decimal", "dict") or len(script.outputs) == 2 * SHARDS


class Watched(list[int]):
    """Counts how often somebody goes through it."""

    passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return super().__iter__()


def test_a_long_list_is_gone_through_in_the_first_step_alone() -> None:
    workers = workers_of(1)
    script = workers[0][0]
    script.long = watched = Watched(script.long)
    step(workers)
    before = watched.passes
    step(workers, begin=SHARDS)
    assert before
    assert watched.passes == before
    assert watched[-2 * SHARDS :] == [*range(2 * SHARDS)]


def test_values_that_were_restored_are_no_part_of_what_there_was_at_first() -> None:
    def call(script: Script, shard: int) -> None:
        script.by_name["lists"][0].append(shard)

    ((script, state),) = workers_of(1)
    script.by_name["lists"] = [[]]
    step([(script, state)], call)
    for _ in range(2):
        state.load({})
        assert script.by_name["lists"] == [[]]
        step([(script, state)], call)


def test_a_shard_that_fails_leaves_plain_numbers() -> None:
    ((script, state),) = workers_of(1)
    with pytest.raises(ZeroDivisionError), state.of_shard():
        script.calls += 1
        raise ZeroDivisionError
    assert (type(script.calls), type(script.total), script.histogram) == (int, float, [0, 0, 0])
    assert step([(script, state)]) == [[*range(SHARDS)]]


def test_a_structure_that_holds_itself_is_looked_at_once() -> None:
    def call(script: Script, shard: int) -> None:
        script.by_name["self"]["sum"]["all"] += shard

    (script, state), *others = workers_of(2)
    for each, _ in [(script, state), *others]:
        each.by_name["self"] = each.by_name
    step([(script, state), *others], call)
    assert script.by_name["sum"]["all"] == sum(range(SHARDS))


def test_a_shard_that_is_computed_again_counts_once() -> None:
    ((script, state),) = workers_of(1)
    for again in (False, True, True):
        state._states.is_trying = again
        with state.of_shard():
            script.call(0)
    state._states.is_trying = False
    script.calls, script.losses = 1, script.losses[:1]
    state.settle()
    assert (script.calls, len(script.losses)) == (1, 1)


def test_what_another_worker_sends_is_checked() -> None:
    ((_, state),) = workers_of(1)
    with state.of_shard():
        state.say("word")
    whole = state.notes[0]
    for hostile in (whole[:-1], whole[:7], torch.cat([whole, whole[:20]])):
        state.notes = [hostile]
        with pytest.raises(Unreadable, match="no end"):
            state.settle()
