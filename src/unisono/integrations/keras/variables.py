"""The variables of a Keras model, and how what shards make of them is combined."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import torch
from keras.src.random.seed_generator import global_seed_generator
from torch import Tensor

from unisono.errors import ModelError
from unisono.integrations.refused import refused

LARGEST_SEED = 2**31 - 1


def shared_state(model: Any) -> dict[str, Any]:
    """The variables that shards change, as ``run.prepare(state=…)`` takes them.

    Moving statistics end as the mean over shards, metrics as their sum; seeds are set before each shard.

    Args:
        model: the model, built.

    Raises:
        ModelError: a metric does not begin with zeros, so what shards add to it cannot be added up.
    """
    kept: dict[int, tuple[str, Any, str]] = {}
    for variable in moving_statistics(model):
        rule = "mean" if variable.value.is_floating_point() else "first"
        kept.setdefault(id(variable), (f"statistic {variable.path}", variable, rule))
    for variable in seeds_of(model):
        kept.setdefault(id(variable), (f"seed {variable.path}", variable, "first"))
    for variable in metric_variables(model):
        kept.setdefault(id(variable), (f"metric {variable.path}", variable, "sum"))
    return {
        f"{name} {number}": (variable, {"_value": rule}) for number, (name, variable, rule) in enumerate(kept.values())
    }


def is_built(model: Any) -> bool:
    """Whether the model, its optimizer, its losses and its metrics have all their variables."""
    parts = (model.optimizer, model._compile_loss, model._compile_metrics) if model.compiled else ()
    return all(part.built for part in (*model._flatten_layers(), *parts) if part is not None)


def moving_statistics(model: Any) -> list[Any]:
    """The variables of layers that no optimizer trains; not those that are frozen for a while."""
    return [variable for layer in model._flatten_layers() for variable in layer._non_trainable_variables]


def seeds_of(model: Any) -> list[Any]:
    """The states of the model's seed generators, and of the global one, from which callbacks may draw."""
    own = (one.state for layer in model._flatten_layers() for one in getattr(layer, "_seed_generators", ()))
    return [*own, global_seed_generator().state]


def metric_variables(model: Any) -> list[Any]:
    """The variables of all metrics, each once, in their order."""
    found = {id(variable): variable for metric in model.metrics for variable in metric.variables}
    return list(found.values())


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
    """What layers change in here is put back, and seeds are drawn: each worker does a part of an evaluation."""
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
    """The inverse of :func:`flat_metrics`."""
    variables = metric_variables(model)
    parts = row.split([variable.value.numel() for variable in variables])
    for variable, part in zip(variables, parts, strict=True):
        variable.assign(part.view(tuple(variable.shape)).to(variable.value.dtype))


def results_of(model: Any) -> dict[str, float]:
    """What the metrics come to, by name."""
    found = keras.tree.map_structure(_number, model.get_metrics_result())
    return {name: value for name, value in found.items() if value is not None}


def _number(value: Any) -> Any:
    return torch.as_tensor(value.value if isinstance(value, keras.Variable) else value).tolist()
