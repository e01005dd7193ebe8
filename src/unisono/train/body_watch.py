"""Finds what the body of a script's loop carries from one turn to the next: the number of turns depends on workers."""

from __future__ import annotations

import dis
import re
import sys
from collections.abc import Callable, Collection, Iterator
from functools import lru_cache
from traceback import walk_stack
from types import CodeType, FrameType
from typing import Any

from torch import Tensor, nn

from unisono.host.tracebacks import is_of_script
from unisono.train.state.unnamed import UnnamedStates

FIRST, EVERY = 3, 64
"""The first three steps are watched, and each 64th."""

ACCESS = re.compile(r"(LOAD|STORE)_(?:NAME|FAST|GLOBAL|DEREF)")
"""In the name of an instruction, which may access several variables."""


class BodyWatch:
    """Compares the variables that a body reads before it sets them, around turns that do not count for the step.

    Weights of modules that are not trained, and tensors that a body writes into, are compared by the writes that torch
    has counted. ``known`` returns the ids of the modules and parameters that the run has, and ``refused`` messages.
    """

    def __init__(
        self, states: UnnamedStates, known: Callable[[], Collection[int]], refused: Callable[..., str]
    ) -> None:
        self._states, self._known, self._refused, self._steps = states, known, refused, 0
        self._is_watched = False
        self._frame: FrameType | None = None
        self._before: dict[str, Any] = {}

    def step_begins(self) -> None:
        """Begin a step."""
        self._is_watched = self._steps < FIRST or self._steps % EVERY == 0
        self._steps += 1

    def turn_begins(self) -> None:
        """Note what there is as the body begins a turn."""
        self._frame, self._before = None, {}
        if self._is_watched and (frame := _of_script()) is not None:
            self._frame, self._before = frame, dict(_marks(frame, self._known()))

    def turn_ends(self, *, counts: bool) -> None:
        """Compare that with what there is as it ends.

        Raises:
            UnnamedState: something else is there, the turn does not count, and the run is strict.
        """
        frame, before, self._frame = self._frame, self._before, None
        if frame is None or counts:
            return
        after = dict(_marks(frame, self._known()))
        for name, mark in before.items():
            if name in after and after[name] != mark:
                self._states.tell(name, self._refused("carried", name=name), self._refused("carried-cure"))


def _of_script() -> FrameType | None:
    frames = (frame for frame, _ in walk_stack(sys._getframe(1)))
    return next((frame for frame in frames if is_of_script(frame.f_code.co_filename)), None)


def _marks(frame: FrameType, known: Collection[int]) -> Iterator[tuple[str, Any]]:
    """What tells whether a variable has changed, for those that the body may carry."""
    variables = {**frame.f_globals, **frame.f_locals}
    carried, read = _names(frame.f_code, frame.f_lasti)
    for name in carried | read:
        value = variables.get(name)
        if isinstance(value, bool | int | float | str) and name in carried:
            yield name, value
        elif isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            yield name, (id(value) if name in carried else 0, value._version)
        elif isinstance(value, nn.Module) and id(value) not in known:
            parts = [*value.parameters(), *value.buffers()]
            if not any(id(part) in known for part in parts):
                yield name, [part._version for part in parts]


@lru_cache(maxsize=64)
def _names(code: CodeType, place: int) -> tuple[frozenset[str], frozenset[str]]:
    """The names that the body of the loop at a place reads before it sets them, and those that it only reads."""
    instructions = list(dis.get_instructions(code))
    here = (instruction for instruction in instructions if instruction.offset == place)
    loop = next((instruction for instruction in here if instruction.opname == "FOR_ITER"), None)
    if loop is None:
        return frozenset(), frozenset()
    first, stored = dict[str, bool](), set[str]()  # by name, whether the first access reads
    for instruction in instructions:
        accesses = ACCESS.findall(instruction.opname) if loop.offset < instruction.offset < loop.argval else []
        names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
        for access, name in zip(accesses, names, strict=False):
            first.setdefault(name, access == "LOAD")
            if access == "STORE":
                stored.add(name)
    before = {name for name, reads in first.items() if reads}
    return frozenset(before & stored), frozenset(before - stored)
