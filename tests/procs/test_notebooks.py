"""Cells of real notebooks train: the examples are executed, and a kernel is interrupted, and killed."""

import json
from pathlib import Path

import pytest

from commands import python

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240)]

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "notebooks").glob("*.ipynb"))
CELLS = Path(__file__).parent / "scripts" / "notebook_cells.py"
PATIENCE_S = 200.0


def told_by(*words: object) -> str:
    """What a client of a kernel prints."""
    ended = python(CELLS, *words, timeout=PATIENCE_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.slow) for path in EXAMPLES],
    ids=lambda path: path.stem,
)
def test_an_example_runs_from_its_first_cell_to_its_last(path: Path, tmp_path: Path) -> None:
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells), "it is committed without outputs"

    told = told_by("execute", path, tmp_path)

    assert "The weights are identical to the last bit" in told
    assert "identical to the last bit: False" not in told
    assert "samples/s" in told
    assert len(list((tmp_path / "runs").iterdir())) == 2
    if path.stem == "elastic_and_adaptive":
        assert "step 10: resize(1)" in told
        assert "generation 2: 1 workers" in told
        assert "set_batch_size(128)" in told


@pytest.mark.slow
def test_an_interrupted_cell_leaves_a_checkpoint_and_a_killed_kernel_leaves_nobody(tmp_path: Path) -> None:
    seen = json.loads(told_by("interrupt", tmp_path))

    assert seen["while it trains"] >= 3, "the launcher, the coordinator, a worker"
    assert seen["interrupted"] == "KeyboardInterrupt"
    assert seen["checkpoints"]
    assert (seen["after the interrupt"], seen["after the kill"]) == ([], [])
    assert seen["lacking"]["ename"] == "JobError"
    assert "limit (make it an argument" in seen["lacking"]["evalue"]
    assert seen["failing"]["ename"] == "LaunchError"
    assert "RuntimeError: no luck" in seen["failing"]["evalue"]
