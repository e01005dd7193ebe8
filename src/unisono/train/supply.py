"""A loop's batches, for whichever shards this worker computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from unisono.data.loader import Loaded
from unisono.data.shards import ShardsRequest
from unisono.data.streams import generators_kept
from unisono.plan.batches import Position

Load = Callable[[Iterator[ShardsRequest]], Loaded]
"""From what each step needs to what it gets."""

Requests = Callable[[Position, range], Iterator[ShardsRequest]]
"""What a worker with these shards reads in each step from a position on."""


class Supply:
    """Loads step by step; starts again where it stands when this worker is given other shards.

    Args:
        load: loads steps in their order.
        requests: what they need.
        shards: which this worker computes now.
    """

    def __init__(self, load: Load, requests: Requests, shards: Callable[[], range]) -> None:
        self._load, self._requests, self._shards = load, requests, shards
        self._loaded: Loaded | None = None
        self._loaded_for = range(0)
        self._position: Position | None = None
        self._batches: list[Any] = []

    def at(self, position: Position) -> list[Any]:
        """The batches of this worker's shards in the step that starts at ``position``; later, those of the next one.

        Asked again for the same step it gives the same ones, or those of the shards that this worker has now.
        """
        shards = self._shards()
        if position != self._position:
            self._batches = self._next(position, shards)
        elif shards != self._loaded_for:
            with generators_kept():  # whose draws the script goes on with
                self._batches = self._next(position, shards)
        self._position = position
        return self._batches

    def _next(self, position: Position, shards: range) -> list[Any]:
        if self._loaded is None or shards != self._loaded_for:
            self.close()
            self._loaded, self._loaded_for = self._load(self._requests(position, shards)), shards
        return next(self._loaded)

    def close(self) -> None:
        """End what loads."""
        if self._loaded is not None:
            self._loaded.close()
            self._loaded = None
