"""A new run folder for each start that names none."""

from datetime import datetime
from itertools import count
from pathlib import Path

from unisono.errors import JobError


def run_folder_name(stem: str, now: datetime, number: int = 1) -> str:
    """``20250131-120000-train``, and ``…-train-2`` for the second of the same second."""
    return f"{now:%Y%m%d-%H%M%S}-{stem}" + (f"-{number}" if number > 1 else "")


def new_run_folder(parent: Path, stem: str) -> Path:
    """Make a folder that no other start has, however many start at once.

    Raises:
        JobError: it cannot be made; says why, and what to do.
    """
    now = datetime.now()  # the person's own time
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for number in count(1):
            folder = parent / run_folder_name(stem, now, number)
            try:
                folder.mkdir()
            except FileExistsError:
                continue
            return folder
    except OSError as error:
        raise JobError(f"no run folder can be made in {parent.absolute()}: {error}; name one with --run-dir") from error
    raise AssertionError("count() never ends")
