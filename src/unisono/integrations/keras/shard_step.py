"""A shard of a global batch, computed by the model's own ``train_step`` or ``test_step``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import prod
from typing import Any

import keras
import torch
from keras.src.losses import loss as of_keras
from torch import Tensor

from unisono.data.generators import generators_kept, seed_generators
from unisono.errors import LossError, ModelError
from unisono.host.tracebacks import warn
from unisono.integrations.kept import BatchTrace, put
from unisono.integrations.keras.variables import (
    flat_metrics,
    has_own,
    is_half,
    left_alone,
    optimizers_of,
    own_optimizer,
    scales_loss,
    seeds_drawn,
)
from unisono.integrations.kit import each_twice, is_sum, refused, scale_of
from unisono.integrations.shard_state import ShardState
from unisono.plan.order import Stream, stream_seed
from unisono.train.run import Run
from unisono.train.step.loss import BackwardDone, Weighted

# The losses of a shard: the divisor of each, and their value over the global batch.

BY_WEIGHT = "mean_with_sample_weight"


class LossWeight:
    """The weight of a shard, by which its mean loss counts in that of the global batch."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self._is_plain = False
        self._weights: list[float] = []

    def note(self, weight: Tensor | None) -> None:
        """Note the divisor of a loss: None for the number of samples, else the sum of some weights."""
        if weight is None:
            self._is_plain = True
        else:
            self._weights.append(float(weight))

    @property
    def value(self) -> float:
        """The weight of the shard: its samples, those that a mask leaves, or the sum of the samples' weights.

        Raises:
            ModelError: losses are means of different things.
        """
        if not self._weights:
            return float(self.samples)
        if self._is_plain or len(set(self._weights)) > 1:
            counts = [*(["all samples"] if self._is_plain else []), *(f"{weight:g}" for weight in self._weights)]
            raise ModelError(refused("keras.means-differ", counts=", ".join(counts), reduction=BY_WEIGHT))
        return self._weights[0]


