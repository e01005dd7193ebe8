"""The steps of a ``fit``: a global batch is computed in shards, by the module's own ``training_step``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from warnings import warn

import torch
from torch import Tensor

from unisono.errors import LossError, UnisonoWarning
from unisono.integrations.lightning.framework import part
from unisono.integrations.lightning.logged import PREFIX, LogCall, LogKind, heard, tell
from unisono.integrations.lightning.metrics import Metrics
from unisono.integrations.loss_scaler import scale_of
from unisono.integrations.refused import refused
from unisono.train.run import Run
from unisono.train.step.loss import BackwardDone
from unisono.train.step.step import Step

_call = part("trainer.call")
_ClosureResult = part("loops.optimization.automatic").ClosureResult
_is_overridden = part("utilities.model_helpers").is_overridden
_extract_batch_size = part("utilities.data").extract_batch_size


@dataclass
class Training:
    """Computes the steps of one ``fit``.

    Attributes:
        run: the run.
        trainer: the trainer.
        metrics: the module's metrics.
        step: the step that is under way.
        shard: the batch of the shard that is being computed.
        kinds: what training steps log, in the order in which they first did.
        accumulated: the sums of gradients, where several batches make one update.
        is_spoiled: whether the gradient of one of these batches was not finite, so that they make none.
    """

    run: Run
    trainer: Any
    metrics: Metrics
    step: Step | None = None
    shard: Any = None
    kinds: dict[str, LogKind] = field(default_factory=dict)
    accumulated: list[Tensor | None] = field(default_factory=list)
    is_spoiled: bool = False
    _loss: Tensor | None = None
    _has_warned: bool = False

    def compute(self, closure: Any, update: Callable[[Callable[[], Any]], Any]) -> Any:
        """Compute the step that is under way, and update the weights when it is time.

        Args:
            closure: Lightning's closure of a batch: training step, and all around it.
            update: a function that clips and makes the optimizer's step, given a closure.

        Returns:
            the mean loss over the global batch.
        """
        assert self.step is not None, "Lightning has asked for the step's batch"
        if (zero_grad := getattr(closure, "_zero_grad_fn", None)) is not None:
            zero_grad()  # once for each step, and not for each shard
            closure._zero_grad_fn = None
        step = self.step
        with self.metrics.of_step():
            loss = step.run(lambda _, batch: self._shard(closure, batch), update=lambda: self._update(update))
        if step.is_skipped:
            self.accumulated, self.is_spoiled = [], self.trainer.fit_loop._should_accumulate()
        mean = torch.tensor(loss, device=self.run.device)
        closure._result = _ClosureResult(mean)
        self._tell(step)
        return mean

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
        if self._goes_by_itself:
            self.trainer.lightning_module.backward(loss * scale_of(self.run), *values, **options)
        return loss

    @property
    def _goes_by_itself(self) -> bool:
        return bool(_is_overridden("backward", self.trainer.lightning_module))

    def _shard(self, closure: Callable[[], Any], batch: Any) -> Any:
        trainer, kept = self.trainer, self._lengths()
        self.shard, self._loss = trainer.strategy.shard_to_device(batch), None
        try:
            with heard(trainer, trainer.fit_loop.epoch_loop) as ears:
                loss = closure()
            self._log(ears.calls)
        finally:
            self.shard = None
        if kept != self._lengths():
            self._warn_of_kept(kept)
        if self._only_measures:
            return loss.detach() + 0 * next(one for one in self._trained() if one.requires_grad).sum()
        assert self._loss is not None, "the closure goes backward"
        return BackwardDone(self._loss.detach(), scale=scale_of(self.run)) if self._goes_by_itself else self._loss

    def _lengths(self) -> dict[str, int]:
        """The lengths of lists and dicts in the module's attributes, as long as nobody was warned of them."""
        if self._has_warned:
            return {}
        named = vars(self.trainer.lightning_module).items()
        return {name: len(one) for name, one in named if type(one) in (list, dict) and not name.startswith("_")}

    def _warn_of_kept(self, before: dict[str, int]) -> None:
        changed = [f"self.{name}" for name, length in self._lengths().items() if length != before.get(name)]
        self._has_warned = True
        warn(
            f"training_step adds to {', '.join(changed)}: it has one shard of the batch, so each worker keeps another "
            f"part there. Do not decide or log anything by it; self.log and torchmetrics have the whole batch",
            UnisonoWarning,
            stacklevel=2,
        )

    def _log(self, calls: list[LogCall]) -> None:
        """Log what the shard has logged, so that the run combines it."""
        assert self.step is not None
        for call in calls:
            kind, value = call.kind, call.value
            self.kinds.setdefault(f"{kind.fx}.{kind.name}", kind)
            if value is None:
                continue
            samples = _extract_batch_size(self.shard)
            if kind.reduce == "sum":
                value *= self.step.size / samples
            if kind.has_size:
                size = (call.batch_size or 0) * self.step.size / samples
                self.run.log(f"{PREFIX}{kind.name} samples", size)
                value *= size
            self.run.log(f"{PREFIX}{kind.name}", value)

    def _tell(self, step: Step) -> None:
        """Lightning's results hear the means over the global batch."""
        module = self.trainer.lightning_module
        for kind in self.kinds.values():
            if kind.attribute:
                tell(self.trainer, kind, module.get_submodule(kind.attribute), step.size)
            elif (value := step.metrics.get(f"{PREFIX}{kind.name}")) is not None:
                size = float(step.size)
                if kind.has_size:
                    size = step.metrics[f"{PREFIX}{kind.name} samples"]
                    value = value / size if size else value
                tell(self.trainer, kind, value, round(size))

    def _update(self, update: Callable[[Callable[[], Any]], Any]) -> None:
        """Update the weights with the mean gradient; or add it to what other batches have left."""
        assert self.step is not None
        parameters = self._trained()
        if self._only_measures:
            for one in parameters:
                one.grad = None
        if self.accumulated:
            self._add(parameters)
        if self.trainer.fit_loop._should_accumulate():
            self.accumulated = [None if one.grad is None else one.grad.clone() for one in parameters]
            return
        self.accumulated = []
        if self.is_spoiled:
            self.is_spoiled = False
            return
        loss = torch.tensor(self.step.loss, device=self.run.device)

        def gone_backward() -> Tensor:
            for hook, values in (("on_before_backward", (loss,)), ("on_after_backward", ())):
                _call._call_callback_hooks(self.trainer, hook, *values)
                _call._call_lightning_module_hook(self.trainer, hook, *values)
            return loss

        update(gone_backward)

    @property
    def _only_measures(self) -> bool:
        """Whether StochasticWeightAveraging goes through the batches for BatchNorm's statistics alone."""
        return bool(self.trainer.fit_loop._skip_backward)

    def _trained(self) -> list[Tensor]:
        return [one for group in self.trainer.optimizers[0].param_groups for one in group["params"]]

    @torch.no_grad()
    def _add(self, parameters: list[Tensor]) -> None:
        for one, earlier in zip(parameters, self.accumulated, strict=True):
            if earlier is not None:
                one.grad = earlier.clone() if one.grad is None else one.grad.add_(earlier)
