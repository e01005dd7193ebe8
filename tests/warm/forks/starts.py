"""How launchers start programs in the suite: a shared fork server is asked for those that it has loaded.

What is replaced is Python's own ``asyncio.create_subprocess_exec``, and nothing of ours.
"""

import asyncio
import os
import sys
from asyncio.subprocess import Process
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forks.client import SHARED_FORK_SERVERS, ForkedProcess, NotForked, request_fork
from forks.request import COORDINATOR
from unisono.launch.worker_start import FORK_SERVER

begin = asyncio.create_subprocess_exec


@contextmanager
def replaced() -> Iterator[None]:
    """As long as the context lasts, this process asks."""
    before = asyncio.create_subprocess_exec
    replace()
    try:
        yield
    finally:
        vars(asyncio)["create_subprocess_exec"] = before


def replace() -> None:
    """From now on this process asks."""
    vars(asyncio)["create_subprocess_exec"] = forked_or_begun


async def forked_or_begun(*words: str, **how: Any) -> ForkedProcess | Process:
    """A program, forked if a shared fork server has loaded it; if that does not help, the program's log says why."""
    environment = how.get("env") or os.environ
    command = module_and_arguments(words)
    if command and SHARED_FORK_SERVERS in environment:
        output, errors = how["stdout"], how["stderr"]
        with Path(os.devnull).open("rb") as nothing:
            numbers = {0: nothing.fileno(), 1: output.fileno(), 2: errors.fileno()}
            try:
                return await request_fork(command, environment, numbers | {each: each for each in how["pass_fds"]})
            except NotForked as why:
                output.write(f"{command[0]} loads all that it needs itself: {why}\n".encode())
    return await begin(*words, **how)


def module_and_arguments(words: Sequence[str]) -> Sequence[str]:
    """Those of a coordinator or a fork server; nothing for any other program."""
    if words[0] == sys.executable and "-m" in words:
        command = words[words.index("-m") + 1 :]
        if command[0] in (COORDINATOR, FORK_SERVER):
            return command
    return ()
