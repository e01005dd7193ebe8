"""What a step's engine computes to measure curvature: gradients, products with the Hessian, and losses elsewhere."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.stateless import _reparametrize_module

from unisono.adapt.curvature import Curvature, Vector, confidence_of, critical_step, dot, largest_eigenvalue, trace_of
from unisono.adapt.curvature_question import CurvatureQuestion
from unisono.adapt.norms import GradientNorms
from unisono.errors import JobError, LossError, ModelError
from unisono.plan.order import Stream, stream_seed
from unisono.plan.tree import Node, SummationTree
from unisono.train.model.prepared import Prepared, prefixed
from unisono.train.model.shared_work import sharing_in
from unisono.train.step.engine import StepEngine
from unisono.train.step.loss import BackwardDone, Weighted, read_loss
from unisono.train.step.step import Call
from unisono.train.step.trial_step import Held, try_step


class MeasuredCalls:
    """Computes calls as steps are, along the summation tree. All of it is collective; no weight or buffer changes.

    Args:
        engine: the engine of this generation.
        prepared: models and optimizers.
    """

    def __init__(self, engine: StepEngine, prepared: Prepared) -> None:
        self._engine, self._prepared = engine, prepared
        self.figures = engine.passes.figures
        self.begin, self.end = engine.update.watch.call_begins, engine.update.watch.measured

    @torch.no_grad()
    def mean_gradient(self, call: Call) -> tuple[float, list[Tensor]]:
        """The mean loss of a call, and its gradient for each parameter; zero where no shard used one.

        Raises:
            NonFiniteLoss: names step, shard and rank.
        """
        with torch.enable_grad():
            attempt = self._engine.attempt(call)
        self._engine.discard()
        self._engine.update.require_finite(call, attempt)
        gradients, report = attempt.gradients, attempt.report
        gradients.assign(attempt.totals, report.weight, report.used[: len(gradients.names)], writable=True)
        trained = self._prepared.trained_by(call.optimizers).values()
        found = [torch.zeros_like(one) if one.grad is None else one.grad.clone() for one in trained]
        self._prepared.clear_gradients()
        return report.loss, found

    def mean_loss(self, call: Call, elsewhere: Callable[[], AbstractContextManager[None]] = nullcontext) -> float:
        """The mean loss of a call, by forward passes alone.

        Args:
            call: the call.
            elsewhere: a function that returns a context in which the shards' losses are computed.
        """
        rows = self.figures(call, elsewhere)
        tree = SummationTree(call.batch.shards)
        parts = [loss * weight for loss, weight in rows], [weight for _, weight in rows]
        loss, weight = (
            tree.finish({Node(n, n + 1): part for n, part in enumerate(each)}, lambda one, other: one + other)
            for each in parts
        )
        return float(loss / weight) if weight else math.nan


class CurvatureProbe:
    """Measures the curvature of the mean loss over a call's batch, with all workers. It changes nothing.

    A product with the Hessian H is a gradient: Hv = ∇(∇L·v). So shards are computed, weighted and added up as in a
    step, along the summation tree, and all workers come to the same bits on any number of them.

    Args:
        calls: what computes calls that only measure.
        prepared: models and optimizers.
        call: the call whose loss and batch are meant.
        seed: the job's seed.
    """

    def __init__(self, calls: MeasuredCalls, prepared: Prepared, call: Call, seed: int) -> None:
        self._calls, self._prepared, self._call, self._seed = calls, prepared, call, seed
        self._parameters = prepared.trained_by(call.optimizers)
        self._products = 0
        self._found: tuple[float, list[Tensor]] | None = None

    def measure(self, question: CurvatureQuestion) -> Curvature:
        """Measure it. Collective.

        Raises:
            LossError: the loss function goes backward by itself, or its loss is not finite.
            ModelError: an operation of the model has no second derivative.
        """
        self._calls.begin()  # or what the passes do to buffers would look as if the script had done it
        found = self._critical(question.start) if question.critical else Curvature(self._calls.mean_loss(self._call))
        if question.iterations:
            start = self._drawn(0, torch.randn)
            largest, residual, _ = largest_eigenvalue(self._product, start, question.iterations)
            found = replace(found, largest=largest, residual=residual)
        if question.vectors:
            draws = _Draws(lambda number: self._drawn(1 + number, _signs), question.vectors)
            trace, error = trace_of(self._product, draws)
            found = replace(found, trace=trace, trace_error=error)
        if question.confidence:
            found = replace(found, confidence=self._confidence())
        self._calls.end()
        return replace(found, products=self._products)

    def _critical(self, start: float) -> Curvature:
        loss, gradient = self._mean_gradient()
        update, rate = self._update(gradient)

        def loss_at(multiple: float) -> float:
            moved = {
                name: (parameter.detach() + multiple * step).requires_grad_()
                for (name, parameter), step in zip(self._parameters.items(), update, strict=True)
            }
            return self._calls.mean_loss(self._call, lambda: _moved(self._prepared, moved))

        step, passes = critical_step(loss_at, loss, start)
        sharpness = 2 / (step * rate) if rate else math.nan
        return Curvature(loss, critical_step=step, critical_sharpness=sharpness, passes=passes)

    def _mean_gradient(self) -> tuple[float, list[Tensor]]:
        """The mean loss, which is finite, and its gradient."""
        if self._found is None:
            self._found = self._calls.mean_gradient(self._call)
        return self._found

    def _confidence(self) -> dict[str, float]:
        """How sure the gradient of each layer is, by name."""
        mean = dict(zip(self._parameters, self._mean_gradient()[1], strict=True))
        squares, loss_fn = list[float](), self._call.loss_fn

        def along(model: Any, batch: Any) -> Any:
            returned = loss_fn(model, batch)
            parameters = list(self._parameters.values())
            gradients: Sequence[Tensor | None] = torch.autograd.grad(
                _loss_of(returned, "confidence=True"), parameters, allow_unused=True, retain_graph=True
            )
            squares[:] = [0.0 if one is None else dot([one], [one]) for one in gradients]
            return returned

        call = replace(self._call, loss_fn=along)
        with torch.enable_grad():
            rows = [row for row in self._calls.figures(call, further=lambda: squares) if row[1]]
        if len(rows) < 2:
            raise JobError(
                f"run.curvature(confidence=True): the noise of a gradient is seen in that of several shards, and this "
                f"batch has {len(rows)} with samples: use unisono.init(shards=…) with at least 2"
            )
        layers = defaultdict[str, list[int]](list)
        for number, name in enumerate(self._parameters):
            layers[name.rpartition(".")[0] or name].append(number)
        norms = {
            layer: GradientNorms(
                [math.fsum(row[2 + number] for number in numbers) for row in rows],
                [row[1] for row in rows],
                math.fsum(dot([one], [one]) for one in (list(mean.values())[number] for number in numbers)),
            )
            for layer, numbers in layers.items()
        }
        return {layer: confidence_of(one) for layer, one in norms.items() if one.mean > 0}

    @torch.no_grad()
    def _update(self, gradient: Sequence[Tensor]) -> tuple[Vector, float]:
        """What the optimizers would add to the parameters, and the learning rate of the first group."""
        if sharing := sharing_in(self._call.optimizers):
            raise ModelError(
                f"run.curvature: the update of {type(sharing[0]).__name__} goes by more than the gradient of this "
                f"batch: leave the critical step out, run.curvature(loss_fn, critical=False, vectors=16), or "
                f'Monitoring(curvature_every=…, curvature={{"critical": False, "vectors": 16}})'
            )
        numbers = {id(parameter): number for number, parameter in enumerate(self._parameters.values())}
        found = [torch.zeros_like(parameter) for parameter in self._parameters.values()]
        for optimizer in self._call.optimizers:
            held, places = list[Held](), list[int]()
            for group, settings in enumerate(optimizer.param_groups):
                for parameter in settings["params"]:
                    if (number := numbers.get(id(parameter))) is not None:
                        parameter.grad = gradient[number].clone()
                        held.append(Held.copied(group, parameter, optimizer.state.get(parameter, {})))
                        parameter.grad = None
                        places.append(number)
            try_step(optimizer, held, {})
            for number, one in zip(places, held, strict=True):
                found[number] = one.value - list(self._parameters.values())[number]
        return found, float(self._call.optimizers[0].param_groups[0]["lr"])

    def _product(self, vector: Vector) -> Vector:
        """The Hessian times a vector. Collective."""
        parameters, loss_fn = list(self._parameters.values()), self._call.loss_fn

        def along(model: Any, batch: Any) -> Any:
            with sdpa_kernel(SDPBackend.MATH):  # others have no second derivative
                returned = loss_fn(model, batch)
            loss = _loss_of(returned, "iterations=…, vectors=…")
            gradients: Sequence[Tensor | None] = torch.autograd.grad(
                loss, parameters, create_graph=True, allow_unused=True
            )
            parts = [(one * other).sum() for one, other in zip(gradients, vector, strict=True) if one is not None]
            product = torch.stack(parts).sum() + 0.0 * loss  # which has a gradient, even if that is zero
            return replace(returned, loss=product) if isinstance(returned, Weighted) else product

        self._products += 1
        try:
            _, found = self._calls.mean_gradient(replace(self._call, loss_fn=along))
        except RuntimeError as error:
            raise ModelError(
                f"run.curvature: an operation of the model has no second derivative. torch says: {error}"
            ) from error
        return found

    def _drawn(self, number: int, draw: Callable[..., Tensor]) -> Vector:
        """A drawn vector, the same on all workers."""
        generator = torch.Generator().manual_seed(stream_seed(self._seed, Stream.CURVATURE, self._call.step, number))
        return [draw(parameter.shape, generator=generator).to(parameter) for parameter in self._parameters.values()]


def _loss_of(returned: Any, asked: str) -> Tensor:
    """The loss among what a loss function returned."""
    if isinstance(returned, BackwardDone):
        raise LossError(
            f"run.curvature({asked}): the loss function goes backward by itself, and derivatives need its loss: return "
            f"that, or measure the critical step alone"
        )
    return read_loss(returned, samples=1)[0]


class _Draws(Sequence[Vector]):
    """Vectors that are drawn when they are asked for: one at a time takes memory."""

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
    """Have the modules compute with other tensors in the places of parameters, which stay as they are."""
    with ExitStack() as swapped:
        for prefix, module in prefixed(prepared.modules):
            own = {name.removeprefix(prefix): value for name, value in parameters.items() if name.startswith(prefix)}
            known = {name for name, _ in module.named_parameters()}
            chosen = {name: value for name, value in own.items() if name in known}
            swapped.enter_context(_reparametrize_module(module, chosen, tie_weights=True))
        yield
