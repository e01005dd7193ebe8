"""Figures of the loss's curvature, from products with its Hessian and from losses along an update."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.stateless import _reparametrize_module

from unisono.adapt.norms import CONFIDENCE, FIGURES, CurvatureQuestion, GradientNorms
from unisono.errors import JobError, LossError, ModelError
from unisono.plan.order import Stream, stream_seed
from unisono.plan.tree import Node, SummationTree
from unisono.train.model.prepared import Prepared, prefixed
from unisono.train.model.shared_work import sharing_in
from unisono.train.step.loss import BackwardDone, Weighted, read_loss
from unisono.train.step.part import Attempt
from unisono.train.step.step import Call
from unisono.train.step.step_engine import StepEngine
from unisono.train.step.trial_step import Held, try_step

Vector = list[Tensor]
"""A tensor like each trained parameter."""

Product = Callable[[Vector], Vector]
"""The Hessian times a vector."""

TOLERANCE = 1e-3
"""The relative change of the largest eigenvalue below which it counts as settled; it must be so twice in a row."""

# Which kernels of attention torch may choose is the process's to say: workers on threads take turns, for each puts back
# what it found.
_ATTENTION = Lock()

MOST_PASSES = 20
FINEST = 1.1
"""The ratio of the interval's ends at which the search for the critical step stops."""


@dataclass(frozen=True, slots=True)
class Curvature:
    """Figures of the curvature of the mean loss over a global batch.

    Figures that were not requested are NaN.

    Attributes:
        loss: the mean loss at the weights where curvature was measured.
        largest: the largest eigenvalue λ of the Hessian, by Lanczos (C. Lanczos, 1950).
        residual: |H v - λ v| for the unit vector v of λ: an eigenvalue lies within this distance of λ.
        trace: the trace of the Hessian: the mean of z·Hz over vectors z of ±1 (M. F. Hutchinson, 1989).
        trace_error: the standard error of that mean, from the spread of the vectors.
        critical_step: the least multiple of the optimizers' next update with which the loss is larger than without it;
            infinity if no multiple up to a million is.
        critical_sharpness: 2 / (critical_step · learning rate), with the first group's rate (D. S. Kalra et al., A
            Scalable Measure of Loss Landscape Curvature, arXiv 2601.16979).
        products: the number of products with the Hessian; each takes about as long as two gradients.
        passes: the number of forward passes over the batch for the critical step.
        confidence: the share of the mean gradient's squared norm that is not noise, by layer (a module's name); see
            :func:`confidence_of`. A layer without a gradient is left out.
    """

    loss: float = math.nan
    largest: float = math.nan
    residual: float = math.nan
    trace: float = math.nan
    trace_error: float = math.nan
    critical_step: float = math.nan
    critical_sharpness: float = math.nan
    products: int = 0
    passes: int = 0
    confidence: Mapping[str, float] = field(default_factory=dict)

    @property
    def figures(self) -> dict[str, float]:
        """The requested figures that are finite, by their names in ``metrics.jsonl``."""
        values = self.critical_step, self.critical_sharpness, self.largest, self.trace
        figures = {
            **dict(zip(FIGURES, values, strict=True)),
            **{f"{CONFIDENCE}{layer}": value for layer, value in self.confidence.items()},
        }
        return {name: value for name, value in figures.items() if math.isfinite(value)}


def confidence_of(norms: GradientNorms) -> float:
    """The confidence of a gradient: an estimate of |G|² / (|G|² + tr(Σ)/B), from 0 (noise alone) to 1 (no noise).

    With G the true gradient, Σ the covariance of one sample's gradient and B the batch size, the mean gradient ḡ has
    E |ḡ|² = |G|² + tr(Σ)/B. |G|² is estimated from the shards' gradients (McCandlish et al., arXiv 1812.06162,
    appendix A), and estimates outside of 0 … 1 are clamped.
    """
    return min(1.0, max(0.0, norms.noise.signal / norms.mean))


