"""Figures of curvature: those of the Hessian itself, the same on any number of workers, and nothing else changes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import unisono
from benchmarks.thread_crew import Trade, train
from unisono.adapt.batch_policies import EdgeOfStability
from unisono.adapt.norms import CurvatureQuestion, GradientNorms, Monitoring
from unisono.adapt.view import View
from unisono.errors import JobError, LossError, ModelError, NonFiniteLoss
from unisono.job import Job
from unisono.train.config.run_config import Execution
from unisono.train.run import Run
from unisono.train.step.loss import BackwardDone, Weighted
from unisono_lab.second_order.curvature_probe import Curvature, critical_step, largest_eigenvalue, trace_of
from waves import waved

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.usefixtures("numerics"),
    pytest.mark.filterwarnings("ignore::unisono.errors.UnisonoWarning"),
]

JOB = Job(batch_size=20, shards=5, seed=1, threads=1)
ALL: Any = {"iterations": 6, "vectors": 2, "confidence": True}


class Net(nn.Module):
    """May have attention, whose fast forms have no second derivative, and has a parameter that nobody uses."""

    def __init__(self, *, attends: bool = True) -> None:
        super().__init__()
        self.attends = attends
        self.first, self.last, self.unused = nn.Linear(2, 4), nn.Linear(4, 3), nn.Linear(2, 2)
        self.seen: Tensor
        self.register_buffer("seen", torch.tensor(0.0))
        waved(self)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        y = torch.tanh(self.first(x.view(-1, 3, 2)))[:, None]
        y = (F.scaled_dot_product_attention(y, y, y) if self.attends else y)[:, 0]
        found: Tensor = self.last(y.mean(1))
        return found


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(60, 6, generator=generator), torch.randint(0, 3, (60,), generator=generator))


def loss_fn(model: Any, batch: Any) -> Any:
    weights = 1.0 + (batch[1] == 2)
    errors = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return Weighted((errors * weights).sum() / weights.sum(), weights.sum())


def trained(
    run: Run, *, attends: bool = False, at: Sequence[int] = (0, 2), **asked: Any
) -> tuple[str, list[Curvature]]:
    model = Net(attends=attends)  # which form of it is taken is a switch of the process, and workers are threads here
    run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    found = []
    for step in run.steps(data(), epochs=1, shuffle=False):
        if asked and step.number in at:
            found.append(run.curvature(loss_fn, **asked))
        step.run(loss_fn)
    return run.finish(), found


def on(workers: int, folder: Path, script: Callable[[Run], Any]) -> list[Any]:
    return train(Trade(JOB, workers, folder, Execution(overlap=False, looks=True)), script)


def test_figures_are_the_same_on_any_number_of_workers_and_training_goes_on_as_without(tmp_path: Path) -> None:
    ((digest, _),) = on(1, tmp_path / "without", trained)
    ((same, expected),) = on(1, tmp_path / "1", lambda run: trained(run, **ALL))
    assert same == digest
    assert all(one.products > 2 and one.passes > 2 for one in expected)
    lines = [json.loads(line) for line in (tmp_path / "1" / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("critical_sharpness") for line in lines if "loss" in line] == [
        expected[0].critical_sharpness,
        None,
        expected[1].critical_sharpness,
    ]
    for workers in (2, 3, 5):
        for found, figures in on(workers, tmp_path / f"{workers}", lambda run: trained(run, **ALL)):
            assert (found, figures) == (digest, expected), workers


def test_a_monitor_measures_every_so_many_steps_from_where_it_ended_before(tmp_path: Path) -> None:
    def script(run: Run) -> list[dict[str, float]]:
        model, seen = Net(attends=False), []
        run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
        for step in run.steps(data(), epochs=1, shuffle=False):
            step.run(loss_fn)
            seen.append(step.curvature)
        run.finish()
        return [*seen, {"next start": run.inside.trained.monitors.critical_step}]

    monitoring = Monitoring(curvature_every=2, curvature={"vectors": 1})
    trade = Trade(JOB, 1, tmp_path / "1", Execution(overlap=False, monitoring=monitoring))
    (expected,) = train(trade, script)
    measured = ["critical_sharpness", "critical_step", "hessian_trace"]
    assert [sorted(one) for one in expected[:3]] == [measured, [], measured]
    assert expected[3]["next start"] == expected[2]["critical_step"]
    lines = [json.loads(line) for line in (tmp_path / "1" / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("hessian_trace") for line in lines if "loss" in line] == [
        one.get("hessian_trace") for one in expected[:3]
    ]
    for found in train(replace(trade, workers=2, folder=tmp_path / "2", is_elastic=True), script):
        assert found == expected


def test_the_confidence_of_a_layer_is_the_share_of_its_gradient_that_is_no_noise(tmp_path: Path) -> None:
    model, shards, sizes = Net(attends=False), [], []
    for shard in range(5):
        shard_loss = loss_fn(model, [each[4 * shard : 4 * shard + 4] for each in data().tensors])
        gradients = torch.autograd.grad(shard_loss.loss, list(model.first.parameters()))
        shards.append(torch.cat([one.flatten() for one in gradients]))
        sizes.append(float(shard_loss.weight))
    mean = torch.stack([one * size for one, size in zip(shards, sizes, strict=True)]).sum(0) / sum(sizes)
    exact = GradientNorms([float(one.square().sum()) for one in shards], sizes, float(mean.square().sum()))
    ((_, (found,)),) = on(1, tmp_path, lambda run: trained(run, at=[0], confidence=True, critical=False))
    assert set(found.confidence) == {"first", "last"}  # and not the one that nobody uses
    assert found.confidence["first"] == pytest.approx(exact.noise.signal / exact.mean, rel=1e-4)
    assert 0 < found.confidence["first"] < 1
    assert found.figures["confidence/first"] == found.confidence["first"]


def hessian(model: Net) -> Tensor:
    """Of the mean loss of the first batch, by torch's own second derivatives."""
    names = ["first.weight", "first.bias", "last.weight", "last.bias"]
    parameters = [dict(model.named_parameters())[name].detach() for name in names]
    inputs, labels = (each[:20] for each in data().tensors)

    def loss(flat: Tensor) -> Tensor:
        parts = flat.split([one.numel() for one in parameters])
        named = {name: part.view_as(one) for name, part, one in zip(names, parts, parameters, strict=True)}

        def moved(x: Tensor) -> Any:
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                return torch.func.functional_call(model, named, x)

        returned: Tensor = loss_fn(moved, (inputs, labels)).loss
        return returned

    flat = torch.cat([one.flatten() for one in parameters])
    return torch.stack(list(torch.autograd.functional.hessian(loss, flat)))


