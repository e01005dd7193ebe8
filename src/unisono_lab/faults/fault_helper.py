"""A process beside a worker that does what the worker cannot do itself once the fault has hit it.

It runs as a plain file, in the worker's process group, so that it starts in some milliseconds and ends with the worker.
``fault_helper.py continue PID SECONDS`` continues a stopped process after this time. ``fault_helper.py kill FILE
SECONDS`` kills the process whose number the JSON file holds, and each process that replaces it, until the time is over.
Both print a line when they are ready.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

if __name__ == "__main__":  # a plain file has its own folder in sys.path, not the package's
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from unisono.received import parse_object

PAUSE_S = 0.02
LINGER_S = 1.0


def wake(pid: int, seconds: float) -> None:
    """Continue a process once the time is over."""
    time.sleep(seconds)
    end = time.monotonic() + LINGER_S  # the process may stop a little later than expected
    with suppress(ProcessLookupError):
        while time.monotonic() < end:
            os.kill(pid, signal.SIGCONT)
            time.sleep(PAUSE_S)


def keep_killing(path: str, seconds: float) -> None:
    """Kill each process that the file names, until the time is over."""
    end, killed = time.monotonic() + seconds, 0
    while True:
        pid = coordinator_in(path)
        if pid is not None and pid != killed:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            killed = pid
        if time.monotonic() >= end:
            return
        time.sleep(PAUSE_S)


def coordinator_in(path: str) -> int | None:
    """The process id in the file, if that process is a coordinator."""
    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123 (starts faster)
            pid = int(parse_object(file.read())["pid"])
        with open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123
            return pid if b"unisono.membership.server" in file.read() else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def main() -> None:
    """Run the command in the arguments."""
    command, target, seconds = sys.argv[1:]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    if command == "continue":
        wake(int(target), float(seconds))
    else:
        keep_killing(target, float(seconds))


if __name__ == "__main__":
    main()
