"""A training loader as Lightning's loops see it: as long as it was, and with a step in place of each batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unisono.integrations.lightning.batch import GlobalBatch


class TrainingLoader:
    """Gives a batch for each step of the run's loop, which goes on from epoch to epoch.

    Args:
        loader: the script's loader.
        next_step: a function that goes on to the next step.

    Attributes:
        loader: the script's loader.
    """

    def __init__(self, loader: Any, next_step: Callable[[], GlobalBatch]) -> None:
        self.loader = loader
        self._next = next_step

    def __len__(self) -> int:
        """The number of batches of an epoch."""
        return len(self.loader)

    def __iter__(self) -> TrainingLoader:
        return self

    def __next__(self) -> GlobalBatch:
        return self._next()
