"""A learning rate that follows critical sharpness, beside rates that stay: digits, a small network, plain SGD."""

import statistics
import tempfile
import warnings
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import unisono
from benchmarks.report import Grid
from unisono.errors import UnisonoWarning

EPOCHS, BATCH, EVERY = 8, 128, 10
RATES = (0.03, 0.1, 0.3, 1.0)
FORMS = {**{f"stays at {rate}": (rate, False) for rate in RATES}, "EdgeOfStability from 0.03": (0.03, True)}
"""The first learning rate, and whether it follows the sharpness."""


@dataclass(frozen=True, slots=True)
class End:
    """How a training ended.

    Attributes:
        loss: the mean of the last epoch's losses.
        accuracy: the share of held-out images that are right.
        rate: the last learning rate.
    """

    loss: float
    accuracy: float
    rate: float


def ends_of(seeds: int) -> dict[str, list[End]]:
    """All forms with all seeds."""
    return {form: [trained(*FORMS[form], seed) for seed in range(seeds)] for form in FORMS}


def trained(rate: float, follows: bool, seed: int) -> End:
    """One training."""
    training, held_out = digits()
    policies = [unisono.EdgeOfStability(every=0)] if follows else []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", UnisonoWarning)
        with unisono.init(
            batch_size=BATCH, seed=seed, run_dir=folder, arithmetic={"threads": 1}, policies=policies
        ) as run:
            torch.manual_seed(seed)
            model = nn.Sequential(
                nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)
            )
            run.prepare(model, torch.optim.SGD(model.parameters(), lr=rate))
            losses, start = list[float](), 1.0
            for step in run.steps(training, epochs=EPOCHS):
                if follows and step.number % EVERY == 0:
                    found = run.curvature(loss_fn, start=start)
                    start = found.critical_step if 0 < found.critical_step < float("inf") else 1.0
                losses.append(step.run(loss_fn))
            accuracy = run.evaluate(held_out, right)["accuracy"]
            rate = next(iter(run.inside.policy_runner.rates.values())) if follows else rate
            run.finish()
    return End(statistics.fmean(losses[-len(losses) // EPOCHS :]), accuracy, rate)


def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """The mean over the samples."""
    return F.cross_entropy(model(batch[0]), batch[1])


def right(model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
    """Which images are."""
    return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).float().mean()}


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Images to train on, and 360 held-out ones."""
    found = load_digits()
    images, labels = torch.tensor(found.images, dtype=torch.float32) / 16, torch.tensor(found.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return tuple(TensorDataset(images[part], labels[part]) for part in (order[360:], order[:360]))  # type: ignore[return-value]


def table_of_ends(found: dict[str, list[End]]) -> Grid:
    """One row per form."""
    rows = [
        (
            form,
            _spread([one.loss for one in ends]),
            _spread([100 * one.accuracy for one in ends]),
            _spread([one.rate for one in ends]),
        )
        for form, ends in found.items()
    ]
    columns = ("the learning rate", "loss of the last epoch", "held-out accuracy, %", "last rate")
    return Grid(f"Plain SGD on digits, {EPOCHS} epochs of batches of {BATCH}: median (least … most)", columns, rows)


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} … {max(values):.3f})"
