"""`unisono run` in a folder of its own, with a script that a test writes, and what is read of its output."""

import json
import os
import subprocess
import textwrap
from pathlib import Path
from typing import IO

from forks.commands import ForkedCommand, start

PATIENCE_S = 100.0


class Run:
    """A launcher in a folder of its own.

    Args:
        folder: that of its scripts and its run folder.
        preamble: what all of its scripts begin with.
        options: what it is always told.
    """

    def __init__(self, folder: Path, preamble: str, *options: str) -> None:
        self.folder, self._preamble, self._options = folder, preamble, options
        self.run_dir = folder / "run"
        self.lines: list[str] = []
        self._process: ForkedCommand | subprocess.Popen[bytes] | None = None
        self._output: IO[str] | None = None

    def start(self, body: str, *options: str, workers: int = 2, argument: str = "an argument") -> None:
        """Start a script, with further options."""
        (self.folder / "train.py").write_text(self._preamble + textwrap.dedent(body))
        words = ("run", "-n", str(workers), "--run-dir", str(self.run_dir), *self._options, *options)
        reading, writing = os.pipe()
        self._output = os.fdopen(reading)
        try:
            self._process = start(
                *(*words, "train.py", argument),
                cwd=self.folder,
                env={name: value for name, value in os.environ.items() if not name.startswith("UNISONO_")},
                stdout=writing,
                stderr=subprocess.STDOUT,
            )
        finally:
            os.close(writing)

    @property
    def process(self) -> ForkedCommand | subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    @property
    def output(self) -> IO[str]:
        assert self._output is not None
        return self._output

    def until(self, words: str, times: int = 1) -> list[str]:
        """Read on until as many lines have these words."""
        found: list[str] = []
        while len(found) < times:
            line = self.output.readline()
            assert line, f"{words!r} came {len(found)} times in:\n" + "".join(self.lines)
            self.lines.append(line)
            found += [line] if words in line else []
        return found

    def end(self) -> int:
        """Wait for the launcher's end; its exit code."""
        self.lines += self.output.readlines()
        self.output.close()
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(PATIENCE_S)
        if self._output is not None:
            self._output.close()

    def __call__(self, body: str, *options: str, workers: int = 2) -> int:
        """Run a script to its end."""
        self.start(body, *options, workers=workers)
        return self.end()

    @property
    def text(self) -> str:
        return "".join(self.lines)

    @property
    def result(self) -> dict[str, object]:
        found = json.loads((self.run_dir / "result.json").read_text())
        assert isinstance(found, dict)
        return found

    def log(self, rank: int) -> bytes:
        return (self.run_dir / "logs" / f"rank-{rank}.log").read_bytes()

    def began(self, rank: int) -> float:
        """When the exception of a rank was raised, in seconds since 1970."""
        record = json.loads((self.run_dir / "logs" / f"rank-{rank}.error.json").read_text())
        return float(record["time"])
