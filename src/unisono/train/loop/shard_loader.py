"""A loop's batches, for whichever shards this worker computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from unisono.adapt.view import BatchShape
from unisono.data.loader import Loaded
from unisono.data.shards import ShardsRequest
from unisono.data.streams import generators_kept
from unisono.plan.batches import Position

Load = Callable[[Iterator[ShardsRequest]], Loaded]
"""From what each step needs to what it gets."""

Part = tuple[Sequence[int], BatchShape]
"""Which shards a worker computes, and of what batches."""

Requests = Callable[[Position, Part], Iterator[ShardsRequest]]
"""What a worker with this part reads in each step from a position on."""


class ShardLoader:
    """Loads step by step; starts again where it stands when this worker is given another part.

    Args:
        load: loads steps in their order.
        requests: what they need.
        part: what this worker computes now.
    """

    def __init__(self, load: Load, requests: Requests, part: Callable[[], Part]) -> None:
        self._load, self._requests, self._part = load, requests, part
        self._loaded: Loaded | None = None
        self._loaded_for: Part | None = None
        self._position: Position | None = None
        self._batches: list[Any] = []

    def at(self, position: Position) -> list[Any]:
        """The batches of this worker's shards in the step that starts at ``position``; later, those of the next one.

        Asked again for the same step it gives the same ones, or those of the shards that this worker has now.
        """
        part = self._part()
        if position != self._position:
            self._batches = self._next(position, part)
        elif part != self._loaded_for:
            with generators_kept():  # whose draws the script goes on with
                self._batches = self._next(position, part)
        self._position = position
        return self._batches

    def _next(self, position: Position, part: Part) -> list[Any]:
        if self._loaded is None or part != self._loaded_for:
            self.close()
            self._loaded, self._loaded_for = self._load(self._requests(position, part)), part
        return next(self._loaded)

    def close(self) -> None:
        """End what loads; whoever asks for a step again starts it anew."""
        if self._loaded is not None:
            self._loaded.close()
        self._loaded = self._position = None
