"""Strategies at work: they train, whoever comes, goes and dies, and all-reduce between them is exact."""

import json
import math
import shutil
from pathlib import Path

import pytest

from outcomes import struck_by, train
from training import whole_lines
from unisono_lab.faults.faults import Faults

pytestmark = [pytest.mark.procs, pytest.mark.timeout(300), pytest.mark.usefixtures("warm")]

SWITCHING = Path(__file__).parent / "scripts" / "switching.py"
DIGITS = Path(__file__).parents[2] / "examples" / "digits.py"
AT_NIGHT = (
    "diloco:every=8",
    "model-averaging",
    "pair-averaging",
    "parameter-server:synchronous=false",
    "parameter-server:synchronous=false,servers=1,max_staleness=3",
)
LOOSE = [pytest.param(strategy, marks=pytest.mark.slow) for strategy in ("local-sgd:every=4", *AT_NIGHT)]


def kills(folder: Path, *kills: tuple[int, int]) -> tuple[str, str]:
    faults = Faults()
    for step, rank in kills:
        faults = faults.kill(rank=rank, at_step=step, after_s=0.002)
    return struck_by(folder, faults)


@pytest.mark.parametrize("strategy", LOOSE)
def test_a_strategy_learns_the_digits_while_workers_are_killed_and_replaced(strategy: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = ("-n", "2:3", "--max-restarts", "9", *kills(folder, (10, 1), (30, 0)), "--strategy", strategy)

    ended = train(folder, *options, script=DIGITS, arguments=["--epochs", "5"])

    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert float(ended.stdout.rpartition("accuracy ")[2].partition("%")[0]) > 90
    assert len([line for line in whole_lines(folder / "journal.jsonl") if line["event"] == "lost"]) == 2
    rounds = [line["round"] for line in whole_lines(folder / "metrics.jsonl") if "round" in line]
    assert len(rounds) >= 5
    assert all(sum(one["samples"]) > 0 for one in rounds)


@pytest.mark.slow
def test_strategies_change_twenty_times_with_kills_between_and_all_reduce_is_exact_from_where_it_starts(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    faults = kills(folder, (9, 0), (31, 1), (52, 0), (90, 1), (121, 0))

    ended = train(folder, "-n", "1:4", "--max-restarts", "20", *faults, script=SWITCHING)

    assert ended.returncode == 0, ended.stdout + ended.stderr
    journal = whole_lines(folder / "journal.jsonl")
    switched = {line["step"]: line["value"] for line in journal if line.get("verb") == "set_strategy"}
    assert len(switched) >= 20
    assert len([line for line in journal if line["event"] == "lost"]) >= 3
    assert all(math.isfinite(line["loss"]) for line in whole_lines(folder / "metrics.jsonl"))

    ours = weights_after_each_step(folder)
    for first in [step for step, strategy in switched.items() if strategy == "all-reduce"][1:8:3]:
        last = min(step for step in switched if step > first)
        assert {step: ours[step] for step in range(first, last)} == serial_weights(folder, tmp_path, first, last)


def weights_after_each_step(folder: Path) -> dict[int, set[str]]:
    """Of all workers, in the steps of all-reduce: they have to be the same."""
    found: dict[int, set[str]] = {}
    for file in folder.glob("digests-*.jsonl"):
        for step, _, weights in map(json.loads, file.read_text().splitlines()):
            found.setdefault(step, set()).add(weights)
    return found


def serial_weights(folder: Path, tmp_path: Path, first: int, last: int) -> dict[int, set[str]]:
    """What one worker makes of the checkpoint from which a stretch of all-reduce began."""
    alone = tmp_path / f"from-{first}"
    (checkpoint,) = (folder / "checkpoints").glob(f"*{first:08d}*")
    shutil.copytree(checkpoint, alone / "checkpoints" / checkpoint.name)
    ended = train(alone, "-n", "1", script=SWITCHING, settings={"UNISONO_STOP_AFTER": str(last)})
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "resumes after step" in ended.stdout
    return weights_after_each_step(alone)
