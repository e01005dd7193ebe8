"""Training in float16: every number of workers skips the same steps, and scales its losses alike."""

import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import unisono
import unisono_lab
from script_cluster import Cluster, Done, Kill
from unisono.errors import JobError, LossError, ModelError, NonFiniteLoss, Unreadable
from unisono.train.state.registry import kept_value
from unisono.train.state.trained import FIRST, GROWTH_STEPS, LEAST, LossScale

SCRIPT = Path(__file__).parents[1] / "procs" / "scripts" / "float16.py"
STEPS = 24


def train(folder: Path, workers: int, way: str, /, **settings: object) -> Done:
    shards = 1 if way == "whole" else 6
    return Cluster(folder)(SCRIPT, workers, shards=shards, arguments=[way], **settings)  # type: ignore[arg-type]


def scales(done: Done) -> list[tuple[bool, float]]:
    """Of each step: whether it was made, and the loss scale after it."""
    found = re.findall(r"step \d+ is_updated=(\w+) scale (\S+)", done.printed)
    return [(updated == "True", float(scale)) for updated, scale in found]


@pytest.mark.cluster
@pytest.mark.parametrize(
    "way", ["plain", *(pytest.param(way, marks=pytest.mark.slow) for way in ("clipped", "own", "compressed"))]
)
def test_any_number_of_workers_skips_the_same_steps_and_ends_in_the_same_bits(way: str, tmp_path: Path) -> None:
    serial, *others = (train(tmp_path / str(workers), workers, way) for workers in (1, 2, 3, 5))
    seen = scales(serial)
    assert len(seen) == STEPS
    skipped = [not updated for updated, _ in seen]
    assert 1 < sum(skipped) < STEPS / 2
    for (_, before), (updated, after) in zip([(True, FIRST), *seen], seen, strict=False):
        assert after == (before if updated else before / 2)
    for other in others:
        assert other.digest == serial.digest
        assert scales(other) == seen
        assert other.metrics == serial.metrics
    assert [line["step"] for line in serial.journal("skipped")] == [
        n for n, is_skipped in enumerate(skipped) if is_skipped
    ]


@pytest.mark.unit
def test_a_gradient_that_a_scaler_of_the_script_would_skip_names_what_skips_it_alike_on_all(
    start: Callable[..., unisono.Run],
) -> None:
    run, model, scaler = start(), torch.nn.Linear(4, 1), torch.amp.GradScaler("cpu", init_scale=2.0**127)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.prepare(model, optimizer)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)  # so the loss is finite
    loop = iter(run.steps(TensorDataset(torch.full((64, 4), 99.0)), epochs=1))
    step = next(loop)
    with pytest.raises(NonFiniteLoss, match=r"weight is .*A torch\.amp\.GradScaler is for precision='fp16' to replace"):
        step.run(lambda model, batch: scaler.scale(model(batch[0]).mean()), update=lambda: scaler.step(optimizer))


@pytest.mark.cluster
def test_with_one_shard_the_gradient_is_divided_by_the_scale_too(tmp_path: Path) -> None:
    assert sum(updated for updated, _ in scales(train(tmp_path, 1, "whole"))) > STEPS / 2


@pytest.mark.cluster
@pytest.mark.parametrize(
    "points", [pytest.param(0, marks=pytest.mark.slow), 4, pytest.param(9, marks=pytest.mark.slow)]
)
def test_whoever_is_killed_and_whoever_resumes_has_the_scale_of_the_others(points: int, tmp_path: Path) -> None:
    serial = train(tmp_path / "serial", 1, "plain")
    kills = [Kill(1, 1, points), Kill(4, 0, points), Kill(10, 2, points)]
    struck = train(tmp_path / "struck", 3, "plain", kills=kills)
    assert struck.digest == serial.digest
    folder = tmp_path / "stopped"
    train(tmp_path, 3, "plain", folder=folder, UNISONO_STOP_AFTER="5")
    assert train(tmp_path, 2, "plain", folder=folder).digest == serial.digest


