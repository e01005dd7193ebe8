"""A small process that outlives a launcher killed with -9, ends what its workers started, and removes its secrets.

The kernel ends the workers themselves; programs that those started would live on. The guard reads process groups
from its standard input: ``+1234`` when a worker starts, ``-1234`` when its group has ended; ``/path`` is a folder of
files that nobody else may find. The end of the input is the launcher's end, however it came: whatever is still listed
is killed, and the folders are removed.

It runs as a plain file without any import of this package, so that it starts in some milliseconds.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Guard:
    """The launcher's side: starts the guard, and tells it of workers.

    A guard that cannot be reached any more is no reason to stop training; its task is taken over by nobody.
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
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        """This process group has ended; its number may be given to another."""
        self._tell(f"-{group}\n")

    def remove(self, folder: str) -> None:
        """Remove this folder, an absolute path, and the files in it in the end."""
        self._tell(f"{folder}\n")

    def close(self) -> None:
        """End the guard, and with it whatever it still watches."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(os.fsencode(line))


@contextmanager
def private_folder() -> Iterator[str]:
    """A new temporary folder for files that nobody else may find; gone in the end, also if this process is killed."""
    import tempfile

    guard = Guard()
    try:
        folder = tempfile.mkdtemp(prefix="unisono-")
        guard.remove(folder)
        yield folder
    finally:
        guard.close()


def kill_group(group: int) -> None:
    """End every process of a group at once."""
    # Nobody is left in it, or (macOS) only processes that have ended already.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def main() -> None:
    """Read groups and folders until the launcher is gone, then end and remove them."""
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
        from pathlib import Path  # it takes as long to load as all else here

        with suppress(OSError):
            folder = Path(os.fsdecode(name))
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()


if __name__ == "__main__":
    main()
