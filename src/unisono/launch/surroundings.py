"""What a launcher stands in: the signals that it hears, and the guard that outlives it."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from unisono.errors import LaunchError
from unisono.host.guard import Guard


@contextmanager
def hearing_signals(heard: Callable[[int], None]) -> Iterator[None]:
    """Until the context ends, SIGINT, SIGTERM and SIGHUP call a function with their number. Inside of an event loop."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup wants it ignored
        numbers.append(signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    loop = asyncio.get_running_loop()
    for number in numbers:
        loop.add_signal_handler(number, heard, number)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


@contextmanager
def guarding() -> Iterator[Guard]:
    """A guard until the context ends.

    Raises:
        LaunchError: it cannot be started.
    """
    try:
        guard = Guard()
    except OSError as error:
        raise LaunchError(f"no process can be started: {error}") from error
    try:
        yield guard
    finally:
        guard.close()
