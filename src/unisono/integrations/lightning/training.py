"""The steps of a ``fit``: shards run the module's own ``training_step``, and their metrics are combined."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MeanMetric, Metric, MetricCollection

from unisono.errors import LossError, ModelError
from unisono.integrations.kept import put
from unisono.integrations.kit import in_words_of, refused, scale_of
from unisono.integrations.lightning.framework import call, extract_batch_size, is_overridden, part
from unisono.integrations.lightning.logged import PREFIX, LogCall, LogKind, log_result, recording
from unisono.integrations.shard_state import ShardState
from unisono.integrations.torchmetrics import RULES
from unisono.train.run import Run
from unisono.train.step.loss import BackwardDone
from unisono.train.step.step import Step

_ClosureResult = part("loops.optimization.automatic").ClosureResult


# The torchmetrics metrics of a module: what shards and evaluated batches make of them is combined.


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


# The steps.

EXTREMES: Mapping[str, Callable[[float, float], float]] = {"min": min, "max": max}


@dataclass
class Training:
    """Computes the steps of one ``fit``.

    Attributes:
        kept: what training steps keep in the module's attributes.
        kinds: what training steps log, in the order in which they first did.
        accumulated: the sums of gradients, where several batches make one update.
        is_spoiled: whether the gradient of one of these batches was not finite, so that they make none.
    """

    run: Run
    trainer: Any
    metrics: Metrics
    kept: ShardState
    step: Step | None = None
    shard: Any = None
    kinds: dict[str, LogKind] = field(default_factory=dict)
    accumulated: list[Tensor | None] = field(default_factory=list)
    is_spoiled: bool = False
    _loss: Tensor | None = None

    def compute(self, closure: Any, update: Callable[[Callable[[], Any]], Any]) -> Any:
        """Compute the step that is under way, and update the weights when it is time.

        ``closure`` is Lightning's, of a batch: training step, and all around it. ``update`` clips and makes the
        optimizer's step, given a closure. Return the mean loss over the global batch.
        """
        assert self.step is not None, "Lightning has asked for the step's batch"
        if (zero_grad := getattr(closure, "_zero_grad_fn", None)) is not None:
            zero_grad()  # once for each step, and not for each shard
            closure._zero_grad_fn = None
        step = self.step
        with in_words_of("lightning"), self.metrics.of_step(self._tell_of_result):
            loss = step.run(lambda _, batch: self._shard(closure, batch), update=lambda: self._update(update))
        extremes = self._take(self.kept.settle())
        if step.is_skipped:
            self.accumulated, self.is_spoiled = [], self.trainer.fit_loop._should_accumulate()
        mean = torch.tensor(loss, device=self.run.device)
        closure._result = _ClosureResult(mean)
        self._log_all(step, extremes)
        return mean

    def _tell_of_result(self, metric: str) -> None:
        words, cure = refused("lightning.computed", name=metric), f"Log the metric itself: self.log(…, self.{metric})"
        self.run.inside.states.tell(f"{metric}.compute", words, cure, breaks=False)

    def training_step(self, train: Callable[..., Any], *values: Any) -> Any:
        """Run the module's training step on the shard, in place of the global batch."""
        _, *others = values
        returned = train(self.shard, *others)
        if returned is None:
            raise LossError(refused("lightning.no-loss"))
        return returned

    def backward(self, loss: Tensor, *values: Any, **options: Any) -> Tensor:
        """Keep the loss of the shard: the run goes backward. A module that has a ``backward`` of its own does so."""
        self._loss = loss
        if self._has_own_backward:
            self.trainer.lightning_module.backward(loss * scale_of(self.run), *values, **options)
        return loss

    @property
    def _has_own_backward(self) -> bool:
        return bool(is_overridden("backward", self.trainer.lightning_module))

    def _shard(self, closure: Callable[[], Any], batch: Any) -> Any:
        trainer = self.trainer
        self.shard, self._loss = trainer.strategy.shard_to_device(batch), None
        try:
            with self.kept.of_shard(), recording(trainer, trainer.fit_loop.epoch_loop) as recorded:
                loss = closure()
                self._log(recorded.calls)
        finally:
            self.shard = None
        if self._only_measures:
            return loss.detach() + 0 * next(parameter for parameter in self._trained() if parameter.requires_grad).sum()
        assert self._loss is not None, "the closure goes backward"
        return BackwardDone(self._loss.detach(), scale=scale_of(self.run)) if self._has_own_backward else self._loss

    def _log(self, calls: list[LogCall]) -> None:
        """Log the values of the shard, so that the run combines them."""
        assert self.step is not None
        for log_call in calls:
            kind, value = log_call.kind, log_call.value
            key = f"{kind.fx}.{kind.name}"
            if kind.reduce in EXTREMES or key not in self.kinds:  # others may have no samples, and log all the same
                self.kept.say([key, asdict(kind), value if kind.reduce in EXTREMES else None])
            if value is None or kind.reduce in EXTREMES:
                continue
            samples = extract_batch_size(self.shard)
            if kind.reduce == "sum":
                value *= self.step.size / samples
            if kind.has_size:
                size = (log_call.batch_size or 0) * self.step.size / samples
                self.run.log(f"{PREFIX}{kind.name} samples", size)
                value *= size
            self.run.log(f"{PREFIX}{kind.name}", value)

    def _take(self, said: Sequence[Any]) -> dict[str, float]:
        """Note the kinds of values that shards have said, of any worker; return the extremes of this step by kind."""
        extremes = dict[str, float]()
        for key, kind, value in said:
            known = self.kinds.setdefault(key, LogKind(**kind))
            if value is not None:
                extremes[key] = EXTREMES[known.reduce](value, extremes.get(key, value))
        return extremes

    def _log_all(self, step: Step, extremes: Mapping[str, float]) -> None:
        """Log as Lightning's results what is of the global batch: means, sums, and the extremes of its shards."""
        module = self.trainer.lightning_module
        for key, kind in self.kinds.items():
            if kind.attribute:
                log_result(self.trainer, kind, module.get_submodule(kind.attribute), step.size)
            elif key in extremes:
                log_result(self.trainer, kind, extremes[key], step.size)
            elif (value := step.metrics.get(f"{PREFIX}{kind.name}")) is not None:
                size = float(step.size)
                if kind.has_size:
                    size = step.metrics[f"{PREFIX}{kind.name} samples"]
                    value = value / size if size else value
                log_result(self.trainer, kind, value, round(size))

    def _update(self, update: Callable[[Callable[[], Any]], Any]) -> None:
        """Update the weights with the mean gradient; or add it to what other batches have left."""
        assert self.step is not None
        self.kept.put_back()  # hooks around the update find it as the step began
        parameters = self._trained()
        if self._only_measures:
            for parameter in parameters:
                parameter.grad = None
        if self.accumulated:
            self._add(parameters)
        if self.trainer.fit_loop._should_accumulate():
            self.accumulated = [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters]
            return
        self.accumulated = []
        if self.is_spoiled:
            self.is_spoiled = False
            return
        loss = torch.tensor(self.step.loss, device=self.run.device)

        def gone_backward() -> Tensor:
            for hook, values in (("on_before_backward", (loss,)), ("on_after_backward", ())):
                call._call_callback_hooks(self.trainer, hook, *values)
                call._call_lightning_module_hook(self.trainer, hook, *values)
            return loss

        update(gone_backward)

    @property
    def _only_measures(self) -> bool:
        """Whether StochasticWeightAveraging goes through the batches for BatchNorm's statistics alone."""
        return bool(self.trainer.fit_loop._skip_backward)

    def _trained(self) -> list[Tensor]:
        return [parameter for group in self.trainer.optimizers[0].param_groups for parameter in group["params"]]

    @torch.no_grad()
    def _add(self, parameters: list[Tensor]) -> None:
        for parameter, earlier in zip(parameters, self.accumulated, strict=True):
            if earlier is not None:
                parameter.grad = earlier.clone() if parameter.grad is None else parameter.grad.add_(earlier)
