"""K-FAC: the update against explicit Kronecker products, and the same bits on any number of workers."""

from __future__ import annotations

import copy
import io
import math
import pickle
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import unisono
import unisono_lab
from benchmarks.thread_crew import Trade, train
from one_at_a_time import BLOWS, blows_on
from struck_run import Play, act_out, state_of
from unisono.errors import JobError, ModelError, NonFiniteLoss, UnisonoWarning
from unisono.job import Job
from unisono.train.config.run_config import Execution
from unisono.train.group.workers import Devices
from unisono.train.preparation import require_whole_layers
from unisono.train.run import Run
from unisono.train.step.step import Step
from waves import waved

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.usefixtures("numerics"),
    pytest.mark.filterwarnings("ignore::unisono.errors.UnisonoWarning", "ignore:The epoch parameter:UserWarning"),
]

JOB = Job(batch_size=10, shards=5, seed=1, threads=1)
SHARED = Execution(overlap=False, looks=True, shared_from=0)


class Net(nn.Module):
    """Convolutions, a layer that the first steps leave unused, and what no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1, stride=2)
        self.norm = nn.BatchNorm2d(3)
        self.rare, self.last = nn.Linear(12, 12), nn.Linear(12, 3, bias=False)
        self.calls: Tensor
        self.register_buffer("calls", torch.tensor(0))
        waved(self, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out = F.relu(self.norm(self.conv(x)), inplace=True).flatten(1)
        found: Tensor = self.last(out + torch.tanh(self.rare(out)) if self.calls > 2 else out)
        return found


def samples(count: int) -> TensorDataset:
    images = torch.linspace(-9, 9, count * 32).sin().view(count, 2, 4, 4)
    return TensorDataset(images, (images.sum((1, 2, 3)) * 7).long().abs() % 3)


def loss_fn(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def kfac(model: nn.Module, make: type[unisono_lab.KFAC] = unisono_lab.KFAC, **options: Any) -> unisono_lab.KFAC:
    return make(model, **{"lr": 0.05, "inverses_every": 2, "weight_decay": 1e-3} | options)


def trained(run: Run, count: int = 50, **options: Any) -> tuple[str, str]:
    model = Net()
    optimizer = kfac(model, **options)
    run.prepare(model, optimizer)
    run.register("scheduler", scheduler := torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
    for step in run.steps(samples(count), epochs=1):
        step.run(loss_fn, clip_norm=1.0)
        scheduler.step()
    return run.finish(), state_of(optimizer)


def dense(layer: nn.Module, rows: Tensor, others: Tensor, samples: int, damping: float) -> Tensor:
    """(A ⊗ G + λI)⁻¹ of a layer's gradient, by the whole matrix."""
    rows = torch.cat([rows, torch.ones(len(rows), 1)], 1)
    inputs, outputs = rows.T @ rows / len(rows), others.T @ others * samples
    weight, bias = layer.weight.grad, layer.bias.grad
    assert isinstance(weight, Tensor)
    assert isinstance(bias, Tensor)
    gradient = torch.cat([weight.flatten(1), bias[:, None]], 1)
    whole = torch.kron(outputs, inputs) + damping * torch.eye(gradient.numel())
    found: Tensor = torch.linalg.solve(whole, gradient.flatten()).view_as(gradient)
    return found