def largest_eigenvalue(product: Product, start: Vector, most: int) -> tuple[float, float, int]:
    """The largest eigenvalue of a symmetric matrix, its residual, and the number of products.

    Lanczos without reorthogonalisation: it may find eigenvalues again, which does no harm to the largest one. The first
    vector is not zero.
    """
    current, previous = _scaled(start, 1 / _norm(start)), [torch.zeros_like(tensor) for tensor in start]
    diagonal, off_diagonal, eigenvalue, settled_times = list[float](), list[float](), math.nan, 0
    residual = math.nan
    for number in range(1, most + 1):
        image = product(current)
        if number > 1:
            image = _added(image, previous, -off_diagonal[-1])
        diagonal.append(dot(current, image))
        image = _added(image, current, -diagonal[-1])
        length, previous_eigenvalue = _norm(image), eigenvalue
        eigenvalue, last_element = _largest(diagonal, off_diagonal)
        residual = length * abs(last_element)
        settled_times = settled_times + 1 if abs(eigenvalue - previous_eigenvalue) <= TOLERANCE * abs(eigenvalue) else 0
        if settled_times == 2 or length <= 1e-12 * max(map(abs, diagonal)):
            return eigenvalue, residual, number
        off_diagonal.append(length)
        previous, current = current, _scaled(image, 1 / length)
    return eigenvalue, residual, most


def trace_of(product: Product, draws: Sequence[Vector]) -> tuple[float, float]:
    """The trace of a symmetric matrix and its standard error, from vectors of ±1; one vector has the error NaN."""
    values = [dot(vector, product(vector)) for vector in draws]
    mean = math.fsum(values) / len(values)
    spread = math.fsum((value - mean) ** 2 for value in values)
    return mean, math.sqrt(spread / (len(values) - 1) / len(values)) if len(values) > 1 else math.nan


def critical_step(loss_at: Callable[[float], float], loss: float, start: float = 1.0) -> tuple[float, int]:
    """The least multiple of an update that makes the loss larger, within a tenth, and the number of losses.

    The search doubles or halves the first guess until the multiple is bracketed, and then bisects the bracket.
    """
    low, high, passes = 0.0, math.inf, 0
    while (high == math.inf or low == 0.0 or high > FINEST * low) and passes < MOST_PASSES:
        multiple = (
            start if not passes else 2 * low if high == math.inf else high / 2 if low == 0.0 else math.sqrt(low * high)
        )
        passes += 1
        if loss_at(multiple) > loss:
            high = multiple
        else:  # also if the loss is NaN
            low = multiple
    if high == math.inf:
        return high, passes
    return (math.sqrt(low * high) if low else high), passes


