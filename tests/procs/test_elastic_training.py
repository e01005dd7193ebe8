"""Workers die, come and go while a script trains; the weights are those of the undisturbed serial run, bit for bit."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240)]

SCRIPT = Path(__file__).parent / "scripts" / "elastic_training.py"
PATIENCE_S = 90.0


class Training:
    """A job that trains in a folder of its own."""

    def __init__(self, folder: Path, *options: str, faults: Sequence[Mapping[str, Any]] = (), **settings: str) -> None:
        self.run_dir = folder
        self.output = folder.with_suffix(".txt")
        environment = {**os.environ, "FAULTS": json.dumps(list(faults)), **settings}
        command = [sys.executable, "-m", "unisono", "run", *options, "--run-dir", str(folder), str(SCRIPT)]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)

    def end(self) -> str:
        """Wait for the end; returns the digest of the weights."""
        code = self.process.wait(PATIENCE_S)
        assert code == 0, self.output.read_text()
        result = json.loads((self.run_dir / "result.json").read_text())
        return str(result["weights_sha256"])

    def ask(self, *words: str) -> None:
        command = [sys.executable, "-m", "unisono", *words, "--run-dir", str(self.run_dir)]
        subprocess.run(command, check=True, timeout=PATIENCE_S, stdout=subprocess.DEVNULL)

    def until(self, event: str, **fields: Any) -> None:
        """Wait until the journal has an event with these fields."""
        begun = time.monotonic()
        while not any(fields.items() <= one.items() for one in self.journal(event)):
            assert time.monotonic() - begun < PATIENCE_S, f"{event} {fields} did not come:\n{self.output.read_text()}"
            assert self.process.poll() is None, f"it ended before {event} {fields}:\n{self.output.read_text()}"
            time.sleep(0.01)

    def journal(self, event: str) -> list[dict[str, Any]]:
        path = self.run_dir / "journal.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [one for one in map(json.loads, lines) if one["event"] == event]

    @property
    def steps(self) -> list[int]:
        """The steps that ``metrics.jsonl`` has lines of."""
        lines = map(json.loads, (self.run_dir / "metrics.jsonl").read_text().splitlines())
        return [line["step"] for line in lines if "loss" in line]

    @property
    def said(self) -> list[str]:
        """What the script printed on the main worker at the end of each epoch, and at its end."""
        lines = re.findall(r"(?:epoch \d+: .*|after .*)", self.output.read_text())
        return sorted({re.sub(r" on \d+$", "", line) for line in lines})

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Training]]:
    trainings: list[Training] = []
    yield trainings
    for training in trainings:
        training.close()


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    """The undisturbed run of one worker."""
    training = Training(tmp_path_factory.mktemp("serial") / "run", "-n", "1", PACE_S="0")
    training.end()
    yield training
    training.close()


@pytest.mark.parametrize("places", [["after"], ["begin", "second"], ["first", "between", "second", "after"]])
def test_killing_all_but_one_worker_anywhere_in_a_step_changes_no_bit(
    places: list[str], serial: Training, started: list[Training], tmp_path: Path
) -> None:
    faults = [{"place": place, "step": 2 + 5 * number, "rank": number % 2} for number, place in enumerate(places)]
    workers = 1 + len(places)
    started.append(Training(tmp_path / "run", "-n", f"{workers}", "--max-restarts", "9", faults=faults))
    training = started[0]
    assert training.end() == serial.end()
    assert len(training.journal("lost")) == len(faults)
    assert training.steps == serial.steps
    assert training.said == serial.said


def test_killing_workers_between_the_steps_changes_no_bit(
    serial: Training, started: list[Training], tmp_path: Path
) -> None:
    ends = [4, 9, 14]  # the last steps of epochs
    faults = [
        {"place": place, "step": step, "rank": rank}
        for place, step, rank in zip(("evaluate", "sum", "predict"), ends, (1, 0, 1), strict=True)
    ]
    started.append(Training(tmp_path / "run", "-n", "4", "--max-restarts", "9", faults=faults))
    training = started[0]
    assert training.end() == serial.end()
    assert len(training.journal("lost")) == len(faults)
    assert training.said == serial.said


def test_growing_and_shrinking_changes_no_bit(started: list[Training], tmp_path: Path) -> None:
    started.append(Training(tmp_path / "serial", "-n", "1", PACE_S="0", EPOCHS="12"))
    serial = started[0].end()
    started.append(Training(tmp_path / "run", "-n", "1:3", EPOCHS="12", PACE_S="0.02"))
    training = started[1]
    training.until("minted", generation=1)
    training.ask("resize", "3")
    training.until("minted", workers=["w1", "w2", "w3"])
    training.ask("resize", "1")
    training.until("minted", workers=["w1"])
    training.ask("resize", "2")
    assert training.end() == serial
    assert training.steps == started[0].steps


def test_a_job_that_is_stopped_goes_on_later_and_ends_with_the_same_bits(
    serial: Training, started: list[Training], tmp_path: Path
) -> None:
    started.append(Training(tmp_path / "run", "-n", "1:3", PACE_S="0.05"))
    started[0].until("minted", generation=1)
    started[0].ask("stop")
    assert started[0].process.wait(PATIENCE_S) == 75
    assert started[0].journal("preempted")
    started.append(Training(tmp_path / "run", "-n", "3", "--max-restarts", "1"))
    assert started[1].end() == serial.end()
    assert started[1].steps == serial.steps


def test_over_a_process_group_that_forms_at_the_coordinator_a_loss_changes_no_bit(
    serial: Training, started: list[Training], tmp_path: Path
) -> None:
    faults = [{"place": "first", "step": 3, "rank": 1}]
    options = ("-n", "3", "--max-restarts", "2")
    started.append(Training(tmp_path / "run", *options, faults=faults, UNISONO_TRANSPORT="process_group"))
    assert started[0].end() == serial.end()
    assert len(started[0].journal("lost")) == 1
