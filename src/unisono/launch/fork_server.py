"""A process that has torch and unisono loaded, and forks workers, which therefore begin at once. Linux only.

``python -P -u -m unisono.launch.fork_server FD``, started by the launcher in its workers' environment, so that
what libraries read when they are loaded (``OMP_NUM_THREADS``, the allocator's variables) is what each worker would have
found. ``FD`` is an end of a socket pair (AF_UNIX, SEQPACKET) on which every message is one JSON object:

* from the launcher: a :class:`~unisono.launch.worker_start.WorkerRequest`, with the descriptors of its output
  and errors, and maybe one more;
* to the launcher: ``{"ready": why}`` once, where ``why`` says why not, or nothing; for each request, in their order,
  ``{"started": pid}`` or ``{"refused": why}``; and ``{"ended": pid, "code": code}``, the code negative for a signal.

The end of the connection is the launcher's end and the fork server's; the kernel ends the workers with it.
"""

import gc
import json
import os
import random
import select
import signal
import socket
import stat
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from unisono.device import in_use

from unisono.launch import worker  # isort: skip  (first: what it does at exit comes after all that libraries do)

import numpy as np
import torch

import unisono.train.start
import unisono.train.trainer  # noqa: F401  (both are loaded here so that no worker has to)
from unisono.host.process import NOTICES
from unisono.launch.worker_start import FIRST_KEPT, WorkerRequest

LARGEST = 2**20
"""Bytes of a request. The system's limit on one message is mostly lower; whoever needs more is not started here."""

STANDARD_OUTPUT, STANDARD_ERROR = 1, 2


@dataclass(frozen=True, slots=True)
class Fork:
    """All that a fork needs to become a worker.

    Attributes:
        parent: the fork server's process id.
        kept: a further descriptor that it inherits, or None.
    """

    request: WorkerRequest
    parent: int
    out: int
    err: int
    kept: int | None = None


