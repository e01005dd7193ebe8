"""Figures for Weights & Biases: files in the run folder for ``wandb sync``, or its server."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unisono.loggers.logger import OF_EVERY_STEP, Book, LoggedRun, Logger

BLOCK = 32768
"""Bytes of a block of a ``.wandb`` file, which is a log as LevelDB writes it: headers of 7 bytes lie in one block."""


class WandbLogger(Logger):
    """Logs into one run of Weights & Biases, and goes on with it where the job does; ``step`` is the axis of all plots.

    Offline by default: ``wandb sync runs/…/wandb/offline-run-*`` sends the files, in the order of their names, with
    ``--append`` if there are several.

    Args:
        project: the name of the project; by default ``WANDB_PROJECT``, and without that ``unisono``.
        mode: ``offline`` or ``online``; by default ``WANDB_MODE``, and without that offline.
    """

    packages = ("wandb",)
    extra = "wandb"

    def __init__(self, project: str | None = None, mode: str | None = None) -> None:
        self._project, self._mode = project, mode
        self._run: Any = None

    def open(self, run: LoggedRun) -> int:
        """Go on behind the newest step that the files have; a job that begins has a new run."""
        self.close()
        import wandb  # takes a second to load

        book, folder = Book(run.folder), run.folder / "wandb"
        known = book.read("wandb run")
        first = newest_step(folder, known) + 1 if isinstance(known, str) else 0
        if not isinstance(known, str) or (run.steps == 0 and first > 0):
            known, first = secrets.token_hex(4), 0
            book.write("wandb run", known)
        folder.mkdir(exist_ok=True)
        self._run = wandb.init(
            project=self._project or os.environ.get("WANDB_PROJECT") or "unisono",
            mode=self._mode or os.environ.get("WANDB_MODE") or "offline",  # type: ignore[arg-type]
            id=known,
            name=run.folder.name,
            dir=run.folder,
            config=dict(run.job),
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return first

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send a step's figures to the process that writes them."""
        self._run.log({**values, "step": step})

    def close(self) -> None:
        """Wait until all is written, or sent."""
        if self._run is not None:
            self._run.finish()
            self._run = None


def newest_step(folder: Path, run: str) -> int:
    """The newest step of a run that its files have whole; -1 if there is none."""
    found = (one for path in folder.glob(f"*run-*-{run}/run-{run}.wandb") for one in history(path))
    return max((step for step, values in found if OF_EVERY_STEP in values), default=-1)


def history(path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """The steps that a ``.wandb`` file has whole, with their figures; a torn end is left out."""
    from wandb.proto.wandb_internal_pb2 import Record

    for data in _records(path.read_bytes()):
        items = {
            item.key or "/".join(item.nested_key): item.value_json for item in Record.FromString(data).history.item
        }
        if "step" in items:
            own = {name: float(text) for name, text in items.items() if not name.startswith("_") and name != "step"}
            yield int(items["step"]), own


def _records(data: bytes) -> Iterator[bytes]:
    place, record = 7, b""
    while place + 7 <= len(data):
        if (left := BLOCK - place % BLOCK) < 7:
            place += left
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        part = data[place + 7 : place + 7 + size]
        if len(part) < size:
            return
        place += 7 + size
        record = part if kind in (1, 2) else record + part
        if kind in (1, 4):
            yield record
