"""Commands of Unisono that run beside a program or a job, and end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from unisono.errors import FIRST_SIGNAL
from unisono.host.guard import Guard, kill_group
from unisono.launch.command import PER_WORKER


class CommandProcess:
    """A process that runs a command. A guard kills it, and with it its workers, when the program that started it ends.

    Args:
        words: the words after ``unisono``.
        variables: environment variables besides the program's.
        folder: the working folder.
        output: the file for what it prints; None for where the program's own output goes.
        module: the module to run.
        standard_input: what it reads on its standard input, which stays open until ``close``.

    Raises:
        OSError: it cannot be started: the folder does not exist, say.
    """

    def __init__(
        self,
        words: Sequence[str],
        variables: Mapping[str, str],
        folder: str,
        output: IO[bytes] | None = None,
        *,
        module: str = "unisono",
        standard_input: bytes | None = None,
    ) -> None:
        inherited = {name: value for name, value in os.environ.items() if name not in PER_WORKER}
        self._guard = Guard()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *words],
                cwd=folder,
                env=inherited | dict(variables),
                stdin=subprocess.DEVNULL if standard_input is None else subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        except BaseException:
            self._guard.close()
            raise
        self._guard.watch(self._process.pid)
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):  # it has ended already, and its exit code says more
                self._process.stdin.write(standard_input or b"")
                self._process.stdin.flush()

    @property
    def code(self) -> int | None:
        """Its exit code, as a shell gives it; None while it runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else FIRST_SIGNAL - code

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for its end; return its exit code, or None if it still runs after that time."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self.code

    def leave(self) -> None:
        """Ask it to leave, by SIGTERM. At the second one it kills its workers."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """Kill it if it still runs; its own guard ends what it has started."""
        if self._process.poll() is None:
            kill_group(self._process.pid)
            self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._guard.close()


# The page of a job, as a process beside its launcher.

PATIENCE_S = 5.0
LONGEST_LINK = 256


@contextmanager
def page_beside(run_dir: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Until the context ends, a process serves the page of a run; ``say`` is called from any thread."""
    log = run_dir / "logs" / "page.log"
    with log.open("ab") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "unisono", "page", str(run_dir), "--parent", str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # Ctrl-C is for the workers; the page shows what comes of it
        )
    assert process.stdout is not None
    reader = threading.Thread(target=_say_link, args=(process, say, log), name="unisono-page", daemon=True)
    reader.start()
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join()
        process.stdout.close()


def _say_link(process: subprocess.Popen[bytes], say: Callable[[str], None], log: Path) -> None:
    assert process.stdout is not None
    link = process.stdout.readline(LONGEST_LINK).decode("ascii", errors="replace").strip()
    if link:
        say(f"the page: {link} (opens once, within an hour; Share, there, gives a link for others)")
    elif process.wait() not in (0, -signal.SIGTERM):
        say(f"there is no page: see {log}")