class ForkServer:
    """Serves one launcher."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._wakes, self._woken = os.pipe()
        for end in (self._wakes, self._woken):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, _noted)  # without a handler nothing is written
        # A batch system sends these to every process of a job. This one ends when its launcher hangs up.
        self._before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, *NOTICES)}
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)

    def serve(self) -> Fork | None:
        """Fork as often as asked, until the launcher hangs up: then None. In each fork, what it is to become."""
        self._tell(ready=self._obstacle())
        gc.collect()
        gc.freeze()  # a collection in a fork would write to, and so copy, every page of what was loaded here
        events = select.poll()
        events.register(self._channel, select.POLLIN)
        events.register(self._wakes, select.POLLIN)
        while True:
            heard = {descriptor for descriptor, _ in events.poll()}
            if self._wakes in heard:
                self._reap()
            if self._channel.fileno() in heard:
                data, descriptors = self._receive()
                if not data:
                    return None
                if (fork := self._answer(data, descriptors)) is not None:
                    return fork

    def _receive(self) -> tuple[bytes, list[int]]:
        """The next request, and the descriptors that came with it; nothing once the launcher has hung up."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._channel, LARGEST, 3)
        except ConnectionError:
            return b"", []
        return data, descriptors

    def _answer(self, data: bytes, descriptors: list[int]) -> Fork | None:
        """Fork. In the fork, what it is to become; here None."""
        fork = Fork(WorkerRequest.from_json(data), os.getpid(), *descriptors)
        why, child = self._obstacle(descriptors), None
        if not why:
            try:
                child = _fork_leader()
            except OSError as error:
                why = f"the system would not fork: {error}"
        if child == 0:
            self._leave()
            return fork
        for descriptor in descriptors:
            os.close(descriptor)
        self._tell(**({"refused": why} if why else {"started": child}))
        return None

    def _obstacle(self, received: Sequence[int] = ()) -> str:
        """Why a fork of this process could not be trusted; empty if it can."""
        threads = _threads()
        if threads > 1:
            return f"{threads} threads run in the fork server, and a fork would have one of them only"
        if in_use() is not None:
            return "an accelerator is initialised in the fork server, and does not work in a fork"
        if _sockets() - {self._channel.fileno(), *received}:
            return "a library has opened a socket in the fork server, and a fork would share it"
        return ""

    def _reap(self) -> None:
        """Say which workers have ended."""
        with suppress(BlockingIOError):
            while os.read(self._wakes, 4096):
                pass
        with suppress(ChildProcessError):  # none is left
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                self._tell(ended=ended[0], code=os.waitstatus_to_exitcode(ended[1]))

    def _leave(self) -> None:
        """In a fork: what is the fork server's alone."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        self._channel.close()  # and its object, or that would close whatever has its number later
        os.close(self._wakes)
        os.close(self._woken)

    def _tell(self, **message: Any) -> None:
        with suppress(ConnectionError):  # the launcher is gone, as the next look at the connection tells
            self._channel.send(json.dumps(message).encode())


def _fork_leader() -> int:
    """Fork a process that leads a session and a process group of its own; like ``os.fork``.

    The launcher kills workers by their groups, so the group must be there before the launcher hears of the worker.
    """
    waiting, made = os.pipe()
    try:
        child = os.fork()
        if child == 0:
            os.setsid()
    except OSError:
        os.close(waiting)
        raise
    finally:
        os.close(made)
    if child:
        os.read(waiting, 1)  # nothing, once the child has closed its end, or has ended
    os.close(waiting)
    return child


def become(fork: Fork) -> None:
    """Turn this fork into what a fresh ``python -P -u -m unisono.launch.worker`` is before its first line."""
    os.dup2(fork.out, STANDARD_OUTPUT)
    os.dup2(fork.err, STANDARD_ERROR)
    if fork.kept is not None:
        os.dup2(fork.kept, FIRST_KEPT)
    _close_all_after(STANDARD_ERROR if fork.kept is None else FIRST_KEPT)
    request = fork.request
    # The kernel ends a worker with its parent, and that is the fork server.
    os.environ.update({**request.variables, "UNISONO_LAUNCHER_PID": str(fork.parent)})
    os.chdir(request.cwd)
    sys.argv = [worker.__file__, *request.argv]
    sys.orig_argv = [sys.executable, "-P", "-u", "-m", worker.__name__, *request.argv]
    # A fresh process has generators that nobody has drawn from, each with a seed from the system.
    random.seed()
    np.random.seed()
    torch.default_generator.seed()


def main() -> None:
    """Serve the launcher, or, in a fork, be the worker that it asked for."""
    worker.end_with_launcher()
    load()
    fork = ForkServer(socket.socket(fileno=int(sys.argv[1]))).serve()
    if fork is None:
        os._exit(0)  # nothing here is worth the time that taking torch apart needs
    become(fork)
    worker.main()  # the interpreter then ends as after any script: exit handlers, threads, streams


def load() -> None:
    """Load what importing this module has not."""
    _load_the_rest()
    _end_threads_that_end_before_forks()


def _load_the_rest() -> None:
    # The first optimizer of a process has torch load 800 modules more.
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208 (counts names, opens nothing)


def _end_threads_that_end_before_forks() -> None:
    """Fork nothing, once: OpenBLAS ends its threads before any fork, and has new ones where it needs them."""
    if _threads() > 1:
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)


def _descriptors() -> set[int]:
    """Those that are open; that of the listing itself may be among them, and is closed."""
    return {int(name) for name in os.listdir("/proc/self/fd")}  # noqa: PTH208 (numbers, not paths)


def _sockets() -> set[int]:
    sockets = set()
    for descriptor in _descriptors():
        with suppress(OSError):  # it was that of the listing
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                sockets.add(descriptor)
    return sockets


def _close_all_after(last: int) -> None:
    for descriptor in _descriptors():
        if descriptor > last:
            with suppress(OSError):  # it was that of the listing
                os.close(descriptor)


def _noted(number: int, frame: Any) -> None:
    """A handler that does nothing: the wake-up descriptor tells."""


if __name__ == "__main__":
    main()
