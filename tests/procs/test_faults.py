"""Fault plans, injected by real workers: each fault happens once, and the weights stay those of the serial run."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from commands import completed
from forks.client import SHARED_FORK_SERVERS
from serial_runs import SerialRuns
from unisono_lab.faults.faults import RECOVERY, Faults

pytestmark = [
    pytest.mark.procs,
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("warm"),
]

SCRIPT = Path(__file__).parent / "scripts" / "elastic_training.py"
SETTINGS = {"PACE_S": "0", "EPOCHS": "4"}  # five steps each, and ten more
LONG = SETTINGS | {"EPOCHS": "12"}
PATIENCE_S = 150.0


class Training:
    """A job that has been struck to its end."""

    def __init__(self, folder: Path, *options: str, faults: Faults = Faults(), **settings: str) -> None:  # noqa: B008
        folder.mkdir(parents=True)
        script = folder / "faults.toml"
        script.write_text(faults.to_toml())
        self.run_dir = folder / "run"
        self._settings = SETTINGS | settings
        self._words = ("run", *options, "--run-dir", self.run_dir, "--faults", script, SCRIPT)
        self.go_on()

    def go_on(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("UNISONO_")}
        environment |= self._settings
        self.ended = completed(*self._words, env=environment, timeout=PATIENCE_S)

    def journal(self, *events: str) -> list[dict[str, Any]]:
        lines = map(json.loads, (self.run_dir / "journal.jsonl").read_text().splitlines())
        return [line for line in lines if line["event"] in events]

    @property
    def digest(self) -> str:
        assert self.ended.returncode == 0, self.ended.stdout + self.ended.stderr
        return str(json.loads((self.run_dir / "result.json").read_text())["weights_sha256"])


@pytest.fixture(scope="session")
def serial(serial_runs: SerialRuns) -> str:
    return serial_runs(SCRIPT, **SETTINGS).end()


@pytest.fixture(scope="session")
def long(serial_runs: SerialRuns) -> str:
    return serial_runs(SCRIPT, **LONG).end()


@pytest.mark.slow
def test_every_fault_that_a_job_survives_strikes_once_and_changes_no_bit(long: str, tmp_path: Path) -> None:
    faults = (
        Faults()
        .kill(rank=1, at_step=2, after_s=0.005)
        .stop(rank=0, at_step=6, for_s=0.3)
        .resize(workers=2, at_step=10)
        .slow(rank=1, factor=3, at_step=14, steps=2)
        .partition(rank=1, at_step=18, for_s=0.5)
        .kill_coordinator(at_step=22, for_s=0.2)
        .stop(rank=1, at_step=26)
        .leave(rank=1, at_step=44)  # which there is once the stopped one is replaced: the last one does not leave alone
        .join(at_step=48)
        .kill(rank=0, at_step=62)
    )
    options = ("-n", "1:3", "--max-restarts", "9", "--failure-timeout-s", "4")
    training = Training(tmp_path / "job", *options, faults=faults, **LONG)
    assert training.digest == long
    struck = training.journal("fault")
    assert sorted(line["number"] for line in struck) == list(range(1, 11))
    assert all(line["step"] >= faults.faults[line["number"] - 1].at_step for line in struck)
    assert training.journal("fault failed") == []
    assert len(training.journal("lost")) == 3  # two killed, one that stood still
    assert training.journal("coordinator restarted")
    assert training.journal("resized")


@pytest.mark.slow  # tests/unit/test_struck.py has one die at every point of every recovery
def test_a_second_worker_may_die_at_each_point_of_the_recovery_from_the_first(long: str, tmp_path: Path) -> None:
    faults = Faults()
    for number, point in enumerate(RECOVERY):
        at_step = 3 + 7 * number
        faults = faults.kill(rank=1, at_step=at_step, after_s=0.003).kill(rank=0, at_step=at_step).in_recovery(point)
    training = Training(tmp_path / "job", "-n", "1:3", "--max-restarts", "20", faults=faults, **LONG)
    assert training.digest == long
    inside = [line["point"] for line in training.journal("fault") if "point" in line]
    assert len(inside) >= len(RECOVERY) // 2  # a worker that is left alone has no recovery
    assert set(inside) <= set(RECOVERY)


@pytest.mark.slow
def test_the_death_of_the_agent_ends_the_job_and_the_next_start_goes_on(serial: str, tmp_path: Path) -> None:
    faults = Faults().kill_agent(rank=0, at_step=8, after_s=0.01)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(SHARED_FORK_SERVERS, raising=False)  # a worker kills the agent that is above it
        training = Training(tmp_path / "job", "-n", "1:2", "--checkpoint-every", "4", faults=faults)
    assert training.ended.returncode == -9, training.ended.stdout + training.ended.stderr
    training.go_on()
    assert training.digest == serial
    assert len(training.journal("fault")) == 1
    assert training.journal("resumed")


# One alone: tests/unit/test_integrity.py. Three and five: tests/unit/test_scripts_of_clusters.py.
@pytest.mark.slow
@pytest.mark.parametrize("workers", ["2", "3"])
def test_a_flipped_bit_of_one_workers_copy_does_not_pass_for_right(workers: str, serial: str, tmp_path: Path) -> None:
    # The update may round the first one away in its replica, after gradients were computed with it; never the second.
    faults = Faults().flip_bit(rank=1, at_step=8, bit=0).flip_bit(rank=0, at_step=16, bit=23)
    training = Training(tmp_path / "job", "-n", workers, faults=faults)
    assert training.digest == serial
    found = training.journal("healed", "rolled back")
    assert [line["step"] for line in found] == [8, 16]
    assert {line["event"] for line in found} == {"healed" if workers == "3" else "rolled back"}
    said = training.ended.stdout + training.ended.stderr
    assert ("rank 1 on host" if workers == "3" else "no majority says which are right") in said


@pytest.mark.slow  # tests/unit/test_flips.py has bits in each place
def test_a_flipped_bit_beside_the_weights_does_not_pass_for_right(serial: str, tmp_path: Path) -> None:
    faults = (
        Faults().flip_bit(rank=1, at_step=8, place="buffers").flip_bit(rank=0, at_step=16, place="optimizer", bit=23)
    )
    training = Training(tmp_path / "job", "-n", "2", faults=faults)
    assert training.digest == serial
    assert len(training.journal("rolled back")) == 2


@pytest.mark.slow
def test_a_worker_that_computes_wrongly_is_named_and_replaced_and_leaves_no_trace(serial: str, tmp_path: Path) -> None:
    faults = Faults().wrong_result(rank=1, at_step=8, bit=22)
    training = Training(tmp_path / "job", "-n", "3", "--max-restarts", "9", "--audit", "0.1", faults=faults)
    assert training.digest == serial
    named = training.journal("wrong result")
    assert {(line["rank"], line["transient"]) for line in named} == {(1, False)}
    assert training.journal("replaced")
    assert training.journal("rolled back")
    found = json.loads((training.run_dir / "result.json").read_text())
    assert [one["rank"] for one in found["wrong_results"]] == [1] * len(named)
    assert "computed wrongly" in training.ended.stdout + training.ended.stderr
