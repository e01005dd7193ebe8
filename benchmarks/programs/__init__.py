"""What workers run: ``python -m benchmarks.programs.NAME FOLDER``."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from benchmarks.place import Place

T = TypeVar("T", bound=BaseModel)


def serve(task: type[T], work: Callable[[T, Path], BaseModel]) -> None:
    """Read the task from the crew's folder, do it, write what was found there."""
    folder = Path(sys.argv[1])
    found = work(task.model_validate_json((folder / "task.json").read_text()), folder)
    (folder / f"found-{Place.of().rank}.json").write_text(found.model_dump_json())
