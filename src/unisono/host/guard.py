"""A small process that outlives a launcher killed with -9, and ends what its workers started.

The kernel ends the workers themselves; programs that those started would live on. The guard reads process groups
from its standard input: ``+1234`` when a worker starts, ``-1234`` when its group has ended. The end of the input
is the launcher's end, however it came: whatever is still listed is killed.

It runs as a plain file without any import of this package, so that it starts in some milliseconds.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress


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

    def close(self) -> None:
        """End the guard, and with it whatever it still watches."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(line.encode())


def kill_group(group: int) -> None:
    """End every process of a group at once."""
    # Nobody is left in it, or (macOS) only processes that have ended already.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def main() -> None:
    """Read groups until the launcher is gone, then end them."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    watched: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        (watched.add if line[0] == "+" else watched.discard)(group)
    for group in watched:
        kill_group(group)


if __name__ == "__main__":
    main()
