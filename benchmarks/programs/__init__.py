"""What workers run: ``python -m benchmarks.programs.NAME FOLDER``."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from benchmarks.place import Place

T = TypeVar("T", bound=BaseModel)


def serve(task: type[T], work: Callable[[T, Path], BaseModel]) -> None:
    """Read the task from the crew's folder, do it, write what was found there, and leave at once.

    Nothing is taken apart at the end: DDP's reducer may wait there for ever, holding the lock of the interpreter, for a
    thread of Gloo's that needs it (seen with torch 2.13).
    """
    folder, place = Path(sys.argv[1]), Place.of()  # before a run hides it
    found = work(task.model_validate_json((folder / "task.json").read_text()), folder)
    (folder / f"found-{place.rank}.json").write_text(found.model_dump_json())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
