"""Random generators that an object of the script keeps to itself."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch

OWN = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
"""Kinds of generators that a data set may keep."""

PLAIN = (int, float, str, bytes)
"""Kinds that hold nothing."""

MOST = 1000
"""Objects that are looked at."""

EACH = 64
"""Of a list or a mapping."""


def generators_in(thing: Any) -> list[Any]:
    """The generators that an object holds, or that objects in its attributes do."""
    waiting, known, result = deque([thing]), {id(thing)}, list[Any]()
    for _ in range(MOST):
        if not waiting:
            break
        here = waiting.popleft()
        if isinstance(here, OWN):
            result.append(here)
            continue
        new = [part for part in _held(here) if id(part) not in known and not isinstance(part, PLAIN)]
        known.update(map(id, new))
        waiting += new
    return result


@contextmanager
def own_generators_kept(generators: Iterable[Any]) -> Iterator[None]:
    """Whatever these generators draw inside leaves no trace in them."""
    before = [(one, _state_of(one)) for one in generators]
    try:
        yield
    finally:
        for one, state in before:
            _restore(one, state)


def _held(thing: Any) -> Iterable[Any]:
    match thing:
        case Mapping():
            return islice(thing.values(), EACH) if isinstance(thing, dict) else ()
        case list() | tuple():
            return islice(thing, EACH)
        case type() | torch.Tensor() | np.ndarray():
            return ()
    return islice(getattr(thing, "__dict__", {}).values(), EACH)


def _state_of(generator: Any) -> Any:
    match generator:
        case np.random.Generator():
            return generator.bit_generator.state
        case np.random.RandomState() | torch.Generator():
            return generator.get_state()
    return generator.getstate()


def _restore(generator: Any, state: Any) -> None:
    match generator:
        case np.random.Generator():
            generator.bit_generator.state = state
        case np.random.RandomState() | torch.Generator():
            generator.set_state(state)
        case _:
            generator.setstate(state)
