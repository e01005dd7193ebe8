"""The run that a guest begins has the settings that the person said, before those that follow from the guest."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from unisono.data.generators import seed_generators
from unisono.integrations.kit import run_for

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_worker")]


@pytest.mark.parametrize(("told", "said", "shards"), [("", {}, 4), ("2", {}, 2), ("2", {"shards": 3}, 3)])
def test_settings_go_before_the_environment_and_that_before_what_a_guest_has_by_default(
    told: str, said: dict[str, int], shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if told:
        monkeypatch.setenv("UNISONO_SHARDS", told)
    run = run_for("Guest", None, {"run_dir": tmp_path, **said}, {"shards": 4, "seed": 5})
    try:
        assert (run.job.shards, run.job.seed) == (shards, 5)
    finally:
        run.close()


def test_the_scripts_own_seed_holds_after_a_guest_has_begun_its_run(tmp_path: Path) -> None:
    def drawn() -> list[float]:
        return [float(torch.rand(())), float(np.random.rand()), random.random()]

    seed_generators(7)
    alone = drawn()
    seed_generators(7)
    run = run_for("Guest", None, {"run_dir": tmp_path, "shards": 2, "seed": 5})
    try:
        assert drawn() == alone
    finally:
        run.close()
