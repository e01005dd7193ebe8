"""A process beside a worker that does to others what the worker, once the fault has hit it, cannot do any more.

It runs as a plain file, in the worker's process group, so that it starts in some milliseconds and ends with the worker.
``fault_helper.py continue PID SECONDS`` wakes a process that stands still; ``fault_helper.py kill FILE SECONDS`` kills
the process whose number the JSON file names, as often as another one comes, while the time lasts. Both say when they
are ready.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

if __name__ == "__main__":  # as a plain file it finds the package only if told where that is
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from unisono.received import parse_object

PAUSE_S = 0.02
LINGER_S = 1.0


def wake(pid: int, seconds: float) -> None:
    """Let a process go on, once the time is over."""
    time.sleep(seconds)
    until = time.monotonic() + LINGER_S  # it may stop a little later than it said
    with suppress(ProcessLookupError):
        while time.monotonic() < until:
            os.kill(pid, signal.SIGCONT)
            time.sleep(PAUSE_S)


def keep_killing(path: str, seconds: float) -> None:
    """Kill whomever the file names, until the time is over."""
    until, killed = time.monotonic() + seconds, 0
    while True:
        pid = named_in(path)
        if pid is not None and pid != killed:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            killed = pid
        if time.monotonic() >= until:
            return
        time.sleep(PAUSE_S)


def named_in(path: str) -> int | None:
    """The process that the file names, if it still is what the file says."""
    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123 (starts faster)
            pid = int(parse_object(file.read())["pid"])
        with open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123
            return pid if b"unisono.membership.server" in file.read() else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def main() -> None:
    """Do what the arguments say."""
    what, whom, seconds = sys.argv[1:]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    if what == "continue":
        wake(int(whom), float(seconds))
    else:
        keep_killing(whom, float(seconds))


if __name__ == "__main__":
    main()
