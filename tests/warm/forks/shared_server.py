"""A process that has programs of ours loaded, and forks them: for those who start many jobs. Linux only.

``python -P -m forks.shared_server NAME FD VARYING…``, started in the environment that its forks
will have. ``NAME`` is ``torch`` (it forks fork servers) or ``commands`` (launchers, coordinators, and whatever else
needs no torch). ``FD`` is a listening socket (AF_UNIX, SEQPACKET) in a folder that only this user enters. Whoever
connects sends a :class:`~forks.request.ForkRequest`, with the descriptors of the program. It hears
``{"born": pid}`` from the fork, and ``{"ended": code}`` from here when that has ended; or ``{"refused": why}``.

No program needs the shared fork server any more, which ends with the process that has started it.
"""

import gc
import importlib
import json
import os
import select
import socket
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from forks.fork import arrange, become, run
from forks.request import (
    COORDINATOR,
    ForkRequest,
    environment_at_start,
    process_attributes,
    socket_of,
)
from forks.starts import replace
from unisono.errors import Unreadable
from unisono.host.process import end_with_parent
from unisono.launch.worker_start import FORK_SERVER
from unisono.received import is_same_user

LOADED = {
    "torch": (FORK_SERVER,),
    "commands": (
        *(f"unisono.cli.{name}" for name in ("app", "run_command", "jobs", "verify_command")),
        *(f"unisono_lab.commands.{name}" for name in ("study", "batch_size")),
        "unisono.launch.elastic.agent",
        COORDINATOR,
    ),
}
"""The modules that a shared fork server of this name has loaded, with all that they import."""

LONGEST_REQUEST = 2**20
MOST_SENT = 16
"""Descriptors that a program may be given."""

PATIENCE_S = 5.0
"""How long someone who has connected may take to say what is asked for. Requests are sent at once."""


@dataclass(frozen=True, slots=True)
class Running:
    """A program that this process has forked.

    Attributes:
        pid: its process id.
        channel: the socket on which its end is told.
    """

    pid: int
    channel: socket.socket


class SharedForkServer:
    """Forks the programs that other processes ask for.

    Args:
        name: the name of this server, which ``socket_of`` takes.
        listener: the socket at which others connect.
        found: the environment and process attributes of this process, which its forks inherit.
        varying: the environment variables in which a requester may differ from this process.
    """

    def __init__(self, name: str, listener: socket.socket, found: ForkRequest, varying: Collection[str]) -> None:
        self._name, self._listener, self._found, self._varying = name, listener, found, varying
        self._set_by_libraries = {name: os.environ[name] for name in os.environ if name not in found.environment}
        self._running: dict[int, Running] = {}
        self._events = select.poll()

    def serve(self) -> tuple[str, ...]:
        """Fork as often as asked, for ever. In each fork, the command that it is to run."""
        gc.collect()
        gc.freeze()  # as in the fork server: a collection in a fork would copy every page
        self._events.register(self._listener, select.POLLIN)
        while True:
            for descriptor, _ in self._events.poll():
                if descriptor != self._listener.fileno():
                    self._tell_end(descriptor)
                elif (command := self._answer()) is not None:
                    return command

    def _answer(self) -> tuple[str, ...] | None:
        """Fork, or say why not. In the fork, the command that it is to run."""
        channel, _ = self._listener.accept()
        received: list[int] = []
        child = None
        try:
            if is_same_user(channel):
                request = _heard(channel, received)
                child = self._forked(request, channel)
        except (OSError, Unreadable):  # whoever it was has hung up, says nothing, or what is no request
            pass
        if child == 0:
            self._begin(request, received, channel)
            return request.command
        for descriptor in received:
            os.close(descriptor)
        if child is None:
            channel.close()
        else:
            self._keep(child, channel)
        return None

    def _forked(self, request: ForkRequest, channel: socket.socket) -> int | None:
        """The process id of a new child, 0 in it; None if there is none, and why not was said."""
        if why := self._obstacle(request):
            channel.send(json.dumps({"refused": why}).encode())
            return None
        return os.fork()

    def _obstacle(self, request: ForkRequest) -> str:
        """Why a fork would be another program than was asked for; empty if it would not."""
        threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208 (counts names, opens nothing)
        if threads > 1:
            return f"{threads} threads run in the shared fork server, and a fork would have one of them only"
        if (listener := socket_of(request.command[0])) != self._name:
            return f"{request.command[0]} is forked at {listener}, and not at {self._name}"
        return request.obstacle(self._found, self._varying)

    def _begin(self, request: ForkRequest, received: Sequence[int], channel: socket.socket) -> None:
        """In a fork: be what was asked for, and say so."""
        for one in (self._listener, *(running.channel for running in self._running.values())):
            one.detach()  # their numbers are others' now
        try:
            channel = arrange(received, request.descriptors, channel)
            become(request.with_variables(self._set_by_libraries))
            channel.send(json.dumps({"born": os.getpid()}).encode())
            channel.close()
        except BaseException as error:  # noqa: BLE001 (whatever it is: a fork that went on would be a second shared fork server)
            with suppress(OSError):
                channel.send(json.dumps({"refused": repr(error)}).encode())
            os._exit(1)

    def _keep(self, child: int, channel: socket.socket) -> None:
        itself = os.pidfd_open(child)
        self._running[itself] = Running(child, channel)
        self._events.register(itself, select.POLLIN)

    def _tell_end(self, itself: int) -> None:
        """A program has ended: say how."""
        self._events.unregister(itself)
        os.close(itself)
        ended = self._running.pop(itself)
        code = os.waitstatus_to_exitcode(os.waitpid(ended.pid, 0)[1])
        with ended.channel, suppress(OSError):  # nobody wants to know
            ended.channel.send(json.dumps({"ended": code}).encode())


def _heard(channel: socket.socket, received: list[int]) -> ForkRequest:
    """The request on a connection.

    Args:
        channel: the connection.
        received: a list that gets the descriptors beside the request.

    Raises:
        OSError: nobody says anything.
        Unreadable: it is no request.
    """
    channel.settimeout(PATIENCE_S)
    data, descriptors, _, _ = socket.recv_fds(channel, LONGEST_REQUEST, MOST_SENT)
    received += descriptors
    request = ForkRequest.from_json(data)
    if len(request.descriptors) != len(descriptors) or not {0, 1, 2} <= set(request.descriptors):
        raise Unreadable("a program has its input, output and errors, and as many descriptors as were sent")
    return request


def main() -> None:
    """Serve; or, in a fork, be the program that was asked for."""
    name, listener = sys.argv[1], socket.socket(fileno=int(sys.argv[2]))
    end_with_parent(int(os.environ["UNISONO_LAUNCHER_PID"]))
    load(name)
    began = environment_at_start()
    found = ForkRequest(began, process_attributes(began, os.getcwd()))  # noqa: PTH109 (as text)
    command = SharedForkServer(name, listener, found, frozenset(sys.argv[3:])).serve()
    if command[0] == "unisono":
        replace()  # as `sitecustomize` does in a launcher that is no fork
    run(command)


def load(name: str) -> None:
    """Load what the programs that this process forks would load."""
    for module in LOADED[name]:
        importlib.import_module(module)
    if name == "torch":
        sys.modules[FORK_SERVER].load()


if __name__ == "__main__":
    main()
