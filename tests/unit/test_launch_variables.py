"""What a launcher tells a worker of its rank is out of sight for other frameworks while a run is open."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import unisono
from unisono.membership.environment import LaunchVariables, recognise

Start = Callable[..., unisono.Run]

pytestmark = pytest.mark.unit

TORCHRUN = {"TORCHELASTIC_RUN_ID": "a", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
SRUN = {
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_NTASKS": "1",
    "SLURM_JOB_ID": "7",
}


def test_they_are_put_back_when_the_last_run_ends_unless_somebody_has_set_others() -> None:
    environ = {**TORCHRUN, "HOME": "/home"}
    variables = LaunchVariables(environ)
    first = variables.hide()
    assert environ == {"HOME": "/home"}
    assert variables.all() == {**TORCHRUN, "HOME": "/home"}
    second = variables.hide()
    first()
    assert environ == {"HOME": "/home"}
    environ["RANK"] = "5"
    second()
    assert environ == {**TORCHRUN, "HOME": "/home", "RANK": "5"}


@pytest.mark.usefixtures("one_worker")
@pytest.mark.parametrize(("told", "launcher"), [(TORCHRUN, "torchrun"), (SRUN, "slurm")])
def test_a_run_hides_them_and_the_next_one_still_knows_its_launcher(
    told: dict[str, str],
    launcher: str,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    run = start()
    left = {name for name in told if name in os.environ}
    assert left == {"SLURM_JOB_ID"} & told.keys()
    assert not torch.distributed.is_torchelastic_launched()
    assert recognise(os.environ).launcher == "single"
    other = start()
    assert capsys.readouterr().err.count(f"launched by {launcher}") == 2
    other.close()
    assert "RANK" not in os.environ
    run.close()
    assert {name: os.environ[name] for name in told} == told


@pytest.mark.usefixtures("one_worker")
def test_a_run_that_cannot_begin_leaves_them_where_they_are(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("UNISONO_PLUGINS", "there.is:none")
    with pytest.raises(unisono.errors.JobError):
        start()
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "1")
