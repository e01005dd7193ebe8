"""The steps of a ``fit``: shards run the module's own ``training_step``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from unisono.integrations.kit import in_words_of, refused, scale_of
from unisono.integrations.lightning.framework import call, extract_batch_size, is_overridden, part
from unisono.integrations.lightning.logged import PREFIX, LogCall, LogKind, log_result, recording
from unisono.integrations.lightning.metrics import Metrics
from unisono.integrations.lightning.pruning import Pruning
from unisono.integrations.shard_state import ShardState
from unisono.train.run import Run
from unisono.train.step.loss import BackwardDone, Weighted
from unisono.train.step.step import Step

_ClosureResult = part("loops.optimization.automatic").ClosureResult


EXTREMES: Mapping[str, Callable[[float, float], float]] = {"min": min, "max": max}

NO_LOSS = ""
"""What a shard says, beside what it has logged, whose training step returned None."""

HARDLY = 1e-30
"""The weight of a sample without a loss beside those that have one: sums are the same bits without it."""


@dataclass
class Training:
    """Computes the steps of one ``fit``.

    Attributes:
        kept: what training steps keep in the module's attributes.
        pruning: the prunings of the trainer.
        kinds: what training steps log, in the order in which they first did.
        accumulated: the sums of gradients, where several batches make one update.
        is_spoiled: whether the gradient of one of these batches was not finite, so that they make none.
        batch: what stands for the global batch in hooks.
        manual: what computes the steps of a module that optimizes by itself; None for others.
        left_out: the number of the newest epoch whose rest was left out; -1 without one.
    """

    run: Run
    trainer: Any
    metrics: Metrics
    kept: ShardState
    pruning: Pruning
    step: Step | None = None
    shard: Any = None
    kinds: dict[str, LogKind] = field(default_factory=dict)
    accumulated: list[Tensor | None] = field(default_factory=list)
    is_spoiled: bool = False
    batch: Any = None
    manual: Any = None
    left_out: int = -1
    _loss: Tensor | None = None
    _zero_grad: tuple[Callable[[], Any], list[Tensor | None]] | None = None

    def compute(self, closure: Any, update: Callable[[Callable[[], Any]], Any]) -> Any:
        """Compute the step that is under way, and update the weights when it is time.

        ``closure`` is Lightning's, of a batch: training step, and all around it. ``update`` clips and makes the
        optimizer's step, given a closure. Return the mean loss over the global batch.
        """
        assert self.step is not None, "Lightning has asked for the step's batch"
        if (zero_grad := getattr(closure, "_zero_grad_fn", None)) is not None:
            closure._zero_grad_fn = None  # called once for each step, and not for each shard
            self._zero_grad = zero_grad, [parameter.grad for parameter in self._trained()]
        step = self.step
        self.batch.require_unchanged()
        self.pruning.refresh()
        with in_words_of("lightning"), self.metrics.of_step(self.tell_of_result):
            loss = step.run(lambda _, batch: self._shard(closure, batch), update=lambda: self._update(update))
        self._clear_gradients()  # of a step that has no update
        said = self.kept.settle()
        named = self.without_loss(said)
        extremes = self.take(said)
        if step.is_skipped:
            self.accumulated, self.is_spoiled = [], self.trainer.fit_loop._should_accumulate()
        mean = torch.tensor(loss, device=self.run.device)
        closure._result = _ClosureResult(mean if named is None else None)
        self.log_all(step, extremes, named)
        return mean if named is None else None

    def tell_of_result(self, metric: str) -> None:
        """Tell that a training step asks a metric for its result, which is that of a shard."""
        words, cure = refused("lightning.computed", name=metric), f"Log the metric itself: self.log(…, self.{metric})"
        self.run.inside.states.tell(f"{metric}.compute", words, cure, breaks=False)

    def training_step(self, train: Callable[..., Any], *values: Any) -> Any:
        """Run the module's training step on the shard, in place of the global batch."""
        _, *others = values
        return train(self.shard, *others)

    def backward(self, loss: Tensor, *values: Any, **options: Any) -> Tensor:
        """Keep the loss of the shard: the run goes backward. A module that has a ``backward`` of its own does so."""
        self._loss = loss
        if self._has_own_backward:
            self.trainer.lightning_module.backward(loss * scale_of(self.run), *values, **options)
        return loss

    @property
    def _has_own_backward(self) -> bool:
        return bool(is_overridden("backward", self.trainer.lightning_module))

    def begin(self, batch: Any) -> Any:
        """Begin a shard: move it to the device. Return it."""
        self.shard, self._loss = self.trainer.strategy.shard_to_device(batch), None
        return self.shard

    def _shard(self, closure: Callable[[], Any], batch: Any) -> Any:
        trainer = self.trainer
        shard = self.begin(batch)
        try:
            with self.kept.of_shard(), recording(trainer, trainer.fit_loop.epoch_loop) as recorded:
                loss = closure()
                self.log(recorded.calls)
                if self._loss is None and not self._only_measures:
                    self.fill(recorded.calls)
        finally:
            self.shard = None
        if self._only_measures:
            return loss.detach() + 0 * next(parameter for parameter in self._trained() if parameter.requires_grad).sum()
        if self._loss is None:
            first = next(parameter for parameter in self._trained() if parameter.requires_grad)
            return Weighted(0 * first.sum(), HARDLY * extract_batch_size(shard))
        return BackwardDone(self._loss.detach(), scale=scale_of(self.run)) if self._has_own_backward else self._loss

    def log(self, calls: list[LogCall]) -> None:
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

    def fill(self, calls: list[LogCall]) -> None:
        """Log, in a shard without a loss, what others may log: all log the same names, and this one hardly counts."""
        logged = {f"{log_call.kind.fx}.{log_call.kind.name}" for log_call in calls}
        self.kept.say([NO_LOSS, sorted(logged), None])
        for key, kind in self.kinds.items():
            if key not in logged and not kind.attribute and kind.reduce not in EXTREMES:
                for name in (kind.name, *([f"{kind.name} samples"] if kind.has_size else [])):
                    self.run.log(f"{PREFIX}{name}", 0.0)

    def without_loss(self, said: Sequence[Any]) -> set[str] | None:
        """The values that were logged in a step in which no shard has a loss; None if one has."""
        assert self.step is not None
        batch, rows = self.step.batch, [names for key, names, _ in said if key == NO_LOSS]
        if len(rows) < sum(len(batch.shard(number)) > 0 for number in range(batch.shards)):
            return None
        return {name for names in rows for name in names}

    def take(self, said: Sequence[Any]) -> dict[str, float]:
        """Note the kinds of values that shards have said, of any worker; return the extremes of this step by kind."""
        extremes = dict[str, float]()
        for key, kind, value in said:
            if key == NO_LOSS:
                continue
            known = self.kinds.setdefault(key, LogKind(**kind))
            if value is not None:
                extremes[key] = EXTREMES[known.reduce](value, extremes.get(key, value))
        return extremes

    def log_all(self, step: Step, extremes: Mapping[str, float], named: Collection[str] | None) -> None:
        """Log as Lightning's results what is of the global batch: means, sums, and the extremes of its shards.

        ``named`` are the only ones that count in a step without a loss; None for all.
        """
        module = self.trainer.lightning_module
        for key, kind in self.kinds.items():
            if kind.attribute:
                log_result(self.trainer, kind, module.get_submodule(kind.attribute), step.size)
            elif key in extremes:
                log_result(self.trainer, kind, extremes[key], step.size)
            elif named is not None and key not in named:
                continue
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
        self._clear_gradients()
        parameters = self._trained()
        is_without = self.without_loss(self.kept.said()) is not None
        if self._only_measures or is_without:
            for parameter in parameters:
                parameter.grad = None
        if self.accumulated:
            self._add(parameters)
        loss = torch.tensor(self.step.loss, device=self.run.device)

        def gone_backward() -> Tensor:
            for hook, values in (("on_before_backward", (loss,)), ("on_after_backward", ())):
                call._call_callback_hooks(self.trainer, hook, *values)
                call._call_lightning_module_hook(self.trainer, hook, *values)
            return loss

        if self.trainer.fit_loop._should_accumulate():
            if not (is_without or self._only_measures):
                gone_backward()
            self.accumulated = [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters]
            return
        self.accumulated = []
        if self.is_spoiled:
            self.is_spoiled = False
            return
        update((lambda: None) if is_without else gone_backward)

    def _clear_gradients(self) -> None:
        """Have Lightning clear the gradients that the step before has left, behind the training step as it does."""
        if self._zero_grad is None:
            return
        (zero_grad, before), self._zero_grad, parameters = self._zero_grad, None, self._trained()
        present = [parameter.grad for parameter in parameters]
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = None if gradient is parameter.grad else gradient
        zero_grad()
        self.accumulated, self.is_spoiled = [], False  # of batches before those of an epoch that were left out
        for parameter, gradient in zip(parameters, present, strict=True):
            parameter.grad = gradient

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