def dot(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """The inner product of two vectors, in 64 bits."""
    return math.fsum(float((a.double() * b.double()).sum()) for a, b in zip(left, right, strict=True))


def _norm(vector: Vector) -> float:
    return math.sqrt(dot(vector, vector))


def _scaled(vector: Vector, factor: float) -> Vector:
    return [tensor * factor for tensor in vector]


def _added(vector: Vector, other: Vector, factor: float) -> Vector:
    return [a + factor * b for a, b in zip(vector, other, strict=True)]


def _largest(diagonal: Sequence[float], beside: Sequence[float]) -> tuple[float, float]:
    """The largest eigenvalue of a tridiagonal matrix, and the last element of its unit vector."""
    edges = beside[: len(diagonal) - 1]
    values, vectors = np.linalg.eigh(np.diag(diagonal) + np.diag(edges, 1) + np.diag(edges, -1))
    return float(values[-1]), float(vectors[-1, -1])


class CurvatureProbe:
    """Measures the curvature of the mean loss over a call's batch, with all workers. It changes no state.

    A product with the Hessian H is a gradient: Hv = ∇(∇L·v). So shards are computed, weighted and added as in a step,
    along the summation tree, and the result has the same bits on any number of workers.
    """

    def __init__(self, engine: StepEngine, prepared: Prepared, call: Call, seed: int) -> None:
        self._engine, self._prepared, self._call, self._seed = engine, prepared, call, seed
        self._parameters = prepared.trained_by(call.optimizers)
        self._products = 0
        self._at_weights: tuple[float, list[Tensor]] | None = None

    def measure(self, question: CurvatureQuestion) -> Curvature:
        """Measure the curvature. Collective.

        Raises:
            LossError: the loss function goes backward by itself, or its loss is not finite.
            ModelError: an operation of the model has no second derivative.
        """
        # Otherwise the changes of buffers by these passes would look like changes by the script.
        self._engine.parts.begin(self._call)
        curvature = self._critical(question.start) if question.critical else Curvature(self._mean_loss())
        if question.iterations:
            start = self._drawn(0, torch.randn)
            largest, residual, _ = largest_eigenvalue(self._product, start, question.iterations)
            curvature = replace(curvature, largest=largest, residual=residual)
        if question.vectors:
            draws = _Draws(lambda number: self._drawn(1 + number, _signs), question.vectors)
            trace, error = trace_of(self._product, draws)
            curvature = replace(curvature, trace=trace, trace_error=error)
        if question.confidence:
            curvature = replace(curvature, confidence=self._confidence())
        self._engine.parts.measured()
        return replace(curvature, products=self._products)

    def _critical(self, start: float) -> Curvature:
        loss, gradient = self._mean_gradient()
        update, rate = self._update(gradient)

        def loss_at(multiple: float) -> float:
            moved = {
                name: (parameter.detach() + multiple * step).requires_grad_()
                for (name, parameter), step in zip(self._parameters.items(), update, strict=True)
            }
            return self._mean_loss(lambda: _moved(self._prepared, moved))

        step, passes = critical_step(loss_at, loss, start)
        sharpness = 2 / (step * rate) if rate else math.nan
        return Curvature(loss, critical_step=step, critical_sharpness=sharpness, passes=passes)

    @torch.no_grad()
    def _gradient_of(self, call: Call) -> tuple[float, list[Tensor]]:
        """The mean loss of a call, and its gradient for each parameter; zero where no shard used one.

        Raises:
            NonFiniteLoss: the loss or the gradient is not finite; the message names step, shard and rank.
        """
        with torch.enable_grad():
            attempt = self._engine.attempt(call, measures=True)
        assert isinstance(attempt, Attempt), "a measurement has no judges"
        self._engine.discard()
        self._engine.finite.require(attempt)
        gradients, report = attempt.gradients, attempt.report
        gradients.assign(attempt.totals, report.weight, report.used[: len(gradients.names)], writable=True)
        trained = self._parameters.values()
        means = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone() for parameter in trained
        ]
        self._prepared.clear_gradients()
        return report.loss, means

    def _mean_loss(self, elsewhere: Callable[[], AbstractContextManager[None]] = nullcontext) -> float:
        """The mean loss, by forward passes alone, which run in the given context."""
        rows = self._engine.passes.figures(self._call, elsewhere)
        tree = SummationTree(self._call.batch.shards)
        loss, weight = (
            tree.finish({Node(n, n + 1): part for n, part in enumerate(parts)}, lambda left, right: left + right)
            for parts in ([loss * weight for loss, weight in rows], [weight for _, weight in rows])
        )
        return float(loss / weight) if weight else math.nan

    def _mean_gradient(self) -> tuple[float, list[Tensor]]:
        """The mean loss, which is finite, and its gradient; computed once."""
        if self._at_weights is None:
            self._at_weights = self._gradient_of(self._call)
        return self._at_weights

    def _confidence(self) -> dict[str, float]:
        """The confidence of the gradient of each layer, by name."""
        mean = dict(zip(self._parameters, self._mean_gradient()[1], strict=True))
        squares, loss_fn = list[float](), self._call.loss_fn

        def along(model: Any, batch: Any) -> Any:
            returned = loss_fn(model, batch)
            parameters = list(self._parameters.values())
            gradients: Sequence[Tensor | None] = torch.autograd.grad(
                _loss_of(returned, "confidence=True"), parameters, allow_unused=True, retain_graph=True
            )
            squares[:] = [0.0 if gradient is None else dot([gradient], [gradient]) for gradient in gradients]
            return returned

        call = replace(self._call, loss_fn=along)
        with torch.enable_grad():
            rows = [row for row in self._engine.passes.figures(call, further=lambda: squares) if row[1]]
        if len(rows) < 2:
            raise JobError(
                f"run.curvature(confidence=True): the noise of a gradient is measured over several shards, but this "
                f"batch has {len(rows)} with samples: use unisono.init(shards=…) with at least 2"
            )
        layers = defaultdict[str, list[int]](list)
        for number, name in enumerate(self._parameters):
            layers[name.rpartition(".")[0] or name].append(number)
        norms = {
            layer: GradientNorms(
                [math.fsum(row[2 + number] for number in numbers) for row in rows],
                [row[1] for row in rows],
                math.fsum(
                    dot([gradient], [gradient]) for gradient in (list(mean.values())[number] for number in numbers)
                ),
            )
            for layer, numbers in layers.items()
        }
        return {layer: confidence_of(gradient) for layer, gradient in norms.items() if gradient.mean > 0}

    @torch.no_grad()
    def _update(self, gradient: Sequence[Tensor]) -> tuple[Vector, float]:
        """The update that the optimizers would make, and the learning rate of the first group."""
        if sharing := sharing_in(self._call.optimizers):
            raise ModelError(
                f"run.curvature: the update of {type(sharing[0]).__name__} depends on more than the gradient of "
                f"this batch: leave the critical step out, run.curvature(loss_fn, critical=False, vectors=16), or "
                f'Monitoring(curvature_every=…, curvature={{"critical": False, "vectors": 16}})'
            )
        numbers = {id(parameter): number for number, parameter in enumerate(self._parameters.values())}
        updates = [torch.zeros_like(parameter) for parameter in self._parameters.values()]
        for optimizer in self._call.optimizers:
            trials, places = list[Held](), list[int]()
            for group, settings in enumerate(optimizer.param_groups):
                for parameter in settings["params"]:
                    if (number := numbers.get(id(parameter))) is not None:
                        parameter.grad = gradient[number].clone()
                        trials.append(Held.copied(group, parameter, optimizer.state.get(parameter, {})))
                        parameter.grad = None
                        places.append(number)
            try_step(optimizer, trials, {})
            for number, trial in zip(places, trials, strict=True):
                updates[number] = trial.value - list(self._parameters.values())[number]
        return updates, float(self._call.optimizers[0].param_groups[0]["lr"])

    def _product(self, vector: Vector) -> Vector:
        """The Hessian times a vector. Collective."""
        parameters, loss_fn = list(self._parameters.values()), self._call.loss_fn

        def along(model: Any, batch: Any) -> Any:
            with _ATTENTION, sdpa_kernel(SDPBackend.MATH):  # other attention kernels have no second derivative
                returned = loss_fn(model, batch)
            loss = _loss_of(returned, "iterations=…, vectors=…")
            gradients: Sequence[Tensor | None] = torch.autograd.grad(
                loss, parameters, create_graph=True, allow_unused=True
            )
            parts = [
                (gradient * tensor).sum()
                for gradient, tensor in zip(gradients, vector, strict=True)
                if gradient is not None
            ]
            # With the loss in the sum there is a gradient even if it is zero.
            product = torch.stack(parts).sum() + 0.0 * loss
            return replace(returned, loss=product) if isinstance(returned, Weighted) else product

        self._products += 1
        try:
            _, product_gradient = self._gradient_of(replace(self._call, loss_fn=along))
        except RuntimeError as error:
            raise ModelError(
                f"run.curvature: an operation of the model has no second derivative. torch says: {error}"
            ) from error
        return product_gradient

    def _drawn(self, number: int, draw: Callable[..., Tensor]) -> Vector:
        """A random vector, the same on all workers."""
        generator = torch.Generator().manual_seed(stream_seed(self._seed, Stream.CURVATURE, self._call.step, number))
        return [draw(parameter.shape, generator=generator).to(parameter) for parameter in self._parameters.values()]


