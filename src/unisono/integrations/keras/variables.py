"""A Keras model's variables, how what shards make of them is combined, and what of a model cannot be kept exact."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import torch
from keras.src.random.seed_generator import global_seed_generator
from keras.src.trainers.trainer import Trainer
from torch import Tensor

from unisono.errors import JobError, ModelError
from unisono.integrations.kit import refused

LARGEST_SEED = 2**31 - 1


def shared_state(model: Any) -> dict[str, Any]:
    """The variables that shards change, as ``run.prepare(state=…)`` takes them.

    Moving statistics end as the mean over shards, metrics as their sum; seeds are set before each shard. The model has
    to be built.

    Raises:
        ModelError: a metric does not begin with zeros, so what shards add to it cannot be added up.
    """
    kept: dict[int, tuple[str, Any, str | None]] = {}
    for variable in moving_statistics(model):
        kept.setdefault(id(variable), (f"statistic {variable.path}", variable, None))
    for variable in seeds_of(model):
        kept.setdefault(id(variable), (f"seed {variable.path}", variable, "first"))
    for variable in metric_variables(model):
        kept.setdefault(id(variable), (f"metric {variable.path}", variable, "sum"))
    return {
        f"{name} {number}": (variable, {"_value": rule}) for number, (name, variable, rule) in enumerate(kept.values())
    }


def is_built(model: Any, *, alone: bool = False) -> bool:
    """Whether the model has all its variables; unless ``alone``, its optimizer, losses and metrics as well."""
    has_parts = model.compiled and not alone
    parts = (model.optimizer, model._compile_loss, model._compile_metrics) if has_parts else ()
    return all(part.built for part in (*model._flatten_layers(), *parts) if part is not None)


def moving_statistics(model: Any) -> list[Any]:
    """The variables of layers that no optimizer trains; not those that are frozen for a while."""
    return [variable for layer in model._flatten_layers() for variable in layer._non_trainable_variables]


def seeds_of(model: Any) -> list[Any]:
    """The states of the model's seed generators, and of the global one, from which callbacks may draw."""
    own = (generator.state for layer in model._flatten_layers() for generator in getattr(layer, "_seed_generators", ()))
    return [*own, global_seed_generator().state]


def metric_variables(model: Any) -> list[Any]:
    """The variables of all metrics, each once, in their order."""
    by_identity = {id(variable): variable for metric in model.metrics for variable in metric.variables}
    return list(by_identity.values())


def require_sums(model: Any) -> None:
    """Reset the metrics, and refuse those that do not begin with zeros.

    Raises:
        ModelError: there is one; names it.
    """
    model.reset_metrics()
    for metric in model.metrics:
        for variable in metric.variables:
            if torch.count_nonzero(variable.value):
                raise ModelError(
                    refused(
                        "keras.metric-not-zero",
                        metric=metric.name,
                        variable=variable.path,
                        value=variable.value.tolist(),
                    )
                )


@contextmanager
def seeds_drawn(model: Any) -> Iterator[None]:
    """Seed generators begin with a seed from torch's generator in here, and have their own again afterwards.

    So what they give depends on what torch's generator was seeded with: step and shard, not the worker.
    """
    variables = seeds_of(model)
    before = [variable.value.clone() for variable in variables]
    for variable in variables:
        drawn = torch.randint(LARGEST_SEED, tuple(variable.shape), dtype=variable.value.dtype)
        variable.assign(drawn)
    try:
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)


@contextmanager
def left_alone(model: Any) -> Iterator[None]:
    """Restore the variables of layers after the context, and draw seeds: each worker does a part of an evaluation."""
    before = [(variable, variable.value.clone()) for variable in moving_statistics(model)]
    try:
        with seeds_drawn(model):
            yield
    finally:
        for variable, value in before:
            variable.assign(value)


def flat_metrics(model: Any) -> Tensor:
    """The values of all metric variables in one row, in double precision."""
    values = [variable.value.reshape(-1).double() for variable in metric_variables(model)]
    return torch.cat(values) if values else torch.zeros(0, dtype=torch.float64)


def set_metrics(model: Any, row: Tensor) -> None:
    """Set the metrics from the result of :func:`flat_metrics`."""
    variables = metric_variables(model)
    parts = row.split([variable.value.numel() for variable in variables])
    for variable, part in zip(variables, parts, strict=True):
        variable.assign(part.view(tuple(variable.shape)).to(variable.value.dtype))


def results_of(model: Any) -> dict[str, float]:
    """Return the results of the metrics, by name."""
    results = keras.tree.map_structure(_number, model.get_metrics_result())
    return {name: value for name, value in results.items() if value is not None}


def _number(value: Any) -> Any:
    tensor = torch.as_tensor(value.value if isinstance(value, keras.Variable) else value)
    return tensor.item() if tensor.numel() == 1 else tensor.tolist()


def require_kept(model: Any) -> None:
    """Refuse a model, or what it was compiled with, that cannot be trained on several workers as it is on one.

    Raises:
        JobError: there is an active ``keras.distribution``.
        ModelError: it is no Keras model, or was compiled with what cannot be kept; says what to do.
    """
    if not (isinstance(model, Trainer) and isinstance(model, keras.Layer)):  # keras.Model is both
        raise ModelError(f"unisono.keras.Model needs a Keras model, got {type(model).__name__}")
    if keras.distribution.distribution() is not None:
        raise JobError(refused("keras.distribution"))
    if stateful := [layer.name for layer in model._flatten_layers() if getattr(layer, "stateful", False)]:
        raise ModelError(refused("keras.stateful", layer=stateful[0]))
    if not model.compiled:
        return
    if model.jit_compile:
        raise ModelError("compile(jit_compile=True): compiled steps have other bits; leave it out, or say False")
    if model.steps_per_execution != 1:
        raise ModelError(f"compile(steps_per_execution={model.steps_per_execution}): each step is one update; use 1")
    if wholly := [variable.path for variable in model.trainable_variables if variable.dtype == "float16"]:
        raise ModelError(refused("keras.float16", variable=wholly[0]))


def scales_loss(model: Any) -> bool:
    """Whether Keras would scale the loss of a model, or will when it is compiled."""
    if model.compiled:
        return isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    return is_half(model)


def is_half(model: Any) -> bool:
    """Whether layers compute in float16, by Keras' own policy."""
    return bool(model.dtype_policy.name == "mixed_float16")


def own_optimizer(model: Any) -> Any:
    """The optimizer that updates, without one around it that scales the loss."""
    return getattr(model.optimizer, "inner_optimizer", model.optimizer)


def require_number(model: Any) -> None:
    """Refuse losses that are no number, unless the model makes one of them by itself.

    Raises:
        ModelError: there is one; names its reduction.
    """
    if has_own(model, "train_step", "compute_loss"):
        return
    for loss in keras.tree.flatten(model.loss):
        if getattr(loss, "reduction", "mean") in (None, "none"):
            raise ModelError(refused("keras.loss-no-number", loss=loss.name, reduction=loss.reduction))


def has_own(model: Any, *names: str) -> bool:
    """Whether a model's class has one of these methods of its own, and not Keras'."""
    return any(getattr(type(model), name) is not getattr(keras.Model, name) for name in names)


def optimizers_of(model: Any) -> Iterator[Any]:
    """The optimizers that a model's own code can reach as its attributes, each once."""
    seen: set[int] = set()
    for value in [model.optimizer, *vars(model).values()]:
        several = value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else [value]
        for optimizer in several:
            if isinstance(optimizer, keras.optimizers.Optimizer) and id(optimizer) not in seen:
                seen.add(id(optimizer))
                yield optimizer
