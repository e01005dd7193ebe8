"""The steps of a module that optimizes by itself: its training step runs again for each backward pass in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.data.generators import Generators
from unisono.errors import LossError, ModelError
from unisono.integrations.kept import put
from unisono.integrations.kit import in_words_of, refused
from unisono.integrations.lightning.framework import call, extract_batch_size, part
from unisono.integrations.lightning.logged import recording
from unisono.integrations.lightning.training import HARDLY, Training
from unisono.train.script_state import HeldGradients, SpareTurn, StepBuffers, StepWeights
from unisono.train.step.loss import Weighted

_manual: Any = part("loops.optimization.manual")


def _has_output(returned: Any) -> bool:
    """Whether a training step has returned anything; Lightning refuses what it cannot be."""
    return bool(_manual.ManualResult.from_training_step_output(returned).asdict())


class _Enough(BaseException):
    """What follows in the training step counts in another pass."""


class ManualLoop(_manual._ManualOptimization):  # type: ignore[misc]  # Lightning is not looked into by mypy
    """Lightning's loop of one batch, whose training step runs for each shard, and counts updates once."""

    steps: ManualSteps

    def advance(self, kwargs: Any) -> None:
        """Compute the step that is under way."""
        train = partial(call._call_strategy_hook, self.trainer, "training_step", *kwargs.values())
        loss = self.steps.compute(train)
        self.trainer.strategy.post_training_step()
        self._output = {} if loss is None else {"loss": loss}

    def _on_before_step(self) -> None:
        """Wait until it is known whether the step acts."""

    def _on_after_step(self) -> None:
        if self.steps.acts:
            super()._on_before_step()
            super()._on_after_step()


