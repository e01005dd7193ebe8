"""Listening at the points at which a worker may be struck; see :mod:`unisono.failpoints`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

from unisono.failpoints import Listener, listen

Point = Literal["regroup begins", "generation formed", "state captured", "state received", "state taken", "engine made"]
"""A point that workers pass while they recover from a loss, or take others in."""

RECOVERY: tuple[Point, ...] = get_args(Point)

OF_SOME = ("state captured", "state received", "state taken")
"""Points that not all workers pass: only whoever gives the state, or gets it."""


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Have this be told of every point that is passed meanwhile."""
    before = listen(listener)
    try:
        yield
    finally:
        listen(before)
