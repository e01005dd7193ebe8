"""Figures for TensorBoard, by torch's own writer: ``tensorboard/`` in the run folder."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

from unisono.loggers.logger import LoggedRun, Logger


class TensorBoardLogger(Logger):
    """Writes scalars into event files: ``tensorboard --logdir runs`` shows them.

    Each process that goes on has a file of its own. It begins with the number of its first step, and TensorBoard drops
    what earlier files say of that step and later ones.

    Args:
        folder: the folder in the run folder.
    """

    packages = ("tensorboard",)
    extra = "tensorboard"

    def __init__(self, folder: str = "tensorboard") -> None:
        self._folder = folder
        self._writer: Any = None

    def open(self, run: LoggedRun) -> int:
        """Go on behind what was surely written."""
        self.close()
        from torch.utils.tensorboard import SummaryWriter  # takes a second to load

        first = min(run.logged, run.steps)
        folder = run.folder / self._folder
        if first == 0 and folder.is_dir():  # what is there nobody has noted: a step 0 cannot be dropped otherwise
            shutil.rmtree(folder)
        self._writer = SummaryWriter(str(folder), purge_step=first or None)
        return first

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a scalar per figure."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Write what waits in memory."""
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
