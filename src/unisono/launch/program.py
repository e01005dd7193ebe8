"""A program of ours that runs beside the workers, and writes to a log: a coordinator, a fork server."""

import asyncio
import os
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Mapping, Sequence
from pathlib import Path

from unisono.jsonl import open_lines


async def start_program(words: Sequence[str], environment: Mapping[str, str], log: Path, kept: int) -> Process:
    """Start it in a session of its own, with an empty standard input.

    Args:
        words: what Python is given.
        environment: its environment.
        log: the file for its output and errors.
        kept: a further descriptor of this process that it inherits, under the same number.

    Raises:
        OSError: it cannot be started.
    """
    with os.fdopen(open_lines(log), "ab", 0) as output:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # no module of the working folder is in its way
            *words,
            env=environment,
            stdin=DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            pass_fds=[kept],
        )
