"""Compares state that nothing keeps: between workers when a loop begins, and with a checkpoint or those one joins."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from unisono.changes import GENERATORS, Changed, Look, state_of
from unisono.data.content import digest_of
from unisono.data.sample_order import Order
from unisono.host.tracebacks import script_variables
from unisono.plan.batches import Batches
from unisono.train.group.collectives import CollectiveCalls
from unisono.train.group.workers import Workers
from unisono.train.model.prepared import Prepared
from unisono.train.state.registry import Attribute, Registry
from unisono.train.state.unnamed import UnnamedStates
from unisono.train.step.listeners import Listener
from unisono.train.step.step import Call

MOST_PATHS = 256
"""The most paths that workers compare."""

MOST_TOLD = 8
"""The most paths that differ of which workers tell each other the values."""

MOST_S = 0.02
"""Seconds after which no further tensors and arrays are read."""

DIFFERS = (
    "{path} is {first} on rank 0 and {other} on rank {rank}: workers would compute otherwise than one worker alone. "
    "Set it on all of them alike, before the loop and by nothing that differs between processes"
)

KEEP_DATA = 'run.register("{name}", …) keeps what has state_dict and load_state_dict in checkpoints'
"""How a data set's state is kept."""

STALE = (
    "{path} is {now} here and was {then} {where}: what the loop's body has done in the steps before is not done again. "
    "Derive it from step.epoch or step.number in each step"
)