@pytest.mark.unit
def test_the_scale_grows_when_nothing_has_overflowed_for_long() -> None:
    scale = LossScale()
    for _ in range(GROWTH_STEPS - 1):
        scale.updated()
    assert scale.value == FIRST
    scale.updated()
    assert (scale.value, scale.steps) == (2 * FIRST, 0)
    scale.overflowed()
    scale.updated()
    assert (scale.value, scale.steps) == (FIRST, 1)
    other = kept_value(LossScale, asdict(scale), "loss_scale")
    assert asdict(other) == asdict(scale)


@pytest.mark.unit
@pytest.mark.parametrize(
    "state",
    [
        {},
        {"value": 3.0, "steps": 0},
        {"value": LEAST / 2, "steps": 0},
        {"value": 2.0, "steps": -1},
        {"value": float("nan"), "steps": 0},
    ],
)
def test_a_forged_scale_is_refused(state: dict[str, float]) -> None:
    with pytest.raises(Unreadable):
        kept_value(LossScale, state, "loss_scale")


@pytest.mark.unit
def test_workers_with_weights_of_their_own_scale_no_losses(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="precision='fp16': with strategy='local-sgd"):
        unisono.init(batch_size=8, arithmetic={"precision": "fp16"}, strategy="local-sgd:every=2", run_dir=tmp_path)


@pytest.mark.unit
def test_kfac_sees_gradients_as_they_are_and_is_refused(tmp_path: Path, torch_settings_restored: None) -> None:
    run = unisono.init(batch_size=4, shards=1, arithmetic={"precision": "fp16"}, run_dir=tmp_path)
    model = torch.nn.Linear(2, 1)
    with pytest.raises(ModelError, match="use 'bf16'"):
        run.prepare(model, unisono_lab.KFAC(model, lr=0.1))
    run.close()


def gone_backward(model: torch.nn.Module, batch: list[torch.Tensor]) -> unisono.BackwardDone:
    (loss := model(batch[0]).mean()).backward()
    return unisono.BackwardDone(loss)


@pytest.mark.unit
@pytest.mark.filterwarnings("ignore:10 steps in a row were skipped")
@pytest.mark.parametrize(
    ("loss_fn", "error", "words"),
    [
        (lambda model, batch: model(batch[0]).mean() * float("nan"), NonFiniteLoss, "step 0: the loss is nan"),
        (gone_backward, LossError, "BackwardDone"),
        (
            lambda model, batch: (model(batch[0]) * 0).float().sqrt().mean(),
            NonFiniteLoss,
            "step 36: the gradient of weight is nan",
        ),
    ],
    ids=["a loss that is not finite", "one that nobody has scaled", "a gradient that is never finite"],
)
def test_what_no_scale_makes_finite_ends_the_job(
    loss_fn: Any, error: type[Exception], words: str, tmp_path: Path, torch_settings_restored: None
) -> None:
    run = unisono.init(batch_size=4, shards=1, arithmetic={"precision": "fp16"}, run_dir=tmp_path)
    model = torch.nn.Linear(2, 1)
    run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(error, match=words):
        for step in run.steps(TensorDataset(torch.ones(4, 2)), epochs=40):
            step.run(loss_fn)
    run.close()


@pytest.mark.unit
@pytest.mark.filterwarnings("ignore:10 steps in a row were skipped")
def test_losses_of_a_million_tokens_find_a_scale_at_which_nothing_overflows(start: Callable[..., unisono.Run]) -> None:
    run, model = start(arithmetic={"precision": "fp16"}), torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.prepare(model, optimizer)
    skipped = []
    for step in run.steps(TensorDataset(torch.full((2048, 4), 3.0)), epochs=1):
        step.run(lambda model, batch: unisono.Weighted(model(batch[0]).mean(), 1e6))
        skipped.append(step.is_skipped)
    assert any(skipped)
    assert not skipped[-1]
    assert run.inside.trained.loss_scale.value < 1