def test_eigenvalue_and_trace_are_those_of_the_hessian(tmp_path: Path) -> None:
    asked: Any
    exact, asked = hessian(Net()).double(), {"iterations": 40, "vectors": 50, "critical": False}
    ((_, figures),) = on(1, tmp_path / "run", lambda run: trained(run, attends=True, at=[0], **asked))
    largest = float(torch.linalg.eigvalsh(exact)[-1])
    assert figures[0].largest == pytest.approx(largest, rel=1e-3)
    assert abs(figures[0].trace - float(exact.trace())) < 4 * figures[0].trace_error
    assert figures[0].trace_error < abs(figures[0].trace)
    assert math.isnan(figures[0].critical_step)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_figures_agree_with_those_of_curvlinops(tmp_path: Path) -> None:
    curvlinops = pytest.importorskip("curvlinops")
    from scipy.sparse.linalg import eigsh

    def network() -> nn.Module:  # curvlinops takes no model that writes into a buffer
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        waved(model)
        return model

    model, (inputs, labels) = network(), (each[:20] for each in data().tensors)
    operator = curvlinops.HessianLinearOperator(
        model, nn.CrossEntropyLoss(), list(model.parameters()), [(inputs, labels)], check_deterministic=False
    )
    (largest,) = eigsh(operator.to_scipy(), k=1, which="LA", return_eigenvectors=False)
    trace = (operator @ torch.eye(operator.shape[1])).trace()

    def script(run: Run) -> Curvature:
        ours = network()
        run.prepare(ours, torch.optim.SGD(ours.parameters(), lr=0.1))
        for _ in run.steps(data(), epochs=1, shuffle=False):
            found: Curvature = run.curvature(
                lambda m, b: F.cross_entropy(m(b[0]), b[1]), iterations=40, vectors=300, critical=False
            )
            return found
        raise AssertionError

    for found in on(2, tmp_path / "run", script):
        assert found.largest == pytest.approx(float(largest), rel=0.01)
        assert abs(found.trace - float(trace)) < 4 * found.trace_error
        assert found.trace_error < 0.5 * float(trace)


