"""What a run that resumes takes from its script, and what from its checkpoint: docs/guide/checkpoints.md says so."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import unisono

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_worker")]

Start = Callable[..., unisono.Run]

UNDER_WAY = 4
"""Steps of a job's newest checkpoint; an epoch has three."""


def trained(run: unisono.Run, *, epochs: int = 2, lr: float = 0.1, stop_at: int | None = None) -> tuple[int, str]:
    """Train a small model.

    Args:
        run: the run.
        epochs: passes over its 70 samples.
        lr: the learning rate with which the script makes its optimizer.
        stop_at: the number of steps with whose checkpoint the run is left; None to go on to the end.

    Returns:
        how many steps were made, and the digest of the weights.
    """
    generator = torch.Generator().manual_seed(0)
    samples = TensorDataset(torch.randn(70, 6, generator=generator), torch.randint(0, 3, (70,), generator=generator))
    model = nn.Linear(6, 3)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9))
    made = 0
    for step in run.steps(samples, epochs=epochs):
        if step.number == stop_at:
            run.close()
            return made, unisono.digest(model)
        step.run(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
        made += 1
    return made, run.finish()


@pytest.fixture
def begin(start: Start, tmp_path: Path) -> Start:
    """Begin, or go on with, a run in a folder of a name."""

    def begun(name: str = "resumed", **settings: Any) -> unisono.Run:
        return start(run_dir=tmp_path / name, checkpoint_every=1, **settings)

    return begun


def test_another_learning_rate_has_no_effect_on_a_run_that_resumes(begin: Start) -> None:
    _, undisturbed = trained(begin("undisturbed"))
    trained(begin(), stop_at=UNDER_WAY)
    assert trained(begin(), lr=0.7)[1] == undisturbed


def test_a_run_that_resumes_in_its_loop_goes_on_to_the_new_number_of_epochs(begin: Start) -> None:
    _, undisturbed = trained(begin("undisturbed"), epochs=3)
    trained(begin(), epochs=2, stop_at=UNDER_WAY)
    assert trained(begin(), epochs=3) == (9 - UNDER_WAY, undisturbed)


def test_a_run_that_resumes_behind_its_last_epoch_ends_its_loop_at_once(begin: Start) -> None:
    _, weights = trained(begin(), stop_at=UNDER_WAY)
    assert trained(begin(), epochs=1) == (0, weights)


@pytest.mark.parametrize("epochs", [2, 5])
def test_a_run_that_has_finished_trains_nothing_more_whatever_its_epochs_are(begin: Start, epochs: int) -> None:
    _, weights = trained(begin())
    assert trained(begin(), epochs=epochs) == (0, weights)


def test_a_run_that_was_cut_short_from_outside_goes_on_with_its_loop(
    begin: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, undisturbed = trained(begin("undisturbed"), epochs=3)
    with monkeypatch.context() as outside:
        outside.setenv("UNISONO_STOP_AFTER_EPOCHS", "2")
        assert trained(begin(), epochs=3)[0] == 6
    assert trained(begin(), epochs=3) == (3, undisturbed)
