"""Another user of this host, who is up to no good: processes of ``nobody``, forked from a test that root runs."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import pytest

NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of another user")


@dataclass(frozen=True)
class OtherUser:
    """What another user does meanwhile.

    Attributes:
        said: the descriptor from which what it has reported is read.
    """

    said: int

    def reports(self) -> str:
        """The next of what it reports; empty once it has ended."""
        return os.read(self.said, 4096).decode()


@contextmanager
def another_user(does: Callable[[Callable[[str], None]], None]) -> Iterator[OtherUser]:
    """A process of another user until the block ends.

    Args:
        does: what it does; gets a function that reports to the test.
    """
    reading, writing = os.pipe()
    process = os.fork()  # which leads a group of its own before it reports anything
    if not process:
        with suppress(BaseException):
            os.setsid()
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            try:
                does(partial(_report, writing))
            except BaseException as error:  # noqa: BLE001 (the test reads it)
                os.write(writing, repr(error).encode())
        os._exit(0)
    os.close(writing)
    try:
        yield OtherUser(reading)
    finally:
        os.killpg(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(reading)


def _report(writing: int, words: str) -> None:
    os.write(writing, words.encode())