@pytest.mark.parametrize("pieces", [1, 3])
def test_an_update_is_that_of_explicit_kronecker_products(pieces: int) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        generator = torch.Generator().manual_seed(3)
        model = nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=1, stride=2, padding_mode="circular"),
            nn.ReLU(inplace=True),
            nn.Flatten(),
            nn.Linear(12, 5),
        )
        x, y = torch.randn(6, 2, 4, 4, generator=generator), torch.arange(6) % 5
        seen: dict[int, tuple[Tensor, Tensor]] = {}
        twin = nn.Sequential(*(type(each)() if not list(each.parameters()) else each for each in model))

        def note(number: int) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Tensor) -> None:
                output.register_hook(lambda gradient: seen.__setitem__(number, (args[0].detach(), gradient)))

            return hook

        noting = [model[place].register_forward_hook(note(place)) for place in (0, 3)]
        F.cross_entropy(twin(x), y).backward()
        for one in noting:
            one.remove()
        (images, at_maps), (features, at_outputs) = seen[0], seen[3]
        patches = F.unfold(F.pad(images, (1, 1, 1, 1), "circular"), 3, stride=2).transpose(1, 2).flatten(0, 1)
        expected = {
            0: dense(model[0], patches, at_maps.flatten(2).transpose(1, 2).reshape(-1, 3), 6, 0.03),
            3: dense(model[3], features, at_outputs, 6, 0.03),
        }
        model.zero_grad()
        optimizer = unisono_lab.KFAC(model, lr=0.1, momentum=0.0, damping=0.03, kl_clip=None)
        before = {place: [one.detach().clone() for one in model[place].parameters()] for place in expected}
        for part, labels in zip(x.chunk(pieces), y.chunk(pieces), strict=True):  # accumulated as in any plain loop
            (F.cross_entropy(model(part), labels) / pieces).backward()
        optimizer.step()
        for place, update in expected.items():
            weight, bias = (
                old - new.detach() for old, new in zip(before[place], model[place].parameters(), strict=True)
            )
            found = torch.cat([weight.flatten(1), bias[:, None]], 1) / 0.1
            assert float((found - update).norm() / update.norm()) < 1e-6
    finally:
        torch.set_default_dtype(torch.float32)


def test_updates_are_made_shorter_where_they_would_change_the_outputs_too_much() -> None:
    free, clipped = Net(), Net()
    for model, most in ((free, None), (clipped, 1e-4)):
        optimizer = kfac(model, momentum=0.0, weight_decay=0.0, kl_clip=most)
        loss_fn(model, samples(10)[:]).backward()
        optimizer.step()
        model.requires_grad_(requires_grad=False)
    start, gradients = Net().requires_grad_(requires_grad=False), [model.last.weight.grad for model in (free, clipped)]
    assert gradients[0] is not None
    assert gradients[1] is not None
    assert torch.equal(gradients[0], gradients[1])
    whole, short = (start.last.weight - model.last.weight for model in (free, clipped))
    ratio = float(short.norm() / whole.norm())
    assert ratio < 1
    assert torch.allclose(short, whole * ratio, atol=1e-7)
    norm = sum(
        float(((old - new) * new.grad).sum())
        for name in ("conv", "last")
        for old, new in zip(getattr(start, name).parameters(), getattr(clipped, name).parameters(), strict=True)
    )
    assert norm * ratio * 0.05 == pytest.approx(1e-4, rel=1e-3)


def ends(folder: Path, workers: int, execution: Execution = SHARED, **options: Any) -> set[tuple[str, str]]:
    return set(train(Trade(JOB, workers, folder / f"{workers}", execution), lambda run: trained(run, **options)))


def test_weights_and_factors_have_the_same_bits_on_any_number_of_workers(tmp_path: Path) -> None:
    serial = ends(tmp_path, 1)
    assert len(serial) == 1
    for workers in (2, 3, 5):
        assert ends(tmp_path, workers) == serial, workers
    assert ends(tmp_path / "alone", 2, replace(SHARED, shared_from=math.inf)) == serial


class Counted(unisono_lab.KFAC):
    """Notes which factors it decomposes, on whichever worker."""

    seen: ClassVar[list[int]] = []

    def worked_out(self, piece: int) -> list[Tensor]:
        self.seen.append(piece)
        return super().worked_out(piece)


def test_each_factor_is_decomposed_by_one_worker(tmp_path: Path) -> None:
    Counted.seen.clear()
    train(Trade(JOB, 3, tmp_path / "run", SHARED), lambda run: trained(run, make=Counted))
    assert sorted(Counted.seen) == sorted([*range(6)] * 3)  # in three of five steps


