"""A process that has torch and unisono loaded, and forks workers, which therefore begin at once. Linux only.

``python -P -u -m unisono.launch.fork_server FD``, started by the launcher in its workers' environment, so that
libraries read the same variables when they are loaded (``OMP_NUM_THREADS``, the allocator's) as in a worker of its
own. ``FD`` is an end of a socket pair (AF_UNIX, SEQPACKET) on which every message is one JSON object:

* from the launcher: a :class:`~unisono.launch.worker_start.WorkerRequest`, with the descriptors of its output
  and errors, and maybe one more;
* to the launcher: ``{"ready": why}`` once, where ``why`` is empty, or says why it cannot fork; for each request, in
  their order, ``{"started": pid}`` or ``{"refused": why}``; and ``{"ended": pid, "code": code}``, with a negative code
  for a signal.

When the launcher closes the connection, or ends, the fork server ends; the kernel ends the workers with it.
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

from unisono.launch import worker  # isort: skip  (first, so that its exit handler runs after those of all libraries)

import numpy as np
import torch

import unisono.train.start
import unisono.train.trainer  # noqa: F401  (both are loaded here so that no worker has to)
from unisono.host.process import NOTICES
from unisono.launch.worker_start import FIRST_INHERITED, WorkerRequest

LARGEST = 2**20
"""The most bytes of a request. The system's limit is mostly lower: the launcher starts such a worker without it."""

STANDARD_OUTPUT, STANDARD_ERROR = 1, 2


@dataclass(frozen=True, slots=True)
class Fork:
    """All that a fork needs to become a worker.

    Attributes:
        parent: the fork server's process id.
        inherited: a further descriptor that it inherits, or None.
    """

    request: WorkerRequest
    parent: int
    out: int
    err: int
    inherited: int | None = None


class ForkServer:
    """Serves one launcher."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._wakeup_read, self._wakeup_write = os.pipe()
        for end in (self._wakeup_read, self._wakeup_write):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, _do_nothing)  # only with a handler is the wake-up descriptor written to
        # A batch system sends these to every process of a job. This one ends when its launcher closes the connection.
        self._handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, *NOTICES)}
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)

    def serve(self) -> Fork | None:
        """Fork for each request. Returns None once the launcher has closed the connection; in a fork, its data."""
        self._send(ready=self._obstacle())
        gc.collect()
        gc.freeze()  # a collection in a fork would write to, and so copy, every page of what was loaded here
        events = select.poll()
        events.register(self._channel, select.POLLIN)
        events.register(self._wakeup_read, select.POLLIN)
        while True:
            readable = {descriptor for descriptor, _ in events.poll()}
            if self._wakeup_read in readable:
                self._reap()
            if self._channel.fileno() in readable:
                data, descriptors = self._receive()
                if not data:
                    return None
                if (fork := self._fork(data, descriptors)) is not None:
                    return fork

    def _receive(self) -> tuple[bytes, list[int]]:
        """The next request, and the descriptors that came with it; empty once the launcher has closed its end."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._channel, LARGEST, 3)
        except ConnectionError:
            return b"", []
        return data, descriptors

    def _fork(self, data: bytes, descriptors: list[int]) -> Fork | None:
        """Fork, and reply to the launcher. Returns what the fork is to become in the fork, and None here."""
        fork = Fork(WorkerRequest.from_json(data), os.getpid(), *descriptors)
        why, child = self._obstacle(descriptors), None
        if not why:
            try:
                child = _fork_leader()
            except OSError as error:
                why = f"the system would not fork: {error}"
        if child == 0:
            self._release()
            return fork
        for descriptor in descriptors:
            os.close(descriptor)
        self._send(**({"refused": why} if why else {"started": child}))
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
        """Report the workers that have ended to the launcher."""
        with suppress(BlockingIOError):
            while os.read(self._wakeup_read, 4096):
                pass
        with suppress(ChildProcessError):  # none is left
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                self._send(ended=ended[0], code=os.waitstatus_to_exitcode(ended[1]))

    def _release(self) -> None:
        """Give up, in a fork, the signal handlers and descriptors of the fork server."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        # By its object: that would else close, when it is collected, whichever descriptor has its number by then.
        self._channel.close()
        os.close(self._wakeup_read)
        os.close(self._wakeup_write)

    def _send(self, **message: Any) -> None:
        with suppress(ConnectionError):  # the launcher is gone: the next read from the connection shows it, too
            self._channel.send(json.dumps(message).encode())


def _fork_leader() -> int:
    """Fork a process that leads a session and a process group of its own; like ``os.fork``.

    The launcher kills workers by their groups, so the group must be there before the launcher hears of the worker.
    """
    read_end, write_end = os.pipe()
    try:
        child = os.fork()
        if child == 0:
            os.setsid()
    except OSError:
        os.close(read_end)
        raise
    finally:
        os.close(write_end)
    if child:
        os.read(read_end, 1)  # returns once the child, which leads its session now, has closed its end, or has ended
    os.close(read_end)
    return child


def become(fork: Fork) -> None:
    """Put this fork into the state of a fresh ``python -P -u -m unisono.launch.worker`` before its first line."""
    os.dup2(fork.out, STANDARD_OUTPUT)
    os.dup2(fork.err, STANDARD_ERROR)
    if fork.inherited is not None:
        os.dup2(fork.inherited, FIRST_INHERITED)
    _close_all_after(STANDARD_ERROR if fork.inherited is None else FIRST_INHERITED)
    request = fork.request
    # The kernel ends a worker with its parent, and that is the fork server.
    os.environ.update({**request.variables, "UNISONO_LAUNCHER_PID": str(fork.parent)})
    os.chdir(request.cwd)
    sys.argv = [worker.__file__, *request.argv]
    sys.orig_argv = [sys.executable, "-P", "-u", "-m", worker.__name__, *request.argv]
    # In a fresh process each generator has a seed from the system; all forks would have the fork server's.
    random.seed()
    np.random.seed()
    torch.default_generator.seed()


def main() -> None:
    """Serve the launcher, or, in a fork, be the worker that it asked for."""
    worker.end_with_launcher()
    load()
    fork = ForkServer(socket.socket(fileno=int(sys.argv[1]))).serve()
    if fork is None:
        os._exit(0)  # the exit handlers of torch take time, and nothing needs them here
    become(fork)
    worker.main()  # the interpreter then ends as after any script: exit handlers, threads, streams


def load() -> None:
    """Load the modules that are not loaded by importing this one, and end the threads that would prevent forks."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)  # the first optimizer has torch load 800 more modules
    _end_threads_that_end_before_forks()


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208 (counts names, opens nothing)


def _end_threads_that_end_before_forks() -> None:
    """Fork a process that ends at once: OpenBLAS ends its threads before a fork, and starts new ones when needed."""
    if _threads() > 1:
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)


def _descriptors() -> set[int]:
    """The open descriptors; that of the listing itself may be among them, and is closed by now."""
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


def _do_nothing(number: int, frame: Any) -> None:
    """Handle a signal by doing nothing: the wake-up descriptor becomes readable."""


if __name__ == "__main__":
    main()
