"""What a function of a notebook returns, on its way back to the cell."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unisono.checkpoint.folder import write_json
from unisono.errors import JobError
from unisono.launch.notebook.cell import RETURNED
from unisono.received import parse_json, short
from unisono.train.start import HOST_PROCESS


def call(function: Callable[..., Any], arguments: str) -> None:
    """Call the function in a worker; what it returns on the main worker is kept.

    Args:
        function: the function.
        arguments: its arguments, as JSON.

    Raises:
        JobError: it returned what is no JSON.
    """
    value = function(**parse_json(arguments))
    run = HOST_PROCESS.get().newest
    if run is None or not run.is_main:
        return
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        raise JobError(
            f"{function.__name__} returned {short(value)}, which is no JSON and cannot be handed back: return numbers, "
            f"text, lists and dicts of them; weights are in the run folder's checkpoints"
        ) from None
    write_json(Path(run.dir) / RETURNED, {"value": value})