def _loss_of(returned: Any, arguments: str) -> Tensor:
    """The loss in the value that a loss function returned."""
    if isinstance(returned, BackwardDone):
        raise LossError(
            f"run.curvature({arguments}): the loss function goes backward by itself, but derivatives need its loss: "
            f"return the loss, or measure the critical step alone"
        )
    return read_loss(returned, samples=1)[0]


class _Draws(Sequence[Vector]):
    """Random vectors that are drawn on access, so that only one at a time takes memory."""

    def __init__(self, draw: Callable[[int], Vector], count: int) -> None:
        self._draw, self._count = draw, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < self._count:
            raise IndexError(number)
        return self._draw(number)


def _signs(shape: torch.Size, *, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, shape, generator=generator, dtype=torch.float32) * 2 - 1


@contextmanager
def _moved(prepared: Prepared, parameters: dict[str, Tensor]) -> Iterator[None]:
    """Let the modules compute with other tensors in the place of their parameters, which stay unchanged."""
    with ExitStack() as swapped:
        for prefix, module in prefixed(prepared.modules):
            own = {name.removeprefix(prefix): value for name, value in parameters.items() if name.startswith(prefix)}
            parameter_names = {name for name, _ in module.named_parameters()}
            chosen = {name: value for name, value in own.items() if name in parameter_names}
            swapped.enter_context(_reparametrize_module(module, chosen, tie_weights=True))
        yield
