"""The torchmetrics metrics of a module: what shards and evaluated batches make of them is combined."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MeanMetric, Metric, MetricCollection

from unisono.errors import ModelError
from unisono.integrations.kept import put
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

    Attributes:
        trained: names of the metrics that training steps update.
    """

    def __init__(self, module: Any) -> None:
        for child in module.modules():
            if isinstance(child, MetricCollection):
                _part(child)
        self.by_name = {
            name: child
            for name, child in module.named_modules()
            if isinstance(child, Metric) and vars(child).keys() >= child._defaults.keys()  # wrappers show another's
        }
        self.trained: set[str] = set()

    def shared_state(self) -> dict[str, Any]:
        """The state that shards change, as ``run.prepare(state=…)`` takes it."""
        shared = {name: metric for name, metric in self.by_name.items() if metric._defaults and _is_shared(metric)}
        for metric in shared.values():
            for key, state in _states(metric).items():  # some wrappers begin with one tensor in several places
                setattr(metric, key, state)
        return {
            f"metric {name}": (metric, {key: RULES[metric._reductions[key]] for key in metric._defaults})
            for name, metric in shared.items()
        }

    @contextmanager
    def of_step(self, tell: Callable[[str], None]) -> Iterator[None]:
        """Compute shards in the context, and combine their states; metrics then hold these beside their old states.

        ``tell`` gets the name of a metric that a shard asks for its result.
        """
        before = {
            name: (_states(metric), metric._update_count) for name, metric in self.by_name.items() if _is_shared(metric)
        }
        for name in before:
            _clear(self.by_name[name])
        counts = {name: metric._update_count for name, metric in self.by_name.items()}
        others = {name: _others(metric) for name, metric in self.by_name.items()}
        with ExitStack() as stack:
            for name in before:
                stack.enter_context(
                    put(self.by_name[name], "compute", _telling(self.by_name[name], partial(tell, name)))
                )
            yield
        for name, metric in self.by_name.items():
            if _others(metric) != others[name]:
                raise ModelError(_unshared(name, metric))
            if metric._update_count != counts[name] or (name in before and _is_touched(metric)):
                self.trained.add(name)  # by a shard of this worker, or of another one
            if name in self.trained and name not in before:
                raise ModelError(_unshared(name, metric))
        for name, (states, count) in before.items():
            self._merge(name, states, count)

    @contextmanager
    def of_batch(self) -> Iterator[BatchStates]:
        """Evaluate a batch in the context; afterwards metrics hold their old states.

        Yields:
            the states that the batch has made, once the context is over.
        """
        before = {name: (_states(metric), metric._update_count) for name, metric in self.by_name.items()}
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
        """Add the states that a batch has made to those of the metrics."""
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
    """Whether all states of a metric can be combined, beginning from the state after a reset."""
    for key, default in metric._defaults.items():
        rule = RULES.get(metric._reductions[key])
        is_list = isinstance(default, list)
        if rule is None or is_list != (rule == "cat") or (rule == "sum" and bool(torch.count_nonzero(default))):
            return False
    return True


def _telling(metric: Metric, tell: Callable[[], None]) -> Callable[[], Any]:
    """The metric's ``compute``, which tells that it is called by itself, and not for the value of a batch."""
    usual = metric.compute

    def compute() -> Any:
        if metric._should_unsync:
            tell()
        return usual()

    return compute


_OF_ALL = frozenset(vars(MeanMetric()))


def _others(metric: Metric) -> dict[str, Any]:
    """The numbers of a metric that are no states, and that other metrics have not: what a window goes by, say."""
    return {name: value for name, value in vars(metric).items() if type(value) in (int, float) and name not in _OF_ALL}


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


def _is_touched(metric: Metric) -> bool:
    """Whether a metric that was cleared has another state now."""
    for key, default in metric._defaults.items():
        value = getattr(metric, key)
        if bool(value) if isinstance(default, list) else not torch.equal(value, default.to(value.device)):
            return True
    return False


def _value(metric: Metric) -> Any:
    try:
        return metric.compute()
    except (RuntimeError, ValueError):  # of a step without samples that count
        return None


def _plain(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else None