class Bowl(nn.Module):
    """Its loss is 3 w²: the critical learning rate is 1/3."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([2.0]))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = 3 * self.w.square().sum() * torch.ones(len(x))
        return found


@pytest.mark.parametrize(("rate", "start"), [(0.01, 1.0), (0.01, 30.0), (5.0, 1.0)])
def test_the_critical_sharpness_of_a_parabola_is_its_curvature(rate: float, start: float, tmp_path: Path) -> None:
    def script(run: Run) -> Curvature:
        model = Bowl()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=rate))
        for _ in run.steps(data(), epochs=1):
            found: Curvature = run.curvature(lambda model, batch: model(batch[0]).mean(), start=start)
            return found
        raise AssertionError

    (found,) = on(1, tmp_path / "run", script)
    assert found.critical_sharpness == pytest.approx(6, rel=0.06)
    assert found.critical_step == pytest.approx(1 / 3 / rate, rel=0.06)
    assert found.loss == 12


def asked(run: Run, loss: Callable[[Any, Any], Any], **settings: Any) -> None:
    model = Net()
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in run.steps(data(), epochs=1):
        run.curvature(loss, **settings)


def backward(model: Any, batch: Any) -> BackwardDone:
    loss = loss_fn(model, batch).loss
    loss.backward()
    return BackwardDone(loss)


@pytest.mark.parametrize(
    ("loss", "settings", "error", "words"),
    [
        (backward, {"vectors": 1, "critical": False}, LossError, "goes backward by itself"),
        (lambda model, batch: loss_fn(model, batch).loss * math.nan, {}, NonFiniteLoss, "the loss is nan"),
        (loss_fn, {"start": 0.0}, JobError, "above 0 for start"),
        (loss_fn, {"iterations": -1}, JobError, "needs numbers from 0 on"),
    ],
)
def test_what_has_no_curvature_is_refused(
    loss: Any, settings: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        on(1, tmp_path / "run", lambda run: asked(run, loss, **settings))


def test_an_operation_without_a_second_derivative_is_named(tmp_path: Path) -> None:
    def loss(model: Any, batch: Any) -> Any:
        y = model(batch[0]).view(4, 1, 1, 3)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(y, y, y)[0].mean()

    with pytest.raises(ModelError, match="no second derivative"):
        on(1, tmp_path / "run", lambda run: asked(run, loss, iterations=2, critical=False))


def test_without_a_step_there_is_no_batch(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="in the body of a loop"):
        on(1, tmp_path / "run", lambda run: run.curvature(loss_fn))


def test_the_edge_of_stability_falls_at_once_and_rises_slowly() -> None:
    def decided(policy: EdgeOfStability, rate: float, **metrics: float) -> list[Any]:
        view = View(1, 0, 8, 8, 8, 1, 1, 1, learning_rate=rate, metrics=metrics)
        policy.after_step(view)
        return [decision.value for decision in policy.decided()]

    policy = EdgeOfStability(share=0.5, growth=2)
    assert decided(policy, 0.1, critical_sharpness=100.0) == [0.01]
    assert decided(policy, 0.1, critical_sharpness=1.0) == [0.2]
    assert decided(policy, 0.1, critical_sharpness=math.inf) == decided(policy, 0.1) == []
    with pytest.raises(JobError, match="growth above 1"):
        EdgeOfStability(growth=1)


@pytest.mark.parametrize(
    ("make", "settings", "words"),
    [
        (Monitoring, {"curvature": "vectors"}, "curvature='vectors': needs a dict"),
        (Monitoring, {"curvature_every": -1}, "curvature_every=-1.: use a number of steps, or 0 for never"),
        (CurvatureQuestion, {"vectors": "four"}, "vectors='four': needs a whole number"),
        (CurvatureQuestion, {"critical": 1}, "critical=1: needs True or False"),
        (CurvatureQuestion, {"start": math.nan}, "above 0 for start"),
        (EdgeOfStability, {"share": "half"}, "share='half': needs a number"),
        (EdgeOfStability, {"share": math.inf}, "share=inf, .*: share above 0"),
        (unisono.whole_matrix, {"kind": torch.optim.SGD, "cost": "mine"}, "cost='mine': needs a function"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_their_value(
    make: Callable[..., Any], settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(JobError, match=words):
        make(**settings)


def test_lanczos_finds_the_largest_of_many_eigenvalues() -> None:
    values = torch.linspace(-50, 7, 200).double()
    values[-1] = 9.5
    found, residual, products = largest_eigenvalue(lambda v: [v[0] * values], [torch.ones(200).double()], 100)
    assert found == pytest.approx(9.5, rel=2e-3)
    assert float((values - found).abs().min()) <= residual < 0.5
    assert products < 100
    assert largest_eigenvalue(lambda v: [3 * v[0]], [torch.ones(4)], 9) == (3.0, 0.0, 1)


def test_the_trace_of_a_diagonal_needs_one_vector() -> None:
    mean, error = trace_of(lambda v: [v[0] * torch.arange(5.0)], [[torch.tensor([1.0, -1, 1, 1, -1])]])
    assert mean == 10
    assert math.isnan(error)


def test_a_loss_that_only_falls_has_no_critical_step() -> None:
    assert critical_step(lambda multiple: -multiple, 0.0)[0] == math.inf
    assert critical_step(lambda multiple: multiple, 0.0)[0] < 1e-3
    assert critical_step(lambda multiple: multiple - 7, 0.0)[0] == pytest.approx(7, rel=0.05)
