"""What a data set draws: from the global generators, and from its own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from unisono.data.streams import seed_generators
from unisono.plan.order import Stream, stream_seed


@contextmanager
def seeded(source: Any, seed: int) -> Iterator[None]:
    """All generators are seeded in here; those that a data set keeps in attributes are as before afterwards."""
    own = [value for value in vars(source).values() if isinstance(value, OWN)]
    before = [_state_of(one) for one in own]
    seed_generators(seed)
    for number, one in enumerate(own):
        _seed(one, stream_seed(seed % 2**63, Stream.BATCH, number))
    try:
        yield
    finally:
        for one, state in zip(own, before, strict=True):
            _restore(one, state)


OWN = (np.random.Generator, np.random.RandomState, random.Random)
"""Kinds of generators that a data set may keep."""


def _state_of(generator: Any) -> Any:
    match generator:
        case np.random.Generator():
            return generator.bit_generator.state
        case np.random.RandomState():
            return generator.get_state()
    return generator.getstate()


def _restore(generator: Any, state: Any) -> None:
    match generator:
        case np.random.Generator():
            generator.bit_generator.state = state
        case np.random.RandomState():
            generator.set_state(state)
        case _:
            generator.setstate(state)


def _seed(generator: Any, seed: int) -> None:
    match generator:
        case np.random.Generator():
            generator.bit_generator.state = type(generator.bit_generator)(seed).state
        case np.random.RandomState():
            generator.seed(seed & 0xFFFFFFFF)
        case _:
            generator.seed(seed)
