"""What a loss function may return, and what the functions of an evaluation may."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import unisono
from unisono.errors import DataError, LossError

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_worker")]

Start = Callable[..., unisono.Run]

DATA = TensorDataset(torch.linspace(-2, 2, 44).sin().view(11, 4), torch.arange(11) % 2)


def started(start: Start) -> unisono.Run:
    run = start(batch_size=8, shards=2)
    model = nn.Linear(4, 2)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return run


def train(run: unisono.Run, loss_fn: Any) -> None:
    for step in run.steps(DATA, epochs=1):
        step.run(loss_fn)


PAIRS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "accuracy": lambda loss, logits, labels: (loss, (logits.argmax(1) == labels).float().mean()),
    "logits": lambda loss, logits, labels: (loss, logits),
    "list": lambda loss, logits, labels: [loss, len(logits)],
    "three": lambda loss, logits, labels: (loss, logits, labels),
    "dict": lambda loss, logits, labels: {"loss": loss},
}


@pytest.mark.parametrize("kind", PAIRS)
def test_more_than_a_loss_is_refused_with_what_to_write_for_a_weight_and_for_a_metric(start: Start, kind: str) -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        logits = model(batch[0])
        return PAIRS[kind](F.cross_entropy(logits, batch[1]), logits, batch[1])

    run = started(start)
    said = r"step 0, shard 0, rank 0: .*returned a (tuple|list|dict): .*unisono\.Weighted\(loss, tokens\).*run\.log\("
    with pytest.raises(LossError, match=said):
        train(run, loss_fn)


ODD = ["5", b"5", 10**400, torch.ones(1, device="meta")]


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), 1e308, 1e-320, torch.ones(2), None, "many", *ODD])
def test_a_weight_that_counts_nothing_is_refused(start: Start, weight: Any) -> None:
    run = started(start)
    with pytest.raises(LossError, match="returned the weight .*>= 0"):
        train(run, lambda model, batch: unisono.Weighted(F.cross_entropy(model(batch[0]), batch[1]), weight))


@pytest.mark.parametrize("made", [lambda loss: loss * 1j, lambda loss: loss.reshape(1).to_sparse()])
def test_a_loss_that_is_no_real_number_is_refused(start: Start, made: Callable[[Any], Any]) -> None:
    run = started(start)
    with pytest.raises(LossError, match="step 0, shard 0, rank 0: .*no real number: (complex64|float32, sparse_coo)"):
        train(run, lambda model, batch: made(F.cross_entropy(model(batch[0]), batch[1])))


def test_a_metric_is_a_mean_or_weighted(start: Start) -> None:
    run = started(start)
    means = run.evaluate(
        DATA,
        lambda model, batch: {
            "samples": batch[1].float().mean(),
            "ones": unisono.Weighted(batch[1].sum() / batch[1].sum(), batch[1].sum()),
            "first": unisono.Weighted(batch[0][0, 0], float(batch[0][0, 0] == DATA.tensors[0][0, 0])),
        },
    )
    assert means == pytest.approx({"samples": 5 / 11, "ones": 1, "first": float(DATA.tensors[0][0, 0])})


@pytest.mark.parametrize("value", [(torch.tensor(1.0), 3), [1.0], torch.ones(2), {"mean": 1.0}, None, *ODD])
def test_any_other_metric_is_refused_with_what_to_write(start: Start, value: Any) -> None:
    run = started(start)
    with pytest.raises(
        DataError, match=r"as 'top5': return its mean, one number; .*return unisono\.Weighted\(mean, tokens\)"
    ):
        run.evaluate(DATA, {"top5": lambda model, batch: value})