class ManualSteps:
    """Computes the steps of a module whose ``training_step`` goes backward and updates by itself.

    A backward pass is a call of ``step.run``. In pass p, the training step runs for each shard up to its end, and gives
    the loss of its backward pass of number p; then once more, with the mean gradient, and what it does behind that
    backward pass acts. Backward passes and updates before that are not made again: weights are set to what they were.

    Attributes:
        acts: whether what the training step does now acts.
        held: the gradients that no optimizer has used.
    """

    def __init__(self, training: Training) -> None:
        self.acts, self.held = False, HeldGradients()
        self._training, self._run, self._trainer = training, training.run, training.trainer
        self._weights, self._buffers = StepWeights(), StepBuffers()
        self._pass, self._backwards, self._expected, self._has_more = 0, 0, 0, False
        self._drawn: Generators | None = None  # with which the update of a step begins, alike on all workers
        self._loss: Tensor | None = None
        self._returned = False
        self._spare: SpareTurn | None = None
        self._used = set[int]()

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that are trained."""
        return [*self._run.inside.trained.require_prepared().parameters.values()]

    def compute(self, train: Callable[[], Any]) -> Tensor | None:
        """Compute the step that is under way, by the module's training step of the present shard.

        Return the mean of what it goes backward from last; None if the training step returns nothing.
        """
        training, step = self._training, self._training.step
        assert step is not None, "Lightning has asked for the step's batch"
        training.batch.require_unchanged()
        training.pruning.refresh()
        self._drawn = Generators.capture()
        self._weights.begin()
        with in_words_of("lightning"), training.metrics.of_step(training.tell_of_result):
            self._buffers.begin(self._run.inside.trained.require_prepared().buffers)
            self._pass = 0
            while True:
                self._has_more = False
                loss = step.run(lambda _, batch: self._shard(train, batch), update=lambda: self._update(train))
                said = training.kept.settle()
                if step.is_skipped or not self._has_more:
                    break
                self._pass += 1
                self._buffers.restore()
        self._expected = max(self._expected, self._pass + 1)
        named = training.without_loss(said)
        training.log_all(step, training.take(said), named)
        return torch.tensor(loss, device=self._run.device) if self._returned else None

    # -- what the training step does ---------------------------------------------------------------------------

    def backward(self, loss: Tensor) -> Tensor:
        """A backward pass of the training step."""
        number, self._backwards = self._backwards, self._backwards + 1
        if number > self._pass:
            self._has_more = True
            if self._spare is not None or self.acts:
                raise _Enough
        elif number == self._pass:
            if not self.held.hide(self.parameters):
                raise LossError(refused("lightning.gradients-before"))
            if self._pass:
                self.held.recall()  # it was shown nothing
            if self._spare is None:
                self._loss = loss
            else:
                self._begin_to_act()
        return loss

    def step_of(self, closure: Callable[[], Any], make: Callable[[Callable[[], Any]], Any]) -> Any:
        """A step of an optimizer, as Lightning has it: ``make`` makes it, and calls the closure it is given."""
        if self.acts:
            return make(closure)
        result = closure()  # which may go backward
        if self.acts:
            return make(lambda: result)
        self._repeat()
        return result

    def _raw_step(self, optimizer: Optimizer, make: Callable[..., Any], closure: Any = None) -> Any:
        if not self.acts and closure is not None:
            closure()
            closure = None
        if not self.acts:
            self._repeat()
            return
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        keeps = self._expected != 1 or len(self._trainer.optimizers) > 1
        act = make if closure is None else partial(make, closure)
        self._weights.change(act, self._pass, own, self.parameters if keeps else ())
        self._used.update(map(id, own))

    def _repeat(self) -> None:
        if 0 < self._backwards <= self._pass:
            self._weights.repeat(self._backwards - 1)

    # -- passes ------------------------------------------------------------------------------------------------

    def _shard(self, train: Callable[[], Any], batch: Any) -> Any:
        """Run the training step of a shard; nothing in it acts."""
        training, trainer = self._training, self._trainer
        shard, notes = training.begin(batch), len(training.kept.notes)
        with (
            self._training_step(),
            training.kept.of_shard(),
            recording(trainer, trainer.fit_loop.epoch_loop) as recorded,
        ):
            _has_output(train())
            if self._backwards <= self._pass + 1:
                training.log(recorded.calls)
                if self._loss is None:
                    training.fill(recorded.calls)
        training.shard = None
        if self._backwards > self._pass + 1:
            del training.kept.notes[notes:]  # they come again
        if self._loss is None:
            return Weighted(0 * self.parameters[0].sum(), HARDLY * extract_batch_size(shard))
        return self._loss

    def _update(self, train: Callable[[], Any]) -> None:
        """Run the training step once more, and have act what it does behind the backward pass that counts."""
        training, trainer = self._training, self._trainer
        training.kept.put_back()
        training.begin(self._some_batch())
        notes = len(training.kept.notes)
        spare = self._spare = SpareTurn(self._run.inside.trained.require_prepared().buffers, self.parameters)
        wants = [(parameter, parameter.requires_grad) for parameter in trainer.lightning_module.parameters()]
        self._used.clear()
        try:
            with self._training_step(), training.kept.of_shard(), recording(trainer, trainer.fit_loop.epoch_loop):
                with suppress(_Enough):
                    self._returned = _has_output(train())  # here, since a worker may have no shard
                has_acted = self.acts
        finally:
            self.acts, self._spare, training.shard = False, None, None
            for parameter, want in wants:  # it may have left between toggle_optimizer and untoggle_optimizer
                parameter.requires_grad = want
        if has_acted:
            self._drawn = Generators.capture()
            spare.end_buffers()
            self.held.keep(self.parameters, self._used)
        else:  # the step has no backward pass
            spare.end()
            assert self._drawn is not None, "a step has begun"
            self._drawn.restore()
        del training.kept.notes[notes:]
        training.kept.put_back()
        if not self._weights.is_kept and self._has_more:
            raise ModelError(refused("lightning.other-backwards"))
        if self._has_more:
            self._weights.settle(self._pass)

    def _begin_to_act(self) -> None:
        assert self._spare is not None
        assert self._training.step is not None
        assert self._drawn is not None
        self._drawn.restore()  # the forward pass of another batch may have drawn more
        self._spare.end()
        self._spare, self.acts = None, True
        self.held.add()
        loss = torch.tensor(self._training.step.loss, device=self._run.device)
        for hook, values in (("on_before_backward", (loss,)), ("on_after_backward", ())):
            call._call_callback_hooks(self._trainer, hook, *values)
            call._call_lightning_module_hook(self._trainer, hook, *values)

    @contextmanager
    def _training_step(self) -> Iterator[None]:
        """The module's training step runs in the context, from the weights with which the step began."""
        if self._pass:
            self._weights.rewind()
            self.held.recall()
        else:
            self.held.show()
        self._backwards, self._loss = 0, None
        with ExitStack() as stack:
            for optimizer in self._trainer.optimizers:
                make = optimizer.step
                stack.enter_context(put(optimizer, "step", partial(self._raw_step, optimizer, make)))
            for config in self._trainer.lr_scheduler_configs:
                stack.enter_context(put(config.scheduler, "step", partial(self._schedule, config.scheduler.step)))
            yield

    def _schedule(self, make: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return make(*arguments, **options) if self.acts else None

    def _some_batch(self) -> Any:
        """A batch for the training step that updates: this worker's first shard, or another one."""
        step, source = self._training.step, self._run.inside.loop.body.source
        assert step is not None, "a step is under way"
        assert source is not None, "a step comes from a loop"
        own = next((batch for batch in step.shards if batch is not None), None)
        if own is not None:
            return own
        with_samples = (number for number in range(step.batch.shards) if len(step.batch.shard(number)))
        (batch,) = source.of(step.batch, [next(with_samples)])
        return batch
