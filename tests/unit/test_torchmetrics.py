"""Metrics of torchmetrics that loss functions update: exact over all samples, on any number of workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import unisono
from benchmarks.thread_crew import Trade, train
from unisono.errors import ModelError
from unisono.job import Job

IMAGES = torch.arange(44.0 * 5).sin().view(44, 5)
LABELS = (IMAGES[:, 0] > 0).long() + (IMAGES[:, 1] > 0).long()


def collection() -> Any:
    return torchmetrics.MetricCollection(
        {
            "right": torchmetrics.Accuracy(task="multiclass", num_classes=3),
            "area": torchmetrics.AUROC(task="multiclass", num_classes=3),
            "loss": torchmetrics.MeanMetric(),
            "least": torchmetrics.MinMetric(),
            "most": torchmetrics.MaxMetric(),
        },
        compute_groups=False,
    )


def update(metrics: Any, outputs: Tensor, labels: Tensor) -> None:
    scores = outputs.detach().softmax(1)
    for name, metric in metrics.items():
        metric.update(*((scores, labels) if name in ("right", "area") else (scores[:, 0],)))


def trained(run: unisono.Run) -> list[dict[str, float]]:
    model, metrics, epochs = nn.Linear(5, 3), collection(), []
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
    state = unisono.torchmetrics.state_of(metrics)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5), state=state)

    def loss_fn(model: Any, batch: Any) -> Tensor:
        outputs = model(batch[0])
        update(metrics, outputs, batch[1])
        return F.cross_entropy(outputs, batch[1])

    for step in run.steps(TensorDataset(IMAGES, LABELS), epochs=2, shuffle=False):
        step.run(loss_fn)
        if step.is_last_in_epoch:
            epochs.append({name: float(value) for name, value in metrics.compute().items()})
            metrics.reset()
    run.finish()
    return epochs


@pytest.mark.cluster
@pytest.mark.usefixtures("torch_settings_restored")
def test_metrics_are_those_of_all_samples_on_any_number_of_workers(tmp_path: Path) -> None:
    job = Job.create(batch_size=10, shards=5)
    (serial,) = train(Trade(job, 1, tmp_path / "serial"), trained)
    assert len({*serial[0].values(), *serial[1].values()}) == 10
    for workers in (2, 3, 5):
        assert train(Trade(job, workers, tmp_path / str(workers)), trained) == [serial] * workers


@pytest.mark.cluster
@pytest.mark.usefixtures("torch_settings_restored")
def test_a_run_that_resumes_in_an_epoch_goes_on_with_them(tmp_path: Path) -> None:
    job = Job.create(batch_size=10, shards=5)
    (serial,) = train(Trade(job, 1, tmp_path / "serial"), trained)
    train(Trade(job, 3, tmp_path / "run", checkpoint_every=3, stop_after=7), trained)
    assert train(Trade(job, 2, tmp_path / "run", checkpoint_every=3), trained) == [serial[1:]] * 2


@pytest.mark.unit
@pytest.mark.usefixtures("one_worker")
def test_they_come_to_what_torchmetrics_finds_by_itself(start: Callable[..., unisono.Run]) -> None:
    run, plain, ours = start(batch_size=11, shards=4), collection(), collection()
    model = nn.Linear(5, 3)
    update(plain, model(IMAGES), LABELS)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), state=unisono.torchmetrics.state_of(ours))

    def loss_fn(model: Any, batch: Any) -> Tensor:
        update(ours, model(batch[0]), batch[1])
        found: Tensor = model(batch[0]).sum()
        return found

    for step in run.steps(TensorDataset(IMAGES, LABELS)):
        step.run(loss_fn)
    expected = {name: pytest.approx(float(value)) for name, value in plain.compute().items()}
    assert {name: float(value) for name, value in ours.compute().items()} == expected


@pytest.mark.unit
@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        (torchmetrics.PearsonCorrCoef(), "metrics, a PearsonCorrCoef, combines its state mean_x in a way of its own"),
        (torchmetrics.MetricCollection([torchmetrics.MeanMetric()]), "make it with compute_groups=False"),
    ],
)
def test_what_cannot_be_combined_is_refused_in_clear_words(metrics: Any, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        unisono.torchmetrics.state_of(metrics)