def test_a_worker_keeps_no_more_memory_than_its_factors_take(tmp_path: Path) -> None:
    def script(run: Run) -> list[int]:
        model = Net()
        run.prepare(model, optimizer := kfac(model))
        for step in run.steps(samples(10), epochs=1):
            step.run(loss_fn)
        kept = [one for state in optimizer.state.values() for one in state.values()]
        return [one.untyped_storage().nbytes() - one.nbytes for one in kept]

    unused = train(Trade(JOB, 3, tmp_path / "run", SHARED), script)
    assert [set(one) for one in unused] == [{0}] * 3


@pytest.mark.parametrize("every", [1, 2])
def test_a_checkpoint_is_gone_on_from_with_another_number_of_workers(every: int, tmp_path: Path) -> None:
    def script(run: Run) -> tuple[str, str]:
        return trained(run, factors_every=every)

    (whole,) = train(Trade(JOB, 1, tmp_path / "whole", SHARED), script)
    halves = Trade(JOB, 3, tmp_path / "halves", SHARED, checkpoint_every=3, stop_after=3)
    train(halves, script)
    assert set(train(replace(halves, workers=2, stop_after=None), script)) == {whole}


def script(run: Run, told: Callable[[Run, Step], None], make: Any) -> str:
    run.on("step_begins", told)
    return " ".join(trained(run, count=run.job.require_batch_size("samples") * 4, factors_every=2))


@pytest.mark.parametrize("number", [3, pytest.param(BLOWS, marks=pytest.mark.slow)])
def test_a_worker_may_die_anywhere_and_another_one_join(number: int, pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    play = Play(3, tmp_path, SHARED, joiners=1, script=script)
    (serial,) = act_out(pool, replace(play, workers=1, joiners=0)).digests.values()
    whole = act_out(pool, play)
    assert set(whole.digests.values()) == {serial}
    blows = list(blows_on(whole.world))
    for blow in random.Random(1).sample(blows, min(len(blows), number)):
        outcome = act_out(pool, play, blow)
        assert outcome.error is None, blow
        assert set(outcome.digests.values()) == {serial}, blow


def test_a_factor_that_is_not_finite_stops_every_worker_before_anything_changes() -> None:
    model = Net()
    optimizer = kfac(model)
    before = unisono.digest(model)
    (model(torch.ones(4, 2, 4, 4)).sum() * float("nan")).backward()
    with pytest.raises(NonFiniteLoss, match="the factor of the outputs of conv is not finite"):
        optimizer.step()
    model.calls -= 1
    changed = {name for name, one in Net().named_parameters() if not torch.equal(one, model.get_parameter(name))}
    assert not changed, before


def test_what_no_rule_knows_is_named_once_and_trained_by_another_optimizer() -> None:
    model = Net()
    optimizer = unisono_lab.KFAC(model, skip=["rare"], fallback=lambda found: torch.optim.SGD(found, lr=0.5))
    loss_fn(model, samples(10)[:]).backward()
    with pytest.warns(UnisonoWarning, match=r"no rule for norm \(BatchNorm2d\), rare \(Linear\): SGD") as told:
        optimizer.step()
    optimizer.step()
    assert len(told) == 1
    assert torch.equal(model.norm.bias, Net().norm.bias - 0.5 * model.norm.bias.grad - 0.5 * model.norm.bias.grad)  # type: ignore[operator]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


def test_tied_weights_are_refused_with_the_cure() -> None:
    with pytest.raises(ModelError, match=r"embed.weight and head.weight are one tensor .* KFAC\(skip=\['head'\]\)"):
        unisono_lab.KFAC(Tied())
    with pytest.raises(ModelError, match=r"trains no nn.Linear"):
        unisono_lab.KFAC(Tied(), skip=["head"])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"damping": 0.0}, r"KFAC\(damping=0.0\)"),
        ({"factors_every": 3}, r"KFAC\(inverses_every=10\): .* a multiple of factors_every"),
        ({"skip": ["lst"]}, "no module 'lst'"),
        ({"lr": math.inf}, r"KFAC\(lr=inf\)"),
        ({"kl_clip": math.nan}, r"KFAC\(kl_clip=nan\)"),
        ({"fallback": lambda parameters: None}, r"fallback=…\): the function returned None"),
        ({"lr": "high"}, "lr='high': needs a number"),
        ({"skip": "last"}, "skip='last': needs a list, each text"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises((ModelError, JobError), match=words):
        unisono_lab.KFAC(Net(), **settings)


def copied(model: nn.Module) -> nn.Module:
    found: nn.Module = copy.deepcopy(model)
    return found


def saved(model: nn.Module) -> nn.Module:
    torch.save(model, data := io.BytesIO())
    data.seek(0)
    found: nn.Module = torch.load(data, weights_only=False)
    return found


@pytest.mark.parametrize("twin_of", [copied, saved])
def test_a_model_is_copied_and_saved_whole_and_the_copy_trains_by_itself(
    twin_of: Callable[[nn.Module], nn.Module],
) -> None:
    model = Net()
    optimizer = kfac(model)
    twin = twin_of(model)
    loss_fn(twin, samples(10)[:]).backward()
    assert {one.grad is None for one in optimizer.statistics.values()} == {True}  # no sum is made of the copy's passes
    ends = []
    for one in (model, twin):
        one.zero_grad()
        made = optimizer if one is model else kfac(one)
        one.load_state_dict(Net().state_dict())
        loss_fn(one, samples(10)[:]).backward()
        made.step()
        ends.append((unisono.digest(one), state_of(made)))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("act", [copy.deepcopy, copy.copy, pickle.dumps])
def test_the_optimizer_itself_is_neither_copied_nor_pickled(act: Callable[[Any], Any]) -> None:
    with pytest.raises(ModelError, match=r"copy the model, make unisono_lab.KFAC\(copy\), .*load_state_dict"):
        act(kfac(Net()))


def test_it_takes_the_model_and_not_its_parameters() -> None:
    with pytest.raises(ModelError, match=r"KFAC\(<generator .*: pass the model, an nn.Module, whose layers KFAC reads"):
        unisono_lab.KFAC(Net().parameters())  # type: ignore[arg-type]


def test_weights_that_others_make_are_left_to_the_other_optimizer() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
    told = kfac(model).notice()
    assert "no rule for 1 (ParametrizedLinear), 1.parametrizations.weight (ParametrizationList): AdamW" in told
    with pytest.raises(ModelError, match="the weight of 1 has no shape yet"):
        unisono_lab.KFAC(nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(3)))


