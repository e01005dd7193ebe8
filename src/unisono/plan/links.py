"""The speed of the connections between workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Links:
    """The measured latency and bandwidth between each two workers.

    Attributes:
        latency_s: the seconds of a small message between workers a and b as ``latency_s[a][b]``; 0 where a is b.
        bytes_per_s: the bandwidth between workers a and b, as ``bytes_per_s[a][b]``; 0 where a is b.
    """

    latency_s: tuple[tuple[float, ...], ...]
    bytes_per_s: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        workers = len(self.latency_s)
        if any([len(row) for row in table] != [workers] * workers for table in (self.latency_s, self.bytes_per_s)):
            raise ValueError("both tables need a row and a column for each worker")

    @classmethod
    def of(cls, pairs: Mapping[tuple[int, int], tuple[float, float]], workers: int) -> Links:
        """From latency and bandwidth of each pair, by the smaller and the larger rank."""

        def table(part: int) -> tuple[tuple[float, ...], ...]:
            return tuple(
                tuple(0.0 if a == b else pairs[min(a, b), max(a, b)][part] for b in range(workers))
                for a in range(workers)
            )

        return cls(table(0), table(1))

    @classmethod
    def from_json(cls, value: Mapping[str, Sequence[Sequence[float]]]) -> Links:
        """The inverse of ``asdict``."""
        return cls(*(tuple(map(tuple, value[name])) for name in ("latency_s", "bytes_per_s")))

    @property
    def slowest(self) -> tuple[int, int]:
        """The pair with the least bandwidth; the first of them."""
        workers = range(len(self.bytes_per_s))
        pairs = [(a, b) for a in workers for b in workers if a < b]
        return min(pairs, key=lambda pair: self.bytes_per_s[pair[0]][pair[1]])

    def figures(self) -> dict[str, Any]:
        """For the journal and ``metrics.jsonl``."""
        return {name: [list(row) for row in getattr(self, name)] for name in ("latency_s", "bytes_per_s")}
