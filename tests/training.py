"""A job that trains a script with nearly everything, for the tests that disturb it."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from forks.commands import start
from unisono.launch.elastic.address import Control, address_of

SCRIPT = Path(__file__).parent / "procs" / "scripts" / "elastic_training.py"
SETTINGS = (
    *("EPOCHS", "FAULTS", "HURRY", "PACE_S", "STOP_BELOW"),
    *("DECIDED", "LOADERS", "ODD", "OPTIONS", "POLICY", "SLOW", "TIMEOUT_S", "TROUBLE"),
    *("SAMPLER", "STREAM", "LEDGER", "ENTERS", "STAGES", "MATRICES"),
)
"""Variables that this script, and the other scripts of these tests, read."""

PATIENCE_S = 90.0


class Trained:
    """What a job has left.

    Args:
        folder: its run folder; what it printed lies beside it.
    """

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder
        self.output = folder.with_suffix(".txt")

    def end(self) -> str:
        """The digest of the weights."""
        return str(json.loads((self.run_dir / "result.json").read_text())["weights_sha256"])

    def journal(self, event: str) -> list[dict[str, Any]]:
        return [one for one in whole_lines(self.run_dir / "journal.jsonl") if one["event"] == event]

    @property
    def steps(self) -> list[int]:
        """The steps that ``metrics.jsonl`` has lines of."""
        return [line["step"] for line in whole_lines(self.run_dir / "metrics.jsonl") if "loss" in line]

    @property
    def said(self) -> list[str]:
        """What the script printed on the main worker at the end of each epoch, and at its end."""
        lines = re.findall(r"(?:epoch \d+: .*|after .*)", self.output.read_text())
        return sorted({re.sub(r" on \d+$", "", line) for line in lines})


class Training(Trained):
    """A job that trains in a folder of its own."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        faults: Sequence[Mapping[str, Any]] = (),
        script: Path = SCRIPT,
        **settings: str,
    ) -> None:
        super().__init__(folder)
        self._hurry = folder.with_suffix(".hurry")
        own = {"FAULTS": json.dumps(list(faults)), "HURRY": str(self._hurry)}
        environment = {**os.environ, **own, **settings}
        words = ("run", *options, "--run-dir", str(folder), str(script))
        with self.output.open("wb") as output:
            self.process = start(*words, env=environment, stdout=output, stderr=subprocess.STDOUT)

    def end(self) -> str:
        """Wait for the end; returns the digest of the weights."""
        code = self.process.wait(PATIENCE_S)
        assert code == 0, self.output.read_text()
        return super().end()

    def hurry(self) -> None:
        """From now on it trains as fast as it can: all that it was to be slow for has happened."""
        self._hurry.touch()

    def ask(self, *words: str) -> None:
        code = start(*words, "--run-dir", str(self.run_dir), stdout=subprocess.DEVNULL).wait(PATIENCE_S)
        assert code == 0, words

    def until(self, event: str, **fields: Any) -> None:
        """Wait until the journal has an event with these fields."""
        self.until_so(lambda: any(fields.items() <= one.items() for one in self.journal(event)), f"{event} {fields}")

    def until_step(self, step: int) -> None:
        """Wait until it is committed."""
        self.until_so(lambda: step in self.steps, f"step {step}")

    def until_so(self, is_so: Callable[[], bool], words: str) -> None:
        """Wait."""
        begun = time.monotonic()
        while not is_so():
            assert time.monotonic() - begun < PATIENCE_S, f"{words} did not come:\n{self.output.read_text()}"
            assert self.process.poll() is None or is_so(), f"it ended before {words}:\n{self.output.read_text()}"
            time.sleep(0.01)

    @property
    def coordinator(self) -> int:
        """Its process id."""
        return int(json.loads((self.run_dir / "coordinator.json").read_text())["pid"])

    def pid_of(self, worker: str) -> int:
        """A worker's process id."""
        members = control_of(self.run_dir).status()["members"]
        return int(next(one["pid"] for one in members if one["id"] == worker))

    def kill_everything(self) -> None:
        """The launcher, its workers, the fork server, the coordinator, the guard: at once."""
        family = family_of(self.process.pid, self.run_dir)
        for one in family:
            one.send_signal(signal.SIGSTOP)  # so that none of them sees another one's end
        for one in family:
            one.kill()
        psutil.wait_procs(family[1:], timeout=PATIENCE_S)
        self.process.wait(PATIENCE_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def family_of(launcher: int, run_dir: Path) -> list[psutil.Process]:
    """A launcher, and all that has been started for its job.

    What a shared fork server has forked for it is not below it, but writes to the job's logs; nor is what that has
    started.
    """
    itself = psutil.Process(launcher)
    found = {itself.pid: itself} | {one.pid: one for one in itself.children(recursive=True)}
    for one in psutil.Process().children(recursive=True):
        with suppress(OSError):  # it has just ended
            if Path(os.readlink(f"/proc/{one.pid}/fd/1")).parent == run_dir / "logs":  # noqa: PTH115 (as text)
                found |= {each.pid: each for each in (one, *one.children(recursive=True))}
    return list(found.values())


def control_of(run_dir: Path) -> Control:
    """What `unisono status` and the others ask, without a process for each question."""
    return Control(address_of(run_dir))


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file that somebody may be writing just now."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
