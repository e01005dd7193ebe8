"""Many jobs, one after the other or beside each other, that load what they need once: for test suites."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from unisono.launch.command import elastic_command
from unisono.launch.forkserver.client import SHARED_FORK_SERVER
from unisono.launch.settings import LaunchSettings, Script
from unisono.launch.tuning import Tuning

WAITING = 128
"""Jobs that may ask at the same time."""


@contextmanager
def warm_jobs(varying: Collection[str] = ()) -> Iterator[None]:
    """As long as the context lasts, jobs that are started from this process fork their workers from one that has torch.

    They fork their coordinators, too, from one that has loaded those; and :func:`~unisono.testing.start` forks
    launchers. A job whose workers would differ from such forks in more than their script loads torch for itself: one
    with other variables, threads, tuning, limits, rights or priority, or in other namespaces. ``logs/template.log`` in
    its run folder then says why, and ``logs/coordinator.log`` of its coordinator. One worker alone (``-n 1`` without
    ``--max-restarts``) is a program of its own, as always. Where no forks can be trusted (on all but Linux), nothing
    changes.

    Args:
        varying: variables in which jobs may differ all the same, since nothing reads them while torch is loaded. Those
            whose names begin with ``UNISONO_``, and those that shells set (``PWD``), always may.
    """
    if sys.platform != "linux":
        yield
        return
    with tempfile.TemporaryDirectory(prefix="unisono-fork-server-") as folder, ExitStack() as opened:
        opened.enter_context(_shared_fork_server("torch", Path(folder), _of_workers(Path(folder)), varying))
        opened.enter_context(_shared_fork_server("commands", Path(folder), os.environ, varying))
        before = os.environ.get(SHARED_FORK_SERVER)
        os.environ[SHARED_FORK_SERVER] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ[SHARED_FORK_SERVER]
            else:
                os.environ[SHARED_FORK_SERVER] = before


@contextmanager
def _shared_fork_server(
    name: str, folder: Path, environment: Mapping[str, str], varying: Collection[str]
) -> Iterator[None]:
    """One shared fork server, which listens at the socket of its name in a folder that only this user enters."""
    unbuffered = ["-u"] if name == "torch" else []  # as what it forks would be started
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(folder / name))
        listener.listen(WAITING)
        module = "unisono.launch.forkserver.shared_server"
        process = subprocess.Popen(
            [sys.executable, "-P", *unbuffered, "-m", module, name, str(listener.fileno()), *varying],
            env={**environment, "UNISONO_LAUNCHER_PID": str(os.getpid())},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[listener.fileno()],
        )
    try:  # the socket is closed here, so that who asks hears of the shared fork server's end
        yield
    finally:
        process.kill()
        process.wait()


def _of_workers(folder: Path) -> dict[str, str]:
    """The environment of the workers of a job that is started without further options."""
    settings = LaunchSettings(Script(""), tuning=Tuning.of_this_process())
    return elastic_command(settings, folder, None).environment(os.environ)
