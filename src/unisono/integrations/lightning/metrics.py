"""The torchmetrics metrics of a module: what shards and evaluated batches make of them is combined."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from unisono.errors import ModelError
from unisono.integrations.torchmetrics import RULES


@dataclass
class BatchStates:
    """The states that metrics have after one batch.

    Attributes:
        states: the states by name of the metric and of the state, with the newest value of the metric.
        is_shared: whether all of them can be combined.
    """

    states: dict[str, Any] = field(default_factory=dict)
    is_shared: bool = True


class Metrics:
    """The metrics of a module.

    Args:
        module: the LightningModule.

    Attributes:
        by_name: the metrics by their names in the module.
        trained: names of the metrics that training steps update.
    """

    def __init__(self, module: Any) -> None:
        for one in module.modules():
            if isinstance(one, MetricCollection):
                _part(one)
        self.by_name = {name: one for name, one in module.named_modules() if isinstance(one, Metric)}
        self.trained: set[str] = set()

    def shared_state(self) -> dict[str, Any]:
        """What shards change of them, as ``run.prepare(state=…)`` takes it."""
        return {
            f"metric {name}": (metric, {key: RULES[metric._reductions[key]] for key in metric._defaults})
            for name, metric in self.by_name.items()
            if metric._defaults and _is_shared(metric)
        }

    @contextmanager
    def of_step(self) -> Iterator[None]:
        """In here shards are computed, and their states combined; afterwards metrics hold what they held, and that."""
        before = {name: (_states(one), one._update_count) for name, one in self.by_name.items() if _is_shared(one)}
        for name in before:
            _clear(self.by_name[name])
        counts = {name: one._update_count for name, one in self.by_name.items()}
        yield
        for name, metric in self.by_name.items():
            if metric._update_count != counts[name]:
                self.trained.add(name)
            if name in self.trained and name not in before:
                raise ModelError(_unshared(name, metric))
        for name, (states, count) in before.items():
            self._merge(name, states, count)

    @contextmanager
    def of_batch(self) -> Iterator[BatchStates]:
        """In here one batch is evaluated; afterwards metrics hold what they held.

        Yields:
            what has come of the batch, once that is over.
        """
        before = {name: (_states(one), one._update_count) for name, one in self.by_name.items()}
        for metric in self.by_name.values():
            _clear(metric)
        made = BatchStates()
        try:
            yield made
        finally:
            for name, (states, count) in before.items():
                metric = self.by_name[name]
                if metric._update_count != count:
                    made.is_shared &= _is_shared(metric)
                    made.states[name] = [_states(metric), _plain(metric._forward_cache)]
                for key, value in states.items():
                    setattr(metric, key, value)
                metric._update_count, metric._computed = count, None

    def add(self, made: Mapping[str, Any]) -> None:
        """Add what a batch has made of metrics to what they hold."""
        for name, (states, newest) in made.items():
            metric = self.by_name[name]
            held = _states(metric)
            for key, value in states.items():
                setattr(metric, key, value)
            metric._forward_cache, metric._computed = newest, None
            metric._update_count += 1
            metric._reduce_states(held)

    def _merge(self, name: str, states: Mapping[str, Any], count: int) -> None:
        metric = self.by_name[name]
        metric._computed = None
        if name not in self.trained:
            metric._update_count = count
            for key, value in states.items():
                setattr(metric, key, value)
            return
        metric._update_count = 1
        metric._forward_cache = _value(metric)
        metric._computed = None
        metric._update_count = count + 1
        metric._reduce_states(dict(states))


def _part(collection: MetricCollection) -> None:
    """Have metrics of a collection keep states of their own: shards change each of them."""
    if collection._groups_checked:
        collection._compute_groups_create_state_ref(copy=True)
    collection._enable_compute_groups = collection._groups_checked = False
    collection._groups = {number: [str(name)] for number, name in enumerate(collection.keys(keep_base=True))}


def _is_shared(metric: Metric) -> bool:
    """Whether all states of a metric can be combined, beginning from what a reset leaves."""
    for key, default in metric._defaults.items():
        rule = RULES.get(metric._reductions[key])
        is_list = isinstance(default, list)
        if rule is None or is_list != (rule == "cat") or (rule == "sum" and bool(torch.count_nonzero(default))):
            return False
    return True


def _unshared(name: str, metric: Metric) -> str:
    return (
        f"the metric {name} ({type(metric).__name__}) is updated in training_step, and what shards make of its state "
        f"cannot be combined: its states need dist_reduce_fx (sum, mean, max, min, or cat of a list), and sums begin "
        f"with zeros. Update it in validation_step, where each batch is whole, or keep sums in it and derive the rest "
        f"in compute()"
    )


def _states(metric: Metric) -> dict[str, Any]:
    return {
        key: list(value) if isinstance(value := getattr(metric, key), list) else value.detach().clone()
        for key in metric._defaults
    }


def _clear(metric: Metric) -> None:
    for key, default in metric._defaults.items():
        setattr(metric, key, [] if isinstance(default, list) else default.detach().clone().to(metric.device))


def _value(metric: Metric) -> Any:
    try:
        return metric.compute()
    except (RuntimeError, ValueError):  # of a step without samples that count
        return None


def _plain(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else None
