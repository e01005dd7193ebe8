"""What a data set draws: from the global generators, and from its own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from unisono.data.own_generators import own_generators_kept
from unisono.data.streams import seed_generators
from unisono.plan.order import Stream, stream_seed


@contextmanager
def seeded(source: Any, seed: int) -> Iterator[None]:
    """All generators are seeded in here; those that a data set keeps in attributes are as before afterwards."""
    own = [value for value in vars(source).values() if isinstance(value, OWN)]
    with own_generators_kept(own):
        seed_generators(seed)
        for number, one in enumerate(own):
            _seed(one, stream_seed(seed % 2**63, Stream.BATCH, number))
        yield


OWN = (np.random.Generator, np.random.RandomState, random.Random)
"""Kinds of generators that a data set may keep, and that are seeded for each batch."""


def _seed(generator: Any, seed: int) -> None:
    match generator:
        case np.random.Generator():
            generator.bit_generator.state = type(generator.bit_generator)(seed).state
        case np.random.RandomState():
            generator.seed(seed & 0xFFFFFFFF)
        case _:
            generator.seed(seed)
