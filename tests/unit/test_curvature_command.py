"""What `unisono curvature` refuses before it starts anything, and how it tells what it has found."""

from pathlib import Path
from typing import Any

import pytest

from unisono.errors import JobError
from unisono.launch.settings import Script
from unisono_lab.commands.curvature import CurvatureOptions, text_of

pytestmark = pytest.mark.unit


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (5, 10):
        (tmp_path / "checkpoints" / f"step-{step:08}").mkdir(parents=True)
    (tmp_path / "job.json").write_text('{"shards": 4}')
    (tmp_path / "train.py").touch()
    return tmp_path


def test_the_newest_checkpoint_is_measured_unless_another_is_named(run: Path) -> None:
    assert CurvatureOptions().checkpoint(run).name == "step-00000010"
    assert CurvatureOptions(step=5).checkpoint(run).name == "step-00000005"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"step": 7}, "no checkpoint of step 7: it has 5, 10"),
        ({"samples": 1}, "--samples 1: needs a number of at least 2"),
        ({"iterations": 0}, "--iterations 0: needs a number of at least 1"),
        ({"batches": 0}, "--batches 0: needs a number of at least 1"),
        ({"batches": 2}, "names no batch size"),
        ({"workers": 5}, "4"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], words: str, run: Path) -> None:
    asked = CurvatureOptions(**options)
    with pytest.raises(JobError, match=words):
        asked.checkpoint(run)
        asked.settings(run, Script(str(run / "train.py")), Path())


def test_a_folder_without_checkpoints_and_a_script_that_is_not_there_are_refused(run: Path) -> None:
    with pytest.raises(JobError, match="nowhere has no checkpoint"):
        CurvatureOptions().checkpoint(Path("nowhere"))
    with pytest.raises(JobError, match=r"there is no script missing\.py"):
        CurvatureOptions().settings(run, Script("missing.py"), Path())


def test_the_job_is_one_of_more_and_larger_batches(run: Path) -> None:
    (run / "job.json").write_text('{"batch_size": 32, "shards": 4}')
    found = CurvatureOptions(batches=3).settings(run, Script(str(run / "train.py")), Path("place"))
    assert found.options.shards == 12
    assert found.extra_environment == {"UNISONO_CURVATURE": "place", "UNISONO_BATCH_SIZE": "96"}


NOTHING: dict[str, Any] = {"critical_step": None, "critical_sharpness": None}
"""As with a learning rate of zero."""


def test_an_update_that_never_hurts_has_no_critical_step() -> None:
    figures = {"largest": 2.0, "residual": 0.01, "trace": 3.25, "trace_error": 0.5}
    told = text_of({"step": 5, "samples": 20, "loss": 0.5, "passes": 20, **NOTHING, **figures})
    assert "critical sharpness  none (no multiple of the next update makes the loss larger)" in told
    assert "trace               3.25 ± 0.5 (standard error)" in told
