"""The factors of K-FAC: what they are made of, however the batch is cut; and what is let into them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import unisono
import unisono_lab
from benchmarks.thread_crew import Trade, train
from unisono.errors import ModelError, NonFiniteLoss, UnisonoWarning
from unisono.job import Job
from unisono.train.config.run_config import Execution
from unisono.train.run import Run
from waves import waved

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("numerics")]

SHARED = Execution(overlap=False, looks=True, shared_from=0)


class Net(nn.Module):
    """Calls a layer several times, and has one that no rule knows."""

    def __init__(self, times: int = 1, *, norm: bool = False) -> None:
        super().__init__()
        self.times = times
        self.first, self.same, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.norm = nn.LayerNorm(5) if norm else nn.Identity()
        waved(self)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(self.norm(self.first(x)))
        for _ in range(self.times):
            out = torch.tanh(self.same(out))
        found: Tensor = self.last(out)
        return found


def samples(count: int) -> TensorDataset:
    return TensorDataset(torch.linspace(-9, 9, count * 4).sin().view(count, 4), torch.arange(count) % 3)


def loss_fn(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def kfac(model: nn.Module, **options: Any) -> unisono_lab.KFAC:
    return unisono_lab.KFAC(model, **{"lr": 0.01, "inverses_every": 4} | options)


def factors_after(batch_size: int, shards: int, folder: Path) -> list[tuple[Tensor, Tensor]]:
    """Of each layer, after one step."""

    def script(run: Run) -> list[tuple[Tensor, Tensor]]:
        model = Net(times=2)
        optimizer = kfac(model)
        run.prepare(model, optimizer)
        for step in run.steps(samples(batch_size), epochs=1, shuffle=False):
            step.run(loss_fn)
        layers = [optimizer.state[one.weight] for one in (model.first, model.same, model.last)]
        return [(each["inputs"].clone(), each["outputs"].clone()) for each in layers]

    job = Job(batch_size=batch_size, shards=shards, seed=1, threads=1)
    found: list[list[tuple[Tensor, Tensor]]] = train(Trade(job, 1, folder, SHARED), script)
    return found[0]


def test_factors_do_not_depend_on_how_a_batch_is_cut_into_unequal_shards(tmp_path: Path) -> None:
    whole, cut = (factors_after(10, shards, tmp_path / f"{shards}") for shards in (1, 4))
    for one, other in zip(whole, cut, strict=True):
        for factor, same in zip(one, other, strict=True):
            assert torch.allclose(factor, same, rtol=1e-4, atol=1e-7)


def test_calls_of_a_layer_count_like_positions() -> None:
    model, seen = Net(times=3), list[tuple[Tensor, Tensor]]()

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: seen.append((args[0].detach(), gradient)))

    inputs, labels = samples(6).tensors
    noting = model.same.register_forward_hook(note)
    F.cross_entropy(model(inputs), labels).backward()
    noting.remove()
    optimizer = kfac(model)
    model.zero_grad()
    F.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
    rows = torch.cat([F.pad(each, (0, 1), value=1.0) for each, _ in seen])
    others = torch.cat([gradient for _, gradient in seen]) * 6  # of a sample's own loss
    state = optimizer.state[model.same.weight]
    assert len(rows) == 18
    assert torch.allclose(state["inputs"], rows.T @ rows / 18, rtol=1e-5)
    assert torch.allclose(state["outputs"], others.T @ others / 6, rtol=1e-4, atol=1e-7)


def test_factors_count_in_no_norm_that_gradients_are_clipped_by(tmp_path: Path) -> None:
    def script(run: Run) -> nn.Module:
        model = Net()
        run.prepare(model, kfac(model, lr=1.0))
        for step in run.steps(samples(10), epochs=1, shuffle=False):
            step.run(loss_fn, clip_norm=0.01)
        return model

    found: list[nn.Module] = train(Trade(Job(batch_size=10, shards=5, seed=1, threads=1), 1, tmp_path, SHARED), script)
    model = Net()
    optimizer = kfac(model, lr=1.0)
    loss_fn(model, samples(10)[:]).backward()
    assert nn.utils.clip_grad_norm_(model.parameters(), 0.01) > 0.1
    optimizer.step()
    for one, other, before in zip(found[0].parameters(), model.parameters(), Net().parameters(), strict=True):
        assert torch.allclose(one - before, other - before, rtol=1e-2, atol=1e-6)


def with_a_bad_sample(count: int) -> TensorDataset:
    """One whose loss is finite, and whose squares are not."""
    inputs, labels = samples(count).tensors
    inputs[7] *= 1e25
    return TensorDataset(inputs, labels)


def trained(run: Run, dataset: TensorDataset) -> tuple[str, bool]:
    """The digest, and whether all that K-FAC keeps is finite."""
    model = Net()
    optimizer = kfac(model)
    run.prepare(model, optimizer)
    for step in run.steps(dataset, epochs=1, shuffle=False):
        step.run(loss_fn)
    state = [value for kept in optimizer.state.values() for value in kept.values()]
    return run.finish(), all(torch.isfinite(one).all() for one in state)


def test_a_factor_that_is_not_finite_costs_the_step_where_such_steps_are_skipped(tmp_path: Path) -> None:
    job = Job(batch_size=5, shards=5, seed=1, threads=1, on_nan="skip")
    found = {
        workers: set(
            train(Trade(job, workers, tmp_path / f"{workers}", SHARED), lambda run: trained(run, with_a_bad_sample(20)))
        )
        for workers in (1, 2)
    }
    assert found[1] == found[2]
    ((_, are_finite),) = found[1]
    assert are_finite
    skipped = (tmp_path / "1" / "journal.jsonl").read_text().count('"skipped"')
    assert skipped == 1


def test_a_factor_that_is_not_finite_ends_the_job_elsewhere_even_where_none_is_decomposed(tmp_path: Path) -> None:
    job = Job(batch_size=5, shards=5, seed=1, threads=1)
    with pytest.raises(
        NonFiniteLoss, match=r"step 1: the sum of the inputs of first of optimizer 0 is inf in shard 2 \(rank 0\)"
    ):
        train(Trade(job, 2, tmp_path, SHARED), lambda run: trained(run, with_a_bad_sample(20)))


def test_layers_without_a_rule_are_named_once_in_a_job(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        model = Net(norm=True)
        run.prepare(model, kfac(model))
        for step in run.steps(samples(10), epochs=1):
            step.run(loss_fn)
        run.finish()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UnisonoWarning)
        train(Trade(Job(batch_size=5, shards=5, seed=1, threads=1), 3, tmp_path, SHARED), script)
    words = [str(one.message) for one in told if "no rule" in str(one.message)]
    assert words == ["KFAC has no rule for norm (LayerNorm): AdamW trains them"]


def test_a_scaler_of_gradients_is_refused_before_anything_changes() -> None:
    model, scaler = Net(), torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer = kfac(model)
    for unscaled in (False, True):
        scaler.scale(loss_fn(model, samples(6)[:])).backward()
        if unscaled:
            scaler.unscale_(optimizer)
        with pytest.raises(ModelError, match=r"a GradScaler changes first: .* torch\.bfloat16 needs none"):
            scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()
    optimizer.step()  # of nothing, without it
    assert unisono.digest(model) == unisono.digest(Net())


def test_layers_that_are_unfrozen_later_are_refused() -> None:
    model = Net()
    model.first.requires_grad_(requires_grad=False)
    optimizer = kfac(model)
    with pytest.raises(ModelError, match="after unfreezing layers, make another optimizer"):
        optimizer.add_param_group({"params": list(model.first.parameters())})


def test_sums_follow_a_model_to_its_device() -> None:
    model = Net()
    optimizer = kfac(model)
    model.to("meta")
    assert {one.device.type for one in optimizer.statistics.values()} == {"meta"}
