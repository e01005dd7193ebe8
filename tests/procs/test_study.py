"""A study of a real script: killed, resumed, interrupted, and with runs that fail."""

import csv
import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from forks.commands import start
from unisono.host.machine import usable_cores

pytestmark = [
    pytest.mark.procs,
    pytest.mark.slow,  # tests/unit has studies and their figures without processes
    pytest.mark.timeout(240),
]

SCRIPT = Path(__file__).parent / "scripts" / "scaled.py"
PATIENCE_S = 200.0

PLAIN = """
import json, os
threads = int(os.environ["OMP_NUM_THREADS"])
for epoch in range(3):
    print(json.dumps({"epoch": epoch, "seconds": 0.5 / threads, "samples": 128, "loss": 1.5}), flush=True)
"""


class Study:
    """``unisono study`` in a folder of its own."""

    def __init__(self, folder: Path, *words: object) -> None:
        self.folder = folder
        command = ("study", str(SCRIPT), "--out", "study", *map(str, words))
        self._output = folder / "output.txt"
        with self._output.open("ab") as output:
            self.process = start(*command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)

    def end(self) -> int:
        return self.process.wait(PATIENCE_S)

    @property
    def said(self) -> str:
        return self._output.read_text()

    @property
    def kept(self) -> dict[str, int]:
        """When each run that is over was kept, in nanoseconds."""
        found = (self.folder / "study" / "cells").glob("[!.]*/cell.json")
        return {one.parent.name: one.stat().st_mtime_ns for one in found}

    def until(self, is_so: Callable[[], bool], words: str) -> None:
        begun = time.monotonic()
        while not is_so():
            assert self.process.poll() is None, f"it ended before {words}:\n{self.said}"
            assert time.monotonic() - begun < PATIENCE_S, f"{words} did not come:\n{self.said}"
            time.sleep(0.01)

    def is_training(self) -> bool:
        """Whether a run has taken steps that is not yet over."""
        return any((self.folder / "study").glob("cells/.*/run/metrics.jsonl"))

    def rows(self) -> list[dict[str, str]]:
        with (self.folder / "study" / "results.csv").open() as file:
            return list(csv.DictReader(file))

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


PLAIN_LOOPS = min(usable_cores(), 2)
"""With one thread, and with two where there are cores for them."""

RUNS = 3 + PLAIN_LOOPS
WORDS = ("--workers", "1,2", "--mode", "both", "--repeats", 1, "--steps", 20, "--baseline", "plain.py", "--warmup", 3)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory, warm: None) -> dict[str, Any]:
    """A study whose command was killed in the middle of a run, and started again."""
    folder = tmp_path_factory.mktemp("resumed")
    (folder / "plain.py").write_text(PLAIN)
    study = Study(folder, *WORDS)
    try:
        study.until(lambda: len(study.kept) >= 2 and study.is_training(), "a run after the second")
        family = psutil.Process(study.process.pid).children(recursive=True)
        study.process.kill()
        _, alive = psutil.wait_procs(family, timeout=30)
        before = study.kept
    finally:
        study.close()
    again = Study(folder, *WORDS)
    try:
        code = again.end()
    finally:
        again.close()
    return {"study": again, "before": before, "alive": alive, "code": code}


def test_a_study_that_is_killed_leaves_no_process_behind(resumed: dict[str, Any]) -> None:
    assert resumed["alive"] == []


def test_started_again_it_measures_only_what_is_missing(resumed: dict[str, Any]) -> None:
    study, before = resumed["study"], resumed["before"]
    assert resumed["code"] == 0, study.said
    assert len(study.kept) == RUNS
    assert 2 <= len(before) < RUNS
    assert before.items() <= study.kept.items()
    assert f"{RUNS} runs, {len(before)} of them measured before" in study.said
    assert not list((study.folder / "study" / "cells").glob(".*"))


def test_all_runs_of_strong_scaling_end_with_the_same_weights_and_weak_scaling_has_its_own(
    resumed: dict[str, Any],
) -> None:
    rows = resumed["study"].rows()
    digests = {mode: {row["digest"] for row in rows if row["mode"] == mode} for mode in ("strong", "weak")}
    assert len(digests["strong"]) == 1
    assert len(digests["weak"]) == 2
    assert {row["batch_size"] for row in rows if row["mode"] == "strong"} == {"32"}
    weak = [row for row in rows if row["mode"] == "weak"]
    scaled = {(row["workers"], row["batch_size"], round(float(row["learning_rate"]), 6)) for row in weak}
    assert scaled == {("1", "32", 0.1), ("2", "64", 0.2)}


def test_every_run_has_its_figures(resumed: dict[str, Any]) -> None:
    rows = resumed["study"].rows()
    assert len(rows) == RUNS + 1  # one worker's stands in both tables
    for row in rows:
        assert row["exit_code"] == "0"
        if row["mode"] == "baseline":
            seconds = 0.5 / int(row["workers"])  # it has the threads of as many
            assert (row["samples"], row["seconds"], row["epoch_s"]) == ("256", f"{2 * seconds}", f"{seconds}")
            continue
        parts = [float(row[name]) for name in ("data_s", "compute_s", "exposed_s", "update_s", "wait_s")]
        assert 0 < sum(parts) < 2 * float(row["step_s"])
        assert float(row["peak_memory_mib"]) > 10
        assert (row["workers"] == "1") == (float(row["wait_s"]) == 0)
    assert not (resumed["study"].folder / "own").exists()
    assert not list((resumed["study"].folder / "study").rglob("checkpoints"))
    found = json.loads((resumed["study"].folder / "study" / "results.json").read_text())
    assert found["settings"]["epoch_samples"] == 128
    assert found["settings"]["gradient_bytes"] == 4 * (16 * 32 + 32 + 32 * 4 + 4)
    assert found["environment"]["bandwidth_bytes_per_s"] > 0


def test_other_options_in_the_same_folder_are_refused(resumed: dict[str, Any]) -> None:
    study = Study(resumed["study"].folder, *WORDS[:6], "--steps", 21)
    try:
        assert study.end() == 2
    finally:
        study.close()
    assert "steps: 21 here, 20 there" in study.said


def test_a_run_that_fails_is_named_with_its_log_and_the_others_are_measured(tmp_path: Path, warm: None) -> None:
    study = Study(tmp_path, "--workers", "2,3", "--repeats", 1, "--epochs", 3, "--", "--fails-with", 3)
    try:
        assert study.end() == 1
    finally:
        study.close()
    assert list(study.kept) == ["strong-2-0"]
    assert "RuntimeError: there are 3 of us" in study.said
    log = tmp_path / "study" / "cells" / "strong-3-0.failed" / "run" / "logs"
    assert f"(log: {log}/rank-" in study.said
    (row,) = (row for row in study.rows() if row["exit_code"] == "0")
    assert row["samples"] == "224"  # three epochs of 4 steps, without the first 5 steps


def test_an_interrupted_study_ends_at_once_with_its_processes(tmp_path: Path, warm: None) -> None:
    study = Study(tmp_path, "--workers", "2,3", "--repeats", 1)
    try:
        study.until(study.is_training, "a run")
        study.process.send_signal(signal.SIGINT)
        assert study.end() == 130
    finally:
        study.close()
    assert "ended by SIGINT: start it again to make the missing measurements" in study.said
    assert not list((tmp_path / "study" / "cells").glob(".*"))
