"""The coordinator is gone for seconds, however often it is started again: training goes on."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from training import Trained, Training

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240), pytest.mark.slow]

AWAY_S = 5.0


def keep_away(training: Training, seconds: float) -> int:
    """Kill each coordinator as soon as it is there, for so long; returns how many."""
    killed: set[int] = set()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with suppress(FileNotFoundError, ValueError, ProcessLookupError):
            if (pid := training.coordinator) not in killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        assert training.process.poll() is None, training.output.read_text()
        time.sleep(0.01)
    return len(killed)


def test_no_step_is_lost_while_the_coordinator_is_away(
    serial: Trained, started: list[Training], tmp_path: Path
) -> None:
    started.append(Training(tmp_path / "run", "-n", "3", "--max-restarts", "2", PACE_S="0.04"))
    training = started[0]
    training.until_step(2)
    before = len(training.steps)
    assert keep_away(training, AWAY_S) > 1
    assert len(training.steps) > before
    training.hurry()
    assert training.end() == serial.end()
    assert training.steps == serial.steps
    assert training.said == serial.said
    assert training.journal("coordinator restarted")
    assert not training.journal("lost")


def test_a_worker_that_is_lost_meanwhile_is_waited_for_until_the_coordinator_is_back(
    serial: Trained, started: list[Training], tmp_path: Path
) -> None:
    started.append(Training(tmp_path / "run", "-n", "3", "--max-restarts", "2", PACE_S="0.04"))
    training = started[0]
    training.until_step(2)
    victim = training.pid_of("w2")
    os.kill(training.process.pid, signal.SIGSTOP)  # the launcher: no coordinator is started again
    try:
        os.kill(training.coordinator, signal.SIGKILL)
        os.kill(victim, signal.SIGKILL)
        reached = max(training.steps)
        time.sleep(AWAY_S)  # nothing happens meanwhile, and that is what is looked at
        assert max(training.steps) <= reached + 1  # they wait: who goes on, and from where, is decided by one alone
    finally:
        os.kill(training.process.pid, signal.SIGCONT)
    begun = time.monotonic()
    training.until("lost", worker="w2")
    training.until_step(reached + 3)
    assert time.monotonic() - begun < 30
    training.hurry()
    assert training.end() == serial.end()
    assert training.steps == serial.steps


def test_whoever_hears_nothing_of_the_coordinator_for_half_the_timeout_writes_only_when_it_is_back(
    serial: Trained, started: list[Training], tmp_path: Path
) -> None:
    options = ("-n", "2", "--max-restarts", "1", "--failure-timeout-s", "12", "--checkpoint-every", "1")
    started.append(Training(tmp_path / "run", *options, PACE_S="0.1"))
    training = started[0]
    training.until_step(1)
    coordinator = training.coordinator
    os.kill(coordinator, signal.SIGSTOP)  # its connections stay open, as those of a host do that is cut off
    try:
        words = "so the job may go on without this worker: no checkpoint, no result and no metrics are written"
        training.until_so(lambda: words in training.output.read_text(), "silence")
        written = training.steps
        training.until_so(lambda: "no checkpoint of step" in training.output.read_text(), "a step without a checkpoint")
        assert training.steps == written
    finally:
        os.kill(coordinator, signal.SIGCONT)
    training.until_step(max(written) + 1)
    training.hurry()
    assert training.end() == serial.end()
    assert training.steps == serial.steps
    assert not training.journal("lost")
    kept = {line["step"] for line in training.journal("checkpoint")}
    assert set(range(1, max(written) + 1)) <= kept < set(range(1, len(serial.steps) + 1))
