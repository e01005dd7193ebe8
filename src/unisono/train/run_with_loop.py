"""The part of a run with which a script keeps its own training loop."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from unisono.data.feed import Options
from unisono.errors import JobError
from unisono.received import short
from unisono.train.config.numerics import autocast
from unisono.train.loop.prefetch import to_device
from unisono.train.record.metrics_line import metric
from unisono.train.run_on_devices import RunOnDevices
from unisono.train.script_loop import ScriptLoop, refused
from unisono.train.script_parts import ScriptLoader, TurnBatches, guard_optimizer, guard_scheduler, is_scheduler
from unisono.train.step.step import Step


class RunWithLoop(RunOnDevices):
    """A run over whose loaders a script iterates by itself.

    The body of a loop over a prepared loader runs once for each shard that this worker has of a global batch, and again
    for each further backward pass in it. Behind the backward pass of the last shard the gradients are the mean over all
    shards of all workers: there optimizers, schedulers, clipping, ``run.print`` and ``run.log`` act.
    """

    _loop: ScriptLoop | None = None
    _epochs: _Epochs | None = None

    # -- what loops are made of ------------------------------------------------------------------------------

    def _prepare_one(self, thing: Any) -> Any:
        """Get a loader or a scheduler ready for a loop of the script's own."""
        if isinstance(thing, ScriptLoader):
            return thing
        is_loader, registry = isinstance(thing, DataLoader), self.inside.trained.registry
        if not (is_loader or is_scheduler(thing)):
            raise JobError(
                f"run.prepare takes a model and an optimizer, or lists of them, then data loaders and schedulers, and "
                f"also got {type(thing).__name__}: data sets go to run.steps"
            )
        if (loop := self._loop) is None:
            loop = self._loop = ScriptLoop(self.inside, "run", partial(autocast, self.job, self.device))
            registry.add("unisono loop", loop)
        if not is_loader:
            guard_scheduler(thing, loop)
            names = (f"unisono scheduler {number}" for number in range(len(registry.objects) + 1))
            registry.add(next(name for name in names if name not in registry.objects), thing)
            return thing
        if self.inside.membership.workers.devices.count > 1:
            raise JobError(refused("run", "several-devices"))
        for optimizer in self.inside.trained.require_prepared().optimizers:
            guard_optimizer(optimizer, loop, partial(self._is_elsewhere, loop))
        return ScriptLoader(thing, partial(self._read, loop))

    def _is_elsewhere(self, loop: ScriptLoop) -> bool:
        inside = self.inside
        return inside.ending.is_closed or (loop.is_outside and inside.steps.under_way is not None)

    def _read(self, loop: ScriptLoop, loader: ScriptLoader) -> Iterator[Any]:
        modules = self.inside.trained.require_prepared().modules
        if not (any(module.training for module in modules) and torch.is_grad_enabled()):
            return (to_device(batch, self.device) for batch in loader.base)
        if self._epochs is not None:
            steps = self._epochs.pass_over(loader)
        else:
            steps = self.inside.loop.over(loader.base, 1, Options(), None, None, 0)
        return TurnBatches(loop.of(steps), loop, refused("run", "enumerated"))

    def _require_no_body(self, what: str) -> None:
        """Refuse a call in the body of a loop of the script's own."""
        if self._loop is not None and not self._loop.is_outside:
            raise JobError(refused("run", "in-body", what=what))

    # -- the loop --------------------------------------------------------------------------------------------

    def epochs(self, count: Any, loader: Any) -> Generator[int, None, None]:
        """Yield the numbers of the epochs that are left: ``for epoch in run.epochs(5, loader):``.

        A run that resumes, and a worker that joins, begin with the epoch in which the job is, and with what is left of
        it. Without this, each pass over a loader is a loop of its own, and passes that are over are passed by.

        Args:
            count: the number of passes over the training loader.
            loader: the prepared loader over which the script iterates once in each epoch.

        Raises:
            JobError: the loader is not prepared, there are epochs within epochs, or a pass was left before its end.
        """
        if not isinstance(count, int) or count < 1 or not isinstance(loader, ScriptLoader):
            raise JobError(f"run.epochs({short(count)}, …): {refused('run', 'epochs')}")
        if self._epochs is not None:
            raise JobError(refused("run", "two-loops"))
        steps = self.inside.loop.over(loader.base, count, Options(), None, None, 0)
        place = self.inside.loop.enter_next()
        epochs = self._epochs = _Epochs(loader, steps, place.epoch, is_over=place.is_over)
        try:
            while epochs.is_left(count):
                yield epochs.number
        finally:
            self._epochs = None
            steps.close()

    def enumerate(self, loader: Any, start: int = 0) -> Generator[tuple[int, Any], None, None]:
        """Yield the number of the batch in its epoch with each batch of a loader, in all turns of a step the same.

        Python's own ``enumerate`` counts the turns of this worker's loop, which has one for each of its shards.
        """
        number = -1  # counted by hand, or the loader would tell that it is enumerated
        for batch in loader:
            number += 1
            step = None if self._loop is None or self._loop.is_outside else self._loop.step
            yield start + (number if step is None else self.inside.loop.batches_before(step)), batch

    def backward(self, loss: Tensor, weight: Any = None) -> None:
        """Go backward from a shard's loss, the mean over its samples. Waits for the others behind the last shard.

        ``loss.backward()`` is the same in the loop's body.

        Args:
            loss: the loss, a tensor with one element.
            weight: the number of samples or tokens that it is the mean of, if these are not the shard's samples.

        Raises:
            JobError: outside of a training loop over a prepared loader.
            LossError: the loss is no scalar, NaN or infinite; names step, shard and rank.
        """
        if self._loop is None:
            raise JobError(refused("run", "backward-outside"))
        self._loop.backward(loss, weight)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Limit the norm of the mean gradient where it is there; else return 0. torch's own does as well.

        Args:
            parameters: a module, or parameters.
            max_norm: the largest norm.
            norm_type: the type of the norm, as torch knows it.

        Returns:
            the norm of the mean gradient before.
        """
        if self._loop is not None and self._loop.updates:
            return torch.nn.utils.clip_grad_norm_(_parameters(parameters), max_norm, norm_type)
        return torch.zeros((), device=self.device)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Limit each value of the mean gradient where it is there. ``parameters`` are a module, or parameters."""
        if self._loop is not None and self._loop.updates:
            torch.nn.utils.clip_grad_value_(_parameters(parameters), clip_value)

    @property
    def sync_gradients(self) -> bool:
        """Whether what a loop's body does now counts for the step as a whole: the mean gradient is there, or was."""
        return self._loop is None or self._loop.asked()

    @property
    def mean_loss(self) -> float:
        """The newest step's mean loss over its global batch in a loop of the script's own, on all workers the same."""
        return float("nan") if self._loop is None else self._loop.loss

    def print(self, *values: Any, **options: Any) -> None:
        """Print on the main worker alone; in the body of a loop of the script's own once for each step."""
        if self._loop is None or self._loop.is_last:
            super().print(*values, **options)

    def log(self, name: str, value: Any) -> None:
        """Log a metric.

        Inside of a loss function, or before the backward pass in the body of a loop, the value is the mean over the
        shard's samples, and the mean over the global batch is written, weighted like the loss. While the run evaluates
        or predicts, nothing is written: use metrics there. Elsewhere, the value is a number of the run as a whole.

        Args:
            name: any name that ``metrics.jsonl`` does not use for itself.
            value: a number, or a tensor with one element.

        Raises:
            JobError: the name is taken, or the value is no number.
        """
        number, inside, loop = metric(name, value), self.inside, self._loop
        if inside.evaluator.is_under_way or inside.states.is_trying or (loop is not None and loop.is_at_rest):
            return
        if not inside.steps.computer.log(name, number) and (loop is None or loop.is_last):
            inside.metrics.write(name, float(number))


