"""accelerate's ``GradientState`` of one accelerator: what is read, and whether gradients are those of a whole step."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from accelerate.state import GradientState

from unisono.integrations.accelerate.loaders import Loader
from unisono.train.script_loop import ScriptLoop


@dataclass(eq=False, frozen=True, slots=True)
class _Pass:
    """A pass over a loader. ``is_at_end`` says whether its present batch is the last one."""

    loader: Loader
    is_at_end: Callable[[], bool]


class StepState(GradientState):  # type: ignore[misc]  # accelerate is not looked into by mypy
    """Whether gradients are those of a whole step now, for one accelerator, and which loader is read.

    ``state`` is accelerate's own, of the process.
    """

    adjust_scheduler = False  # schedulers count updates, however many turns a worker has in a step

    def __init__(self, state: Any, loop: ScriptLoop) -> None:
        self._is_xla_gradients_synced = False
        self.plugin_kwargs = dict(state.plugin_kwargs)
        self._loop = loop
        self._passes: list[_Pass] = []

    @property
    def sync_gradients(self) -> bool:
        """Whether the mean gradient of the step is there."""
        return self._loop.asked()

    @property
    def dataloader_references(self) -> list[Any]:
        """None, and the loaders that are read, the one that began last at the end."""
        return [None, *(reading.loader for reading in self._passes)]

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the turn belongs to the last global batch of the loader that is read."""
        return bool(self._passes) and self._passes[-1].is_at_end()

    def follow(
        self, loader: Loader, batches: Generator[Any, None, None], is_at_end: Callable[[], bool]
    ) -> Iterator[Any]:
        """Yield the batches of a pass over a loader, which is the active one meanwhile."""
        present = _Pass(loader, is_at_end)
        self._passes.append(present)
        try:
            with closing(batches):
                yield from batches
        finally:
            self._passes.remove(present)
