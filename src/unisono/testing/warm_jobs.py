"""Many jobs, one after the other or beside each other, that load torch once: for test suites of training scripts."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from unisono.launch.command import elastic_command
from unisono.launch.forkserver.born import NURSERY
from unisono.launch.script import Script
from unisono.launch.settings import LaunchSettings
from unisono.launch.tuning import Tuning

WAITING = 128
"""Jobs that may ask at the same time."""


@contextmanager
def warm_jobs(varying: Collection[str] = ()) -> Iterator[None]:
    """As long as the context lasts, jobs that are started from this process fork their workers from one that has torch.

    A job whose workers would differ from such forks in more than their script loads torch for itself: one with other
    variables, threads, tuning, limits, rights or priority, or in other namespaces. ``logs/template.log`` in its run
    folder then says why. One worker alone (``-n 1`` without ``--max-restarts``) is a program of its own, as always.
    Where no forks can be trusted (on all but Linux), nothing changes.

    Args:
        varying: variables in which jobs may differ all the same, since nothing reads them while torch is loaded. Those
            whose names begin with ``UNISONO_``, and those that shells set (``PWD``), always may.
    """
    if sys.platform != "linux":
        yield
        return
    with tempfile.TemporaryDirectory(prefix="unisono-nursery-") as folder, _listening(Path(folder, "door")) as door:
        process = subprocess.Popen(
            [sys.executable, "-P", "-u", "-m", "unisono.launch.forkserver.nursery", str(door.fileno()), *varying],
            env={**_environment(Path(folder)), "UNISONO_LAUNCHER_PID": str(os.getpid())},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[door.fileno()],
        )
        door.close()  # so that launchers hear of its end
        before = os.environ.get(NURSERY)
        os.environ[NURSERY] = str(Path(folder, "door"))
        try:
            yield
        finally:
            if before is None:
                del os.environ[NURSERY]
            else:
                os.environ[NURSERY] = before
            process.kill()
            process.wait()


@contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    """A socket in a folder that only this user enters."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(str(path))
        door.listen(WAITING)
        yield door


def _environment(folder: Path) -> dict[str, str]:
    """That of the workers of a job that is started without further options."""
    settings = LaunchSettings(Script(""), tuning=Tuning.of_this_process())
    return elastic_command(settings, folder, None).environment(os.environ)
