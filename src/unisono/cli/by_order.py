"""The program that a launcher runs on each host: ``unisono join``, with an order that it reads from standard input.

It ends when its standard input does: then the launcher has ended, or cannot be reached any more.
"""

import os
import platform
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from unisono.cli import app
from unisono.errors import FIRST_SIGNAL, USAGE, Unreadable
from unisono.host.guard import private_folder
from unisono.launch.elastic.address import LONGEST, HostOrder

STANDARD_INPUT = 0
ENDS_S = 10.0
"""The seconds that the agent may take to end by itself once the launcher has ended."""


def main() -> None:
    """Read the order, and run ``unisono join`` by it."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(FIRST_SIGNAL + number))
    # SIGINT is the second signal to the agent, below. Until the agent handles signals, SIGTERM alone ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not (line := _read_line()):
        sys.exit(1)
    try:
        order = HostOrder.from_line(line)
        os.chdir(order.folder)
    except Unreadable as error:
        sys.exit(_refused(f"the launcher has sent an order that this version of Unisono does not know: {error}"))
    except OSError as error:
        sys.exit(
            _refused(
                f"the working folder {order.folder} cannot be entered here ({error.strerror}): all hosts need the same "
                f"script, data and folders; mount them, or copy them with rsync -a"
            )
        )
    os.environ.update(order.environment)
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    with private_folder() as folder:
        token, certificate = Path(folder, "token"), Path(folder, "certificate.pem")
        token.touch(mode=0o600)
        token.write_text(order.token, encoding="ascii")
        trusted = ["--token-file", str(token)]
        if order.certificate:
            certificate.write_text(order.certificate, encoding="ascii")
            trusted += ["--certificate", str(certificate)]
        url = order.url_from(os.environ.get("SSH_CONNECTION", ""))
        sys.argv = ["unisono", "join", url, *trusted, "--agent", order.agent, *order.words]
        try:
            app.main()
        except ImportError as error:  # PYTHONPATH is for another version of Python, say
            python = f"Python {platform.python_version()} ({sys.executable})"
            sys.exit(_refused(f"{python} lacks what Unisono needs, or has it for another version: {error}"))


def _read_line() -> bytes:
    """The first line of the input. It is read without Python's buffer, whose lock could block this process's end."""
    line = b""
    while not line.endswith(b"\n") and len(line) <= LONGEST:
        data = os.read(STANDARD_INPUT, 2**16)
        if not data:
            return b""
        line += data
    return line


def _end_with_launcher() -> None:
    """Wait for the end of the input; then have the agent kill its workers and end."""
    with suppress(OSError):
        while os.read(STANDARD_INPUT, 2**16):
            pass
    for number in (signal.SIGTERM, signal.SIGINT):  # the first asks workers to leave, the second has them killed
        os.kill(os.getpid(), number)
        time.sleep(0.05)
    time.sleep(ENDS_S)
    os.kill(os.getpid(), signal.SIGKILL)  # the agent's guard ends the processes that are left


def _refused(reason: str) -> int:
    print(f"unisono: error: {reason}", file=sys.stderr)  # noqa: T201
    return USAGE


if __name__ == "__main__":
    main()
