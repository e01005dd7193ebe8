"""Spans: what a worker did, from when to when."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple, get_args

Kind = Literal[
    "step",
    "data",
    "compute",
    "forward",
    "backward",
    "exposed",
    "exchange",
    "weigh",
    "reduce",
    "update",
    "synchronise",
    "regroup",
    "wait",
    "form",
    "copy",
]
"""``step`` is a step, from the wait for its samples to the end of the loop's body. In it are ``data``, that wait;
``compute``, with the ``forward`` and ``backward`` of each shard; ``exposed``, communication that no computation covers,
with the ``exchange`` of losses and flags; and ``update``. ``weigh`` and ``reduce`` are the reducer's: the weights of
all shards, and a bucket. ``synchronise`` is the end of a round. ``regroup`` is a change of generation: the ``wait`` for
the others, ``form`` (connecting), and ``copy`` (the state, and what computes)."""

KINDS: Final = frozenset(get_args(Kind))

FOLDER = "timeline"
"""The folder in the run folder with one file per worker."""

CLOCK_MARK = "unisono clock "
"""The beginning of the name of the first event in a file of torch's profiler. The moment in nanoseconds of
``time.perf_counter`` follows it, so that the file's clock can be compared with that of a worker's spans."""


class WorkSpan(NamedTuple):
    """A span of a worker's time.

    Attributes:
        kind: the kind of work.
        begun: the beginning, in seconds of ``time.perf_counter``.
        ended: the end, in the same seconds.
        on_main: whether the thread was the one that trains; else it was the reducer's.
        number: the number of the shard or of the bucket; -1 for other kinds.
        ready: the moment from which a bucket could be reduced, in the same seconds; 0 for other kinds.
    """

    kind: Kind
    begun: float
    ended: float
    on_main: bool
    number: int = -1
    ready: float = 0.0


class Spans:
    """The spans of a worker since they were last taken. The thread that trains makes it; any thread may add spans."""

    def __init__(self) -> None:
        self._kept: list[WorkSpan] = []
        self._main = threading.get_ident()

    def add(self, kind: Kind, begun: float, ended: float, number: int = -1, ready: float = 0.0) -> None:
        """Add a span with these fields of :class:`WorkSpan`."""
        self._kept.append(WorkSpan(kind, begun, ended, threading.get_ident() == self._main, number, ready))

    def regrouped(self, copied_from: float, ended: float, seconds: Mapping[str, float]) -> None:
        """Add the spans of a change of generation that is over.

        Args:
            copied_from: the moment at which the workers were connected, and began to hand the state over.
            ended: the moment at which this worker could train on.
            seconds: the seconds of ``regroup`` (the wait for the others) and ``form`` before that moment.
        """
        formed_from = copied_from - seconds.get("form", 0.0)
        begun = formed_from - seconds.get("regroup", 0.0)
        self.add("regroup", begun, ended)
        self.add("wait", begun, formed_from)
        self.add("form", formed_from, copied_from)
        self.add("copy", copied_from, ended)

    def take(self) -> list[WorkSpan]:
        """Remove all spans, and return them."""
        taken, self._kept = self._kept, []
        return taken
