"""A small process that outlives a launcher killed with -9, ends what its workers started, and removes its secrets.

The kernel ends the workers themselves, but programs that they started would live on. The guard reads from its standard
input: ``+1234`` when a worker starts with this process group, ``-1234`` when the group has ended, ``/path`` for a
folder of secret files. The end of the input is the launcher's end, for whatever reason: then the guard kills all groups
that have not ended, and removes the folders.

It runs as a plain file that imports nothing of this package, so that it starts in some milliseconds.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Guard:
    """The launcher's side: starts the guard, and names process groups and folders to it.

    If the guard ends first, training goes on without one.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )

    def watch(self, group: int) -> None:
        """End this process group if the launcher ends first."""
        self._write(f"+{group}\n")

    def forget(self, group: int) -> None:
        """Do not end this process group, which has ended: the system may give its number to another one."""
        self._write(f"-{group}\n")

    def remove(self, folder: str) -> None:
        """Remove this folder, an absolute path, and the files in it when the launcher ends."""
        self._write(f"{folder}\n")

    def close(self) -> None:
        """End the guard, which ends all groups and removes all folders that it still has."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(os.fsencode(line))


@contextmanager
def private_folder() -> Iterator[str]:
    """A temporary folder for secret files, which is removed in the end even if this process is killed."""
    import tempfile

    guard = Guard()
    try:
        folder = tempfile.mkdtemp(prefix="unisono-")
        guard.remove(folder)
        yield folder
    finally:
        guard.close()


def kill_group(group: int) -> None:
    """Kill all processes of a group."""
    # The errors mean that the group is empty, or (macOS) holds only processes that have ended already.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def main() -> None:
    """Read groups and folders until the launcher has ended, then kill the groups and remove the folders."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    watched: set[int] = set()
    folders: list[bytes] = []
    for line in sys.stdin.buffer:
        if line.startswith(b"/"):
            folders.append(line.rstrip(b"\n"))
        else:
            (watched.add if line.startswith(b"+") else watched.discard)(int(line[1:]))
    for group in watched:
        kill_group(group)
    for name in folders:
        from pathlib import Path  # here, since it takes as long to import as all else together

        with suppress(OSError):
            folder = Path(os.fsdecode(name))
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()


if __name__ == "__main__":
    main()