@contextmanager
def weighed(samples: int, batch: int) -> Iterator[LossWeight]:
    """Losses of Keras are noted in here, and sums are such that the mean over the shards is that of the global batch.

    Yields:
        the shard's weight, once all losses are computed.
    """
    shard_weight, usual = LossWeight(samples), of_keras.reduce_weighted_values

    def reduced(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: Any = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        if reduction not in (None, "none"):
            shard_weight.note(None if reduction == "sum" else _weight(sample_weight, mask, reduction))
        value = usual(values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)
        return value * (batch / samples) if reduction == "sum" else value

    of_keras.reduce_weighted_values = reduced
    try:
        yield shard_weight
    finally:
        of_keras.reduce_weighted_values = usual


@torch.no_grad()
def _weight(sample_weight: Any, mask: Any, reduction: str) -> Tensor | None:
    """Return the divisor of a loss; None if that is its number of values."""
    if reduction == BY_WEIGHT:
        own = None if sample_weight is None else torch.as_tensor(sample_weight).clone()  # Keras multiplies it in place
        weight = of_keras.apply_mask(own, mask, dtype="float32", reduction=reduction)
        return None if weight is None else torch.as_tensor(weight).double().sum()
    return None if mask is None else torch.as_tensor(mask).double().sum()


TOLERANCE = 0.05
"""By which the ratio of a loss with each sample twice may differ from 1 or 2."""


class AddedLosses:
    """The losses that layers add (``add_loss``, regularizers): which of them are sums over a batch's samples.

    Sums are scaled so that the mean over the shards is the sum over the global batch. A loss is one if it doubles when
    every sample comes twice.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._are_sums: list[bool] | None = None

    @contextmanager
    def scaled(self, data: Sequence[Any], factor: float) -> Iterator[None]:
        """Within the context, the model's sums are multiplied by a factor. ``data`` are a shard's."""
        if self._are_sums is None:
            self._are_sums = self._tried(data)
        if not any(are_sums := self._are_sums):
            yield
            return
        usual, numbers = self._model._aggregate_additional_loss, count()

        def aggregate(loss: Any) -> Any:
            return usual(loss) * (factor if are_sums[next(numbers) % len(are_sums)] else 1.0)

        with put(self._model, "_aggregate_additional_loss", aggregate):
            yield

    def _tried(self, data: Sequence[Any]) -> list[bool]:
        inputs = data[0]
        try:
            once = self._values(inputs)
            if not once:
                return []
            twice = self._values(each_twice(inputs))
        except Exception:  # noqa: BLE001 (a train_step may call the model otherwise: then nobody knows)
            return []
        pairs = list(zip(once, twice, strict=True)) if len(once) == len(twice) else []
        for first, second in pairs:
            if first and not any(abs(second / first - ratio) < TOLERANCE for ratio in (1, 2)):
                warn(refused("keras.added-loss", once=first, twice=second))
        return [is_sum(first, second) for first, second in pairs]

    @torch.no_grad()
    def _values(self, inputs: Any) -> list[float]:
        with generators_kept(), left_alone(self._model):
            self._model(inputs, training=False)
        return [float(torch.as_tensor(loss).sum()) for loss in self._model.losses]


class LossTracker:
    """Has Keras' mean of the loss go by the global batches' losses, and not by their shards'."""

    def __init__(self, model: Any) -> None:
        self._tracker = getattr(model, "_loss_tracker", None)
        self._before: list[Tensor] = []

    @torch.no_grad()
    def step_begins(self) -> None:
        """Begin a step."""
        if self._tracker is not None:
            self._before = [variable.value.detach().clone() for variable in self._tracker.variables]

    @torch.no_grad()
    def step_ends(self, loss: float, samples: int) -> None:
        """End a step. Values that its shards have noted as means, each with its samples, are replaced."""
        if self._tracker is None:
            return
        (total, count), kept = self._before, self._tracker.total.value
        if float(self._tracker.count.value - count) == samples:
            kept.copy_(total + torch.tensor(loss, dtype=total.dtype, device=total.device) * samples)


PREFIX = "keras "
"""The prefix of the names of logged values that are no results of metrics."""

Unpack = Callable[[Any], tuple[Any, ...]]
"""Makes what ``train_step`` gets of a collated batch."""


@dataclass(frozen=True)
class TrainStep:
    """A loss function that runs the model's ``train_step`` on a shard, and has the optimizer wait.

    ``unpack`` makes ``train_step``'s argument of a batch; ``batch`` is the number of the global batch's samples;
    ``added`` are the losses that layers add; ``kept`` is what ``train_step`` keeps in the model's attributes; ``idle``
    is trained in place of a frozen model.
    """

    model: Any
    unpack: Unpack
    results: frozenset[str]
    run: Run
    batch: int
    added: AddedLosses
    kept: ShardState
    idle: Tensor

    def __call__(self, _: Any, batch: Any) -> BackwardDone | Weighted:
        """Compute a shard's loss and gradients.

        Raises:
            ModelError: ``train_step`` makes no update, or more than one; or its losses have no common weight.
            LossError: it returned no loss.
        """
        with self.kept.of_shard():
            return self._computed(self.unpack(batch))

    def _computed(self, data: tuple[Any, ...]) -> BackwardDone | Weighted:
        with (
            seeds_drawn(self.model),
            held(self.model) as applied,
            scaled(self.model, scale_of(self.run)) as factors,
            weighed(samples_in(data), self.batch) as weight,
            own_casts(self.model),
            self.added.scaled(data, self.batch / samples_in(data)),
        ):
            logs = self.model.train_step(data)
        is_frozen = not (applied or self.model.trainable_variables)
        if not is_frozen:
            self._take(applied)
        if not isinstance(logs, Mapping):
            raise LossError(f"train_step returned a {type(logs).__name__}: return a dict of values by name")
        values = dict(_flat(logs))
        idle = set[str]()
        if values.keys() != self.results:  # else Keras, too, takes what its metrics come to
            idle = {metric.name for metric in self.model.metrics if not any(map(_is_set, metric.variables))}
        for name, value in values.items():
            if name in self.results and name not in idle:
                continue
            if prod(getattr(value, "shape", ())) != 1:
                self.kept.say([name, samples_in(data), keras.ops.convert_to_numpy(value)])
            else:
                self.run.log(f"{PREFIX}{name}", _number(value))
        if not values:
            raise LossError("train_step returned no values: have it return {'loss': …}")
        loss = _number(values.get("loss", next(iter(values.values()))))
        if is_frozen:
            return Weighted(loss + 0 * self.idle, weight.value)
        return BackwardDone(loss, weight.value, scale=max(factors, default=1.0))

    def _take(self, applied: Sequence[Applied]) -> None:
        """Have the gradients that the optimizer was given where the run looks for them."""
        if len(applied) != 1 or applied[0].optimizer is not self.model.optimizer:
            raise ModelError(_many(applied) if applied else _NONE)
        for variable in self.model.trainable_variables:
            variable.value.grad = None
        for gradient, variable in zip(applied[0].gradients, applied[0].variables, strict=True):
            variable.value.grad = gradient


@dataclass(frozen=True)
class Applied:
    """A call of an optimizer in ``train_step``."""

    optimizer: Any
    gradients: list[Tensor | None]
    variables: list[Any]


@contextmanager
def held(model: Any) -> Iterator[list[Applied]]:
    """The model's optimizers change nothing in here.

    Yields:
        what they were called with.
    """
    applied: list[Applied] = []

    def note(optimizer: Any, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        variables = optimizer._trainable_variables if trainable_variables is None else trainable_variables
        applied.append(Applied(optimizer, list(grads), list(variables)))

    with ExitStack() as stack:
        for optimizer in optimizers_of(model):
            stack.enter_context(put(optimizer, "apply", partial(note, optimizer)))
        yield applied


@contextmanager
def scaled(model: Any, factor: float) -> Iterator[list[float]]:
    """The optimizer's ``scale_loss`` multiplies losses by the factor of the run in here, and by none of its own.

    Yields:
        the factor, as soon as it was called.
    """
    factors: list[float] = []
    if factor == 1.0 and not scales_loss(model):
        yield factors
        return
    usual = own_optimizer(model).scale_loss

    def scale_loss(loss: Any) -> Any:
        factors.append(factor)
        return usual(loss) * factor

    with put(model.optimizer, "scale_loss", scale_loss):
        yield factors


@contextmanager
def own_casts(model: Any) -> Iterator[None]:
    """Layers that cast to float16 by themselves have no autocast beside it: some are to stay in float32."""
    device = next((variable.value.device.type for variable in model.variables), "cpu")
    casts = is_half(model) or scales_loss(model)
    with torch.autocast(device, enabled=False) if casts else nullcontext():
        yield


_NONE = (
    "train_step did not call self.optimizer.apply (or apply_gradients), so there is nothing to train with: call it "
    "with the gradients of the shard, as Keras' own train_step does"
)


def _many(applied: Sequence[Applied]) -> str:
    names = ", ".join(call.optimizer.name for call in applied)
    return (
        f"train_step called optimizers {len(applied)} times ({names}), and the shards of a step have one update "
        f"together, by self.optimizer: write models with several optimizers as a loop, with one step.run for each "
        f"(run.prepare, run.steps)"
    )


def evaluate_block(run: Run, model: Any, unpack: Unpack, _: Any, batch: Any) -> Tensor:
    """The values of the metrics' variables, which add up over blocks, by the model's ``test_step``.

    Behind them comes 1 if it keeps more of the batch, or returns more than metrics have; else 0.
    """
    model.reset_metrics()
    trace = BatchTrace(run, [])
    with left_alone(model), own_casts(model):
        logs = model.test_step(unpack(batch))
    has_more = has_own(model, "test_step", "compute_metrics") and (
        not isinstance(logs, Mapping) or logs.keys() != model.get_metrics_result().keys()
    )
    row = flat_metrics(model)
    is_clean = trace.is_clean()
    return torch.cat([row, row.new_tensor([has_more or not is_clean])])


def predict_block(model: Any, unpack: Unpack, salt: int, _: Any, batch: Any) -> Any:
    """The outputs, with one row per sample, by the model's ``predict_step``.

    Predictions behind the same step draw the same, but for ``salt``.
    """
    if salt:
        seed_generators(stream_seed(int(torch.randint(2**62, ())), Stream.EVALUATION, salt))
    with left_alone(model), own_casts(model):
        return model.predict_step(unpack(batch))


def _flat(logs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Values by name, also those of a metric that stands for several."""
    for name, value in logs.items():
        yield from _flat(value) if isinstance(value, Mapping) else [(name, value)]


def means_of(said: Sequence[Any]) -> dict[str, Any]:
    """The means of vectors that shards have logged, weighted by samples, as lists by name."""
    means = dict[str, Any]()
    for name in dict.fromkeys(name for name, *_ in said):
        rows = [(samples, vector) for other, samples, vector in said if other == name]
        means[name] = (sum(samples * vector for samples, vector in rows) / sum(samples for samples, _ in rows)).tolist()
    return means


def _is_set(variable: Any) -> bool:
    """Whether a variable of a metric, which begins with zeros, has something."""
    return bool(torch.count_nonzero(variable.value))


def _number(value: Any) -> float:
    if isinstance(value, int | float):
        return float(value)
    return float(keras.ops.convert_to_tensor(value).detach())


def samples_in(data: Sequence[Any]) -> int:
    """The number of samples in what ``train_step`` gets."""
    return next(int(leaf.shape[0]) for leaf in keras.tree.flatten(data) if leaf is not None)
