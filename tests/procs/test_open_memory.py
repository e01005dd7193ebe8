"""Memory that workers share is given back with their generation, whenever Python looks for cycles."""

import os
from contextlib import suppress
from pathlib import Path

import pytest

from slurm_jobs import LONG, SCRIPT
from training import Trained, Training, control_of, whole_lines

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240), pytest.mark.slow]


def shared(process: int) -> int:
    """The number of descriptors of shared memory that a process holds."""
    found = []
    for path in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):  # it has just been closed
            found.append(os.readlink(path))  # noqa: PTH115 (as text)
    return sum("memfd:unisono" in one for one in found)


def test_a_worker_holds_no_shared_memory_of_earlier_generations(
    started: list[Training], tmp_path: Path, long_serial: Trained
) -> None:
    training = Training(tmp_path / "run", "-n", "2:3", script=SCRIPT, PACE_S="0.3", UNCOLLECTED="1", **LONG)
    started.append(training)

    def until_trained_by(workers: int) -> None:
        """Two steps, so that the first one is over."""
        lines = [line for line in whole_lines(training.run_dir / "metrics.jsonl") if "loss" in line]
        begun = len(lines)

        def is_so() -> bool:
            sizes = [one["world_size"] for one in whole_lines(training.run_dir / "metrics.jsonl") if "loss" in one]
            return sizes[begun:][-2:] == [workers] * 2

        training.until_so(is_so, f"{workers} workers")

    held = {2: set[int](), 3: set[int]()}
    until_trained_by(2)
    (first, _) = training.journal("minted")[0]["workers"]
    for size in (2, 3) * 5:
        control_of(training.run_dir).resize(size)
        until_trained_by(size)
        held[size].add(shared(training.pid_of(first)))
    assert [len(each) for each in held.values()] == [1, 1], held
    assert min(map(min, held.values())) > 0
    training.hurry()
    assert training.end() == long_serial.end()
    assert training.steps == long_serial.steps