class LoopWatch(Listener):
    """Compares what can be reached from models and data, and is kept nowhere.

    Attributes:
        changed: what loop bodies have changed since the loop began, by path. It is part of checkpoints, and other
            workers get it; where it is set, it is compared with what is here.
    """

    def __init__(self, states: UnnamedStates, registry: Registry) -> None:
        self._states = states
        self._begun: Look | None = None
        self._awaited: dict[str, str] = {}
        self._words_begun: dict[str, str | None] = {}  # what is awaited, as it is when the loop begins here
        self._loss_code: Any = None
        registry.add("unnamed", Attribute(self, "changed", dict[str, str]), within=(), when=("early",), optional=True)

    @property
    def changed(self) -> dict[str, str]:
        """What has changed since the loop began, in words by path; or what is still to be compared."""
        if self._begun is None:
            return self._awaited
        pairs = [(changed.path, said(changed.place.value)) for changed in self._changes(self._begun)]
        return {path: words for path, words in pairs if words is not None}

    @changed.setter
    def changed(self, value: dict[str, str]) -> None:
        self._awaited, self._begun = value, None

    def tell(self, path: str, text: str) -> None:
        """Tell of state that a data set has of its own."""
        self._states.tell(path, text, KEEP_DATA)

    def compare(self, dataset: Any, collectives: CollectiveCalls) -> None:
        """Compare with the other workers before a loop. Collective.

        Raises:
            UnnamedState: something differs, and the run is strict.
        """
        self._states.data = parts_of(dataset)
        words = self._words()
        own = {path: f"{zlib.crc32(text.encode()):08x}" for path, text in words.items()}

        def compared(workers: Workers) -> list[Any]:
            if workers.world_size == 1:
                return [own, [], []]
            theirs = workers.broadcast(own)
            differing = [path for path in own if theirs.get(path, own[path]) != own[path]]
            paths = sorted({path for paths in workers.gather_json(differing[:MOST_TOLD]) for path in paths})[:MOST_TOLD]
            values = workers.gather_json([words.get(path) for path in paths]) if paths else []
            return [dict(theirs), paths, values]

        theirs, paths, values = collectives.together(compared)
        for number, path in enumerate(paths):
            self._tell_of_ranks(path, [row[number] for row in values])
        for path in [path for path in own if theirs.get(path, own[path]) != own[path] and path not in paths]:
            text = STALE.format(
                path=path, now=words[path], then="another one", where="on the workers that this one joins"
            )
            self._states.tell(path, text, is_own=True)

    def prepared(self, prepared: Prepared, step: int) -> None:
        """Note the models: their weights and buffers are kept."""
        self._states.prepared(prepared)

    def loop_begins(self, number: int, batches: Batches, order: Order) -> None:
        """Forget the loop before."""
        self._begun = None

    def enter(self, *, is_under_way: bool) -> None:
        """Begin a loop, or go on in its middle, where data are compared with what they were then.

        Raises:
            UnnamedState: something differs, and the run is strict.
        """
        self._begun, self._loss_code = self._states.look(), None
        if not is_under_way:
            self._awaited = {}
        for path in [path for path in self._awaited if path.partition(".")[0] in self._states.data]:
            self._tell_if_stale(path, self._awaited.pop(path), self._begun)
        self._begun.let_go()
        if self._awaited:
            variables, heads = script_variables(), {path.partition(".")[0] for path in self._awaited}
            places = self._states.look(**{name: variables[name] for name in heads if name in variables}).places
            self._words_begun = {path: said(places[path][0].value) for path in self._awaited if path in places}

    def call_begins(self, call: Call, shards: Sequence[int], generation: int) -> None:
        """Note the loss function, and compare the rest with what it was, but for what the body has set before."""
        self._states.loss_fn, begun = call.loss_fn, self._begun
        code = getattr(call.loss_fn, "__code__", type(call.loss_fn))
        if begun is None or code is self._loss_code:
            return
        self._loss_code = code
        now = self._states.look()
        begun.places = {**now.places, **begun.places}  # with the variables of the loss function
        for path, then in self._awaited.items():
            if path in now.places and said(now.places[path][0].value) == self._words_begun.get(path):
                self._tell_if_stale(path, then, now)
        self._awaited = {}

    def _tell_if_stale(self, path: str, then: str, look: Look) -> None:
        if path in look.places:
            now = said(look.places[path][0].value)
            if now is not None and now != then:
                text = STALE.format(path=path, now=now, then=then, where="in the checkpoint or on other workers")
                self._states.tell(path, text, is_own=True)

    def _tell_of_ranks(self, path: str, column: Sequence[str | None]) -> None:
        ranks = range(len(column))
        if None in column or list(column) in ([repr(rank) for rank in ranks], [repr(rank == 0) for rank in ranks]):
            return
        rank = next((rank for rank in ranks if column[rank] != column[0]), 0)
        self._states.tell(path, DIFFERS.format(path=path, first=column[0], other=column[rank], rank=rank))

    def _changes(self, begun: Look) -> list[Changed]:
        return [
            changed
            for changed in begun.changed_until(self._states.look())
            if changed.kind != "record" and not changed.is_known and changed.path not in self._states.by_shards
        ][:MOST_PATHS]

    def _words(self) -> dict[str, str]:
        """What is to be the same on all workers, in words by path: data first, then the script's own attributes."""
        words, begun = dict[str, str](), perf_counter()
        look = self._states.look()
        paths = sorted(look.places, key=lambda path: path.partition(".")[0] not in self._states.data)
        for path in paths:
            place, signature = look.places[path]
            changed = Changed(path, place, "value")
            if not place.is_script or changed.is_known or changed.is_of_process or path in self._states.by_shards:
                continue
            if signature[0] == "tensor" and perf_counter() - begun > MOST_S:
                continue
            if (text := said(place.value)) is not None:
                words[path] = text
            if len(words) == MOST_PATHS:
                break
        return words


def parts_of(data: Any) -> dict[str, Any]:
    """The data set and the function that collates, by name, of what a script gives to a loop.

    Samplers are left out: all workers ask them alike, also for epochs that a run which resumes has behind it.
    """
    return (
        {"dataset": data.dataset, "collate_fn": data.collate_fn} if isinstance(data, DataLoader) else {"dataset": data}
    )


def said(value: Any) -> str | None:
    """A value in words, which are equal where values are; None for what is not compared."""
    match value:
        case int() if value == os.getpid():
            return None
        case None | bool() | int() | float() | complex() | np.generic():
            return repr(value)
        case str():
            return None if "/" in value or len(value) > 80 else repr(value)
        case torch.Tensor() | np.ndarray():
            return f"{type(value).__name__} of {list(value.shape)} with digest {digest_of(value)}"
        case list() | tuple() if value and isinstance(value[0], bool | int | float):
            return f"{type(value).__name__} of {len(value)} with digest {digest_of(value)}"
    return f"in state {state_of(value):08x}" if isinstance(value, GENERATORS) else None
