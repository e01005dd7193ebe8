"""Turning a fork into what ``python -m MODULE ARGUMENTS`` is before its first line."""

import fcntl
import importlib.util
import io
import os
import random
import signal
import socket
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from forks.request import NEVER_IGNORED, ForkRequest, cold_command

ARGUMENTS_BEGIN, ARGUMENTS_END = 45, 46
"""Where ``/proc/self/stat`` has, behind the program's name, the addresses between which its command line lies."""


def arrange(received: Sequence[int], numbers: Sequence[int], channel: socket.socket) -> socket.socket:
    """Keep the descriptors that came with a request, under the numbers asked for, and close all others.

    Args:
        received: the descriptors that came with the request.
        numbers: the numbers that they get.
        channel: the socket on which the request came; it is replaced.

    Returns:
        the channel, with another descriptor.
    """
    above = max(numbers) + 1
    kept = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, above) for each in received]
    channel = socket.socket(fileno=fcntl.fcntl(channel.detach(), fcntl.F_DUPFD_CLOEXEC, above))
    for descriptor, number in zip(kept, numbers, strict=True):
        os.dup2(descriptor, number)
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 (numbers, not paths)
        if int(name) not in {*numbers, channel.fileno()}:
            with suppress(OSError):  # it was that of the listing
                os.close(int(name))
    return channel


def become(request: ForkRequest) -> None:
    """Have the session, the variables, the signals and the words of a program that was started for a request.

    Raises:
        OSError: its working folder is gone.
    """
    os.setsid()
    os.environ.clear()
    os.environ.update(request.environment)
    os.environ.pop("UNISONO_LAUNCHER_PID", None)  # who asked is not the parent, with which the kernel would end this
    os.chdir(request.cwd)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, _as_python_begins(number, request.ignored))
    # The streams of the process that forks may lie on files; here the same descriptors may be pipes, which cannot seek.
    sys.stdout, sys.stderr = (_as_python_opens(stream) for stream in (sys.stdout, sys.stderr))
    random.seed()
    sys.orig_argv = cold_command(request.command)
    _show(sys.orig_argv)


def run(command: Sequence[str]) -> None:
    """Run a module as ``__main__``. It is not loaded under its own name, as if Python had begun with it."""
    name, *arguments = command
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    assert spec is not None
    assert spec.origin is not None
    main = ModuleType("__main__")
    vars(main).update(__spec__=spec, __file__=spec.origin, __cached__=spec.cached, __package__=spec.parent)
    vars(main).update(__loader__=spec.loader, __builtins__=__builtins__)
    sys.modules.pop(spec.name, None)
    sys.modules["__main__"] = main
    sys.argv = [spec.origin, *arguments]
    SourceFileLoader(main.__name__, spec.origin).exec_module(main)


def _as_python_opens(stream: Any) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        open(stream.fileno(), "wb", 0 if stream.write_through else -1, closefd=False),
        stream.encoding,
        stream.errors,
        line_buffering=bool(stream.line_buffering if stream is sys.stderr else stream.isatty()),
        write_through=stream.write_through,
    )


def _as_python_begins(number: int, ignored: Collection[int]) -> signal.Handlers | Callable[[int, Any], Any]:
    if number in ignored or number in NEVER_IGNORED:
        return signal.SIG_IGN
    return signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL


def _show(words: Sequence[str]) -> None:
    """Have the system's tools show this command line, as much of it as there is room for."""
    itself = Path("/proc/self")
    fields = (itself / "stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[ARGUMENTS_BEGIN]), int(fields[ARGUMENTS_END])
    shown = os.fsencode(" ".join(words))[: end - begin - 2]
    # An end that is no zero byte says that the words lie there as one text, up to the first zero byte.
    with suppress(OSError), (itself / "mem").open("r+b", buffering=0) as memory:
        memory.seek(begin)
        memory.write(shown.ljust(end - begin - 1, b"\0") + b" ")
