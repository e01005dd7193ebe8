"""Metrics of torchmetrics as further state of a run: exact over all samples, on any number of workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum

from unisono.errors import ModelError
from unisono.integrations.kit import refused

RULES = {dim_zero_sum: "sum", dim_zero_mean: "mean", dim_zero_max: "max", dim_zero_min: "min", dim_zero_cat: "cat"}
"""The rule by which a run combines shards' states of a metric, by torchmetrics' reduction of it."""


def state_of(metrics: nn.Module, name: str = "metrics") -> dict[str, Any]:
    """The states of metrics, for ``run.prepare(…, state=…)``: loss functions may then update the metrics.

    The metrics no longer combine themselves over processes, and keep no result: every worker holds the states of all
    samples.

    Args:
        metrics: a metric, or a module with metrics in it, such as a ``MetricCollection`` or a model.
        name: a name for them, in messages and checkpoints.

    Raises:
        ModelError: a metric's state is combined in a way of its own, or metrics share their states.
    """
    by_path = dict(_metrics_in(metrics, name))
    for path, metric in by_path.items():
        metric.sync_on_compute = False
        metric.compute_with_cache = False  # a result that was kept before others' samples came
        for key, combine in metric._reductions.items():
            if combine not in RULES:
                raise ModelError(
                    refused(
                        "torchmetrics.own-way",
                        path=path,
                        kind=type(metric).__name__,
                        state=key,
                        way=getattr(combine, "__name__", combine),
                    )
                )
    return {
        path: (metric, {key: RULES[how] for key, how in metric._reductions.items()}) for path, metric in by_path.items()
    }


def _metrics_in(root: nn.Module, name: str) -> Iterator[tuple[str, Metric]]:
    for path, module in root.named_modules(prefix=name):
        if isinstance(module, MetricCollection) and module._enable_compute_groups:
            raise ModelError(f"{path} shares states between metrics: make it with compute_groups=False")
        if isinstance(module, Metric) and module._reductions:
            yield path, module
