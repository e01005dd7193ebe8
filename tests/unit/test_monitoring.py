"""What a run measures of its gradients, beside an independent computation in float64."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unisono
from unisono.adapt.norms import GradientNorms, Monitoring
from unisono.adapt.squared_norms import LARGE
from unisono.errors import JobError
from unisono.train.state.trained import Monitors

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_worker")]

SHARDS, BATCH = 4, 64


def data() -> torch.utils.data.TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset(torch.randn(192, 10, generator=draw), torch.arange(192) % 3)


def loss_of(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def network(width: int = 0) -> nn.Module:
    torch.manual_seed(0)
    if width:
        return nn.Sequential(nn.Linear(10, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))
    return nn.Sequential(nn.Linear(10, 300), nn.Tanh(), nn.Linear(300, 3))


Watch = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def watch(tmp_path: Path) -> Watch:
    def train(
        check: Callable[[nn.Module, list[Any]], None] = lambda model, shards: None, width: int = 0, **settings: Any
    ) -> Any:
        folder = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        run = unisono.init(batch_size=BATCH, shards=SHARDS, seed=3, run_dir=folder, **settings)
        model = network(width)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in run.steps(data(), epochs=2):
            check(model, list(step.shards))
            step.run(loss_of)
        run.finish()
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    return train


def squared_norm(model: nn.Module, loss: Tensor) -> float:
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return float(sum(gradient.square().sum() for gradient in gradients))


def test_the_figures_are_those_of_an_independent_computation(watch: Watch) -> None:
    expected: list[tuple[float, float, float, float]] = []

    def check(model: nn.Module, shards: list[Any]) -> None:
        wide = network().double()
        wide.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
        losses = [F.cross_entropy(wide(inputs.double()), labels) for inputs, labels in shards]
        groups = [squared_norm(wide, loss) for loss in losses]
        losses = [F.cross_entropy(wide(inputs.double()), labels) for inputs, labels in shards]
        mean = squared_norm(wide, torch.stack(losses).mean())
        small, between = BATCH // SHARDS, sum(groups) / SHARDS
        variance = (between - mean) / (1 / small - 1 / BATCH)
        signal = (BATCH * mean - small * between) / (BATCH - small)
        spread = float(torch.stack(losses).detach().var()) * small
        expected.append((mean**0.5, variance, signal, spread))

    lines = watch(check, records={"monitor": Monitoring(every=1, one_in=1)})
    assert len(lines) == len(expected) == 6
    total = signals = weight = 0.0
    for line, (norm, variance, signal, spread) in zip(lines, expected, strict=True):
        total, signals, weight = 0.99 * total + 0.01 * variance, 0.99 * signals + 0.01 * signal, 0.99 * weight + 0.01
        assert line["gradient_norm"] == pytest.approx(norm, rel=1e-5)
        assert line["gradient_variance"] == pytest.approx(total / weight, rel=1e-4)
        assert line["gradient_signal"] == pytest.approx(signals / weight, rel=1e-4)
        assert line["loss_variance"] == pytest.approx(spread, rel=1e-4)


def test_a_large_mean_that_is_shared_out_has_the_norm_of_the_whole(watch: Watch) -> None:
    width, expected = 2100, list[float]()

    def check(model: nn.Module, shards: list[Any]) -> None:
        assert sum(parameter.numel() for parameter in model.parameters()) > LARGE
        losses = [F.cross_entropy(model(inputs), labels) for inputs, labels in shards]
        expected.append(squared_norm(model, torch.stack(losses).mean()) ** 0.5)

    lines = watch(check, width=width, records={"monitor": Monitoring(every=1, one_in=1)})
    assert [line["gradient_norm"] for line in lines] == pytest.approx(expected, rel=1e-5)


def test_only_the_steps_that_are_watched_have_figures_and_no_weight_depends_on_it(watch: Watch) -> None:
    watched, alone = watch(records={"monitor": 2}), watch()
    assert ["gradient_norm" in line for line in watched] == [True, False, True, False, True, False]
    assert [line["loss"] for line in watched] == [line["loss"] for line in alone]


def test_numbers_below_nothing_are_refused() -> None:
    with pytest.raises(JobError, match="monitor=-1"):
        unisono.init(batch_size=8, records={"monitor": -1})
    with pytest.raises(JobError, match="one_in=-2"):
        Monitoring(every=1, one_in=-2)


def test_large_gradients_are_sampled_and_small_ones_are_read_whole() -> None:
    assert Monitoring(every=1).blocks_of([torch.empty(1000)]) == 1
    assert Monitoring(every=1).blocks_of([torch.empty(2**22), torch.empty(2**22)]) == 8
    assert Monitoring(every=1, one_in=3).blocks_of([torch.empty(2**22)]) == 3


def test_a_signal_that_drowns_is_told_and_a_scale_that_follows_from_it_is_not() -> None:
    drowned = GradientNorms(groups=[4.0, 4.0], sizes=[8, 8], mean=1.0)
    found = Monitors().see(0, drowned, [1.0, 1.0])
    assert found["gradient_signal"] == pytest.approx(drowned.noise.signal)
    assert found["gradient_signal"] < 0
    assert "noise_scale" not in found
