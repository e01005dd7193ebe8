"""One shard of a global batch, by the model's own ``train_step`` or ``test_step``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
from torch import Tensor

from unisono.errors import LossError, ModelError
from unisono.integrations.attributes import put
from unisono.integrations.keras.kept import optimizers_of
from unisono.integrations.keras.losses import weighed
from unisono.integrations.keras.variables import flat_metrics, left_alone, seeds_drawn
from unisono.train.step.loss import BackwardDone

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
        log: the function that logs a number of the shard.
        batch: the number of the global batch's samples.
    """

    model: Any
    unpack: Unpack
    results: frozenset[str]
    log: Callable[[str, Any], None]
    batch: int

    def __call__(self, _: Any, batch: Any) -> BackwardDone:
        """Compute a shard's loss and gradients.

        Raises:
            ModelError: ``train_step`` makes no update, or more than one; or its losses have no common weight.
            LossError: it returned no loss.
        """
        data = self.unpack(batch)
        with seeds_drawn(self.model), held(self.model) as applied, weighed(samples_in(data), self.batch) as weight:
            logs = self.model.train_step(data)
        self._take(applied)
        if not isinstance(logs, Mapping):
            raise LossError(f"train_step returned a {type(logs).__name__}: return a dict of values by name")
        values = dict(_flat(logs))
        for name, value in values.items():
            if name not in self.results:
                self.log(f"{PREFIX}{name}", _number(value))
        if not values:
            raise LossError("train_step returned no values: have it return {'loss': …}")
        return BackwardDone(_number(values.get("loss", next(iter(values.values())))), weight.value)

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
        with left_alone(self.model):
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
        with left_alone(self.model):
            return self.model.predict_step(self.unpack(batch))


def samples_in(data: Sequence[Any]) -> int:
    """The number of samples in what ``train_step`` gets."""
    return next(int(leaf.shape[0]) for leaf in keras.tree.flatten(data) if leaf is not None)