class _Epochs:
    """The epochs of a loop, each of which is a pass over its loader.

    Attributes:
        number: the number of the epoch that the script is in.
    """

    def __init__(self, loader: ScriptLoader, steps: Generator[Step, None, None], number: int, *, is_over: bool) -> None:
        self.number, self._loader, self._steps = number, loader, steps
        self._is_begun, self._is_over, self._ahead = False, is_over, list[Step]()
        self._newest: Step | None = None
        self._has_ended = False

    def is_left(self, count: int) -> bool:
        """Go on to the next epoch. Return whether there is one.

        Raises:
            JobError: the script has left the pass before its end, or has not begun it.
        """
        if self._has_ended:  # in the middle of an epoch: a policy or the person who started the job has cut it short
            return False
        if not self._is_over and self._is_begun:
            if self._newest is None or not self._newest.is_last_in_epoch:
                raise JobError(refused("run", "left-in-an-epoch", epoch=self.number))
            self.number = self._newest.epoch + 1
        self._is_begun = True
        if self._is_over or self.number >= count:
            # The end: all workers compare their state, and a fault of a memory may set the run back.
            self._ahead = [step for step in [next(self._steps, None)] if step is not None]
            if not self._ahead:
                return False
            self._is_over, self.number = False, self._ahead[0].epoch
        return True

    def pass_over(self, loader: ScriptLoader) -> Generator[Step, None, None]:
        """The steps of the present epoch."""
        if loader is not self._loader:
            raise JobError(refused("run", "two-loops"))
        self._newest = None
        while (step := self._ahead.pop() if self._ahead else next(self._steps, None)) is not None:
            yield step
            self._newest = step
            if step.is_last_in_epoch:
                return
        self._has_ended = True


def _parameters(parameters: Any) -> Any:
    return parameters.parameters() if isinstance(parameters, nn.Module) else parameters
