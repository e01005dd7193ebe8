"""The page of a job, as a process beside its launcher."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE_S = 5.0
LONGEST_LINK = 256


@contextmanager
def page_beside(run_dir: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Until the context ends, a process serves the page of a run.

    Args:
        run_dir: the run folder.
        say: a function that shows a line to the person at the terminal, from any thread.
    """
    log = run_dir / "logs" / "page.log"
    with log.open("ab") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "unisono", "page", str(run_dir), "--parent", str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # Ctrl-C is for the workers; the page tells what comes of it
        )
    assert process.stdout is not None
    reading = threading.Thread(target=_tell, args=(process, say, log), name="unisono-page", daemon=True)
    reading.start()
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reading.join()
        process.stdout.close()


def _tell(process: "subprocess.Popen[bytes]", say: Callable[[str], None], log: Path) -> None:
    assert process.stdout is not None
    link = process.stdout.readline(LONGEST_LINK).decode("ascii", errors="replace").strip()
    if link:
        say(f"the page: {link} (opens once, within an hour; Share, there, gives a link for others)")
    elif process.wait() not in (0, -signal.SIGTERM):
        say(f"there is no page: see {log}")
