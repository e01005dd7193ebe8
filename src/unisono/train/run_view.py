"""What a run tells of itself: who takes part, where, and how far it has come."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from typing import Any

from unisono.train.assembly import Inside
from unisono.train.record.progress import Display, display_of, with_display
from unisono.train.step.step import Step


class RunView:
    """What a run tells of itself, as one of its workers sees it.

    Attributes:
        job: the job to train.
        device: the device on which this worker computes.
        inside: the parts of the run; scripts leave it alone.
    """

    def __init__(self, inside: Inside) -> None:
        self.job = inside.job
        self.device = inside.device
        self.inside = inside

    # -- who and where ---------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This worker's place in the roster, 0 … world_size-1; -1 as long as it has yet to join the others."""
        return -1 if self.inside.membership.joins else self.inside.membership.workers.rank

    @property
    def world_size(self) -> int:
        """The number of workers; 0 as long as this one has yet to join them."""
        return 0 if self.inside.membership.joins else self.inside.membership.workers.world_size

    @property
    def is_main(self) -> bool:
        """Whether this is the worker that prints and writes files (rank 0; of several devices, the first)."""
        return self.inside.membership.is_main

    @property
    def generation(self) -> int:
        """The number of the roster's generation, from 1; 0 as long as this worker has yet to join."""
        return self.inside.membership.workers.generation.number

    @property
    def dir(self) -> Path:
        """The run folder."""
        return self.inside.folder.path

    @property
    def metrics(self) -> Mapping[str, Any]:
        """The newest line of ``metrics.jsonl``."""
        return self.inside.metrics.latest

    @property
    def strategy(self) -> str:
        """By which the workers synchronise now, as its text."""
        return str(self.inside.steps.strategy)

    def print(self, *values: Any, **options: Any) -> None:
        """Print on the main worker alone."""
        if self.is_main:
            print(*values, **{"flush": True, **options})  # noqa: T201  this is the verb for it

    def progress(self, steps: Iterable[Step]) -> Generator[Step, None, None]:
        """The same steps, with a bar on the main worker: ``for step in run.progress(run.steps(dataset, epochs=5))``.

        It shows epoch, step, loss, samples per second, workers and the time left, in a terminal, a notebook, or the
        terminal of ``unisono run``; nothing is written to logs.

        Args:
            steps: the steps that :meth:`steps` has returned.
        """
        display = display_of(lambda: self.is_main, Display)
        return with_display(steps, display, self.inside.loop.place_of, lambda: self.world_size)
