"""A process that has torch and unisono loaded, and forks templates: for those who start many jobs. Linux only.

``python -P -u -m unisono.launch.forkserver.nursery FD VARYING…``, started in the environment that workers of the jobs
will have. ``FD`` is a listening socket (AF_UNIX, SEQPACKET) in a folder that only this user enters. Whoever connects
sends a :class:`~unisono.launch.forkserver.request.Wish`, with the descriptor of a log, and hears ``{"born": pid}``
from a template that goes on at this connection as it would with the launcher that had started it; or ``{"refused":
why}``.

A template ends with its launcher, and the workers with the template. None of them needs the nursery any more, which
ends with the process that has started it.
"""

import gc
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

from unisono.launch import worker  # isort: skip  (first, as in the template)

from unisono.errors import Unreadable
from unisono.launch.forkserver import template
from unisono.launch.forkserver.request import NEVER_IGNORED, Wish, circumstances, environment_at_start
from unisono.same_user import is_same_user

LONGEST_WISH = 2**20
PATIENCE_S = 5.0
"""How long someone who has connected may take to say what is wished for. Wishes are sent at once."""


class Nursery:
    """Forks templates.

    Args:
        door: where launchers connect.
        found: what each fork of this process is.
        varying: variables in which launchers may differ from it.
    """

    def __init__(self, door: socket.socket, found: Wish, varying: Collection[str]) -> None:
        self._door, self._found, self._varying = door, found, varying
        self._set_by_libraries = {name: os.environ[name] for name in os.environ if name not in found.environment}

    def serve(self) -> socket.socket:
        """Fork as often as asked, for ever. In each fork, the socket that leads to its launcher."""
        gc.collect()
        gc.freeze()  # as in the template: a collection in a fork would copy every page
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody here wants to know how they end
        while True:
            channel, _ = self._door.accept()
            with suppress(OSError, Unreadable):  # whoever it was has hung up, says nothing, or what is no wish
                if self._answer(channel):
                    return channel
            channel.close()

    def _answer(self, channel: socket.socket) -> bool:
        """Fork, or say why not. True in the fork."""
        if not is_same_user(channel):
            return False
        channel.settimeout(PATIENCE_S)
        data, descriptors, _, _ = socket.recv_fds(channel, LONGEST_WISH, 1)
        try:
            if not data:
                return False
            wish = Wish.from_json(data)
            if why := wish.obstacle(self._found, self._varying):
                channel.send(json.dumps({"refused": why}).encode())
                return False
            if os.fork() != 0:
                return False
            self._door.close()
            channel.settimeout(None)
            _begin(channel, wish.with_variables(self._set_by_libraries), *descriptors)
            return True
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


def _begin(channel: socket.socket, wish: Wish, log: int) -> None:
    """In a fork: be the template that the launcher would have started, and say so."""
    try:
        _become(wish, log)
        channel.send(json.dumps({"born": os.getpid()}).encode())
    except BaseException:  # noqa: BLE001 (whatever it is: a fork that went on would be a second nursery)
        traceback.print_exc()
        os._exit(1)


def _become(wish: Wish, log: int) -> None:
    os.setsid()
    for output in (template.STANDARD_OUTPUT, template.STANDARD_ERROR):
        os.dup2(log, output)
    os.environ.clear()
    os.environ.update(wish.environment)
    os.chdir(wish.cwd)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, _as_python_begins(number, wish.ignored))


def _as_python_begins(number: int, ignored: Collection[int]) -> signal.Handlers | Callable[[int, Any], Any]:
    if number in ignored or number in NEVER_IGNORED:
        return signal.SIG_IGN
    return signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL


def main() -> None:
    """Serve; or, in a fork, be a template; or, in a fork of that, a worker."""
    worker.die_with(os.environ.get("UNISONO_LAUNCHER_PID"))
    door = socket.socket(fileno=int(sys.argv[1]))
    template.load()
    began = environment_at_start()
    template.serve(Nursery(door, Wish(began, circumstances(began)), frozenset(sys.argv[2:])).serve())


if __name__ == "__main__":
    main()