def test_curvature_is_measured_beside_it_but_for_the_critical_step(tmp_path: Path) -> None:
    def script(run: Run) -> tuple[str, str]:
        model = nn.Sequential(nn.Flatten(), nn.Linear(32, 4), nn.Tanh(), nn.Linear(4, 3))
        waved(model)
        optimizer = kfac(model)
        run.prepare(model, optimizer)
        for step in run.steps(samples(20), epochs=1):
            if step.number and run.world_size > 1:
                found = run.curvature(loss_fn, critical=False, vectors=1)
                assert found.products == 1
                assert found.loss > 0
                with pytest.raises(ModelError, match="KFAC depends on more than the gradient"):
                    run.curvature(loss_fn)
            step.run(loss_fn)
        return run.finish(), state_of(optimizer)

    (serial,) = train(Trade(JOB, 1, tmp_path / "1", SHARED), script)
    assert set(train(Trade(JOB, 2, tmp_path / "2", SHARED), script)) == {serial}


def test_workers_of_several_devices_are_refused_with_the_cure() -> None:
    with pytest.raises(ModelError, match="each worker has 2 devices, .* use one device per worker"):
        require_whole_layers([kfac(Net())], Devices(0, 2))
    require_whole_layers([kfac(Net())], Devices())
    require_whole_layers([torch.optim.SGD(Net().parameters())], Devices(0, 2))


def test_workers_that_train_apart_are_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="use 'all-reduce', or another optimizer"):
        train(Trade(JOB, 2, tmp_path, strategy="local-sgd"), trained)
