"""One shard of a global batch, by the model's own ``train_step`` or ``test_step``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import torch
from keras.src.losses import loss as of_keras
from torch import Tensor

from unisono.errors import LossError, ModelError
from unisono.integrations.kept_attributes import put
from unisono.integrations.keras.kept import is_half, optimizers_of, own_optimizer, scales_loss
from unisono.integrations.keras.variables import flat_metrics, left_alone, seeds_drawn
from unisono.integrations.loss_scaler import scale_of
from unisono.integrations.refused import refused
from unisono.train.run import Run
from unisono.train.step.loss import BackwardDone

# The losses of a shard: what each is a mean of, and what they come to over the global batch.

BY_WEIGHT = "mean_with_sample_weight"


class LossWeight:
    """The weight of a shard, by which its mean loss counts in that of the global batch.

    Attributes:
        samples: the number of the shard's samples.
    """

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self._is_plain = False
        self._found: list[float] = []

    def note(self, weight: Tensor | None) -> None:
        """A loss was a mean over samples, or over what some numbers add up to."""
        if weight is None:
            self._is_plain = True
        else:
            self._found.append(float(weight))

    @property
    def value(self) -> float:
        """The weight: samples, or what a mask leaves, or the sum of the samples' weights.

        Raises:
            ModelError: losses are means of different things.
        """
        if not self._found:
            return float(self.samples)
        if self._is_plain or len(set(self._found)) > 1:
            counts = [*(["all samples"] if self._is_plain else []), *(f"{one:g}" for one in self._found)]
            raise ModelError(refused("keras.means-differ", counts=", ".join(counts), reduction=BY_WEIGHT))
        return self._found[0]


@contextmanager
def weighed(samples: int, batch: int) -> Iterator[LossWeight]:
    """Losses of Keras are noted in here, and sums are such that the mean over the shards is that of the global batch.

    Args:
        samples: the number of the shard's samples.
        batch: the number of the global batch's samples.

    Yields:
        the shard's weight, once all losses are computed.
    """
    found, usual = LossWeight(samples), of_keras.reduce_weighted_values

    def reduced(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: Any = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        if reduction not in (None, "none"):
            found.note(None if reduction == "sum" else _weight(sample_weight, mask, reduction))
        value = usual(values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)
        return value * (batch / samples) if reduction == "sum" else value

    of_keras.reduce_weighted_values = reduced
    try:
        yield found
    finally:
        of_keras.reduce_weighted_values = usual


@torch.no_grad()
def _weight(sample_weight: Any, mask: Any, reduction: str) -> Tensor | None:
    """What a loss is divided by, unless that is its number of values."""
    if reduction == BY_WEIGHT:
        own = None if sample_weight is None else torch.as_tensor(sample_weight).clone()  # Keras multiplies it in place
        weight = of_keras.apply_mask(own, mask, dtype="float32", reduction=reduction)
        return None if weight is None else torch.as_tensor(weight).double().sum()
    return None if mask is None else torch.as_tensor(mask).double().sum()


class LossTracker:
    """Has Keras' mean of the loss go by the global batches' losses, and not by their shards'.

    Args:
        model: the Keras model, compiled.
    """

    def __init__(self, model: Any) -> None:
        self._tracker = getattr(model, "_loss_tracker", None)
        self._before: list[Tensor] = []

    @torch.no_grad()
    def step_begins(self) -> None:
        """A step begins."""
        if self._tracker is not None:
            self._before = [one.value.detach().clone() for one in self._tracker.variables]

    @torch.no_grad()
    def step_ends(self, loss: float, samples: int) -> None:
        """A step is done. What its shards have told is replaced, if it was their means, each with its samples."""
        if self._tracker is None:
            return
        (total, count), kept = self._before, self._tracker.total.value
        if float(self._tracker.count.value - count) == samples:
            kept.copy_(total + torch.tensor(loss, dtype=total.dtype, device=total.device) * samples)


PREFIX = "keras "
"""What the names of logged values begin with that are no results of metrics."""

Unpack = Callable[[Any], tuple[Any, ...]]
"""Makes what ``train_step`` gets of a collated batch."""


@dataclass(frozen=True)
class TrainStep:
    """A loss function that runs the model's ``train_step`` on a shard, and has the optimizer wait.

    Attributes:
        model: the Keras model.
        unpack: what makes ``train_step``'s argument of a batch.
        results: the names of the metrics' results.
        run: the run.
        batch: the number of the global batch's samples.
    """

    model: Any
    unpack: Unpack
    results: frozenset[str]
    run: Run
    batch: int

    def __call__(self, _: Any, batch: Any) -> BackwardDone:
        """Compute a shard's loss and gradients.

        Raises:
            ModelError: ``train_step`` makes no update, or more than one; or its losses have no common weight.
            LossError: it returned no loss.
        """
        data = self.unpack(batch)
        with (
            seeds_drawn(self.model),
            held(self.model) as applied,
            scaled(self.model, scale_of(self.run)) as factors,
            weighed(samples_in(data), self.batch) as weight,
            own_casts(self.model),
        ):
            logs = self.model.train_step(data)
        self._take(applied)
        if not isinstance(logs, Mapping):
            raise LossError(f"train_step returned a {type(logs).__name__}: return a dict of values by name")
        values = dict(_flat(logs))
        for name, value in values.items():
            if name not in self.results:
                self.run.log(f"{PREFIX}{name}", _number(value))
        if not values:
            raise LossError("train_step returned no values: have it return {'loss': …}")
        loss = _number(values.get("loss", next(iter(values.values()))))
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
    device = next((one.value.device.type for one in model.variables), "cpu")
    casts = is_half(model) or scales_loss(model)
    with torch.autocast(device, enabled=False) if casts else nullcontext():
        yield


_NONE = (
    "train_step did not call self.optimizer.apply (or apply_gradients), so there is nothing to train with: call it "
    "with the gradients of the shard, as Keras' own train_step does"
)


def _many(applied: Sequence[Applied]) -> str:
    names = ", ".join(one.optimizer.name for one in applied)
    return (
        f"train_step called optimizers {len(applied)} times ({names}), and the shards of a step have one update "
        f"together, by self.optimizer: write models with several optimizers as a loop, with one step.run for each "
        f"(run.prepare, run.steps)"
    )


@dataclass(frozen=True)
class EvaluationStep:
    """Runs the model's ``test_step`` on a block of samples, from metrics that were reset.

    Attributes:
        model: the Keras model.
        unpack: what makes ``test_step``'s argument of a batch.
    """

    model: Any
    unpack: Unpack

    def __call__(self, _: Any, batch: Any) -> Tensor:
        """The values of the metrics' variables, which add up over blocks."""
        self.model.reset_metrics()
        with left_alone(self.model), own_casts(self.model):
            self.model.test_step(self.unpack(batch))
        return flat_metrics(self.model)


def _flat(logs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Values by name, also those of a metric that stands for several."""
    for name, value in logs.items():
        yield from _flat(value) if isinstance(value, Mapping) else [(name, value)]


def _number(value: Any) -> float:
    return float(keras.ops.convert_to_tensor(value).detach())


@dataclass(frozen=True)
class PredictStep:
    """Runs the model's ``predict_step`` on a block of samples.

    Attributes:
        model: the Keras model.
        unpack: what makes ``predict_step``'s argument of a batch.
    """

    model: Any
    unpack: Unpack

    def __call__(self, _: Any, batch: Any) -> Any:
        """The outputs, with one row per sample."""
        with left_alone(self.model), own_casts(self.model):
            return self.model.predict_step(self.unpack(batch))


def samples_in(data: Sequence[Any]) -> int:
    """The number of samples in what ``train_step`` gets."""
    return next(int(leaf.shape[0]) for leaf in keras.tree.flatten(data) if leaf is not None)
