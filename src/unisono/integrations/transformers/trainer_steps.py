"""One training: the steps of a run as a ``Trainer``'s loop takes them."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any

import torch

from unisono.integrations.transformers.shard_loss import Counts, ShardLoss
from unisono.train.run import Run
from unisono.train.step.step import Step


@dataclass(frozen=True)
class Updated:
    """What an update has told.

    Attributes:
        grad_norm: the norm of the gradient before it was clipped.
        learning_rate: the learning rate that it was made with.
    """

    grad_norm: Any
    learning_rate: float


@dataclass(frozen=True)
class TrainerSteps:
    """A training that is under way.

    Attributes:
        trainer: the trainer.
        run: the run.
        model: the model, as the trainer has prepared it.
        steps: the steps that are left.
        batches: the number of the loader's batches in an epoch.
        waits_for_metrics: whether the scheduler waits for metrics.
    """

    trainer: Any
    run: Run
    model: Any
    steps: Generator[Step, None, None]
    batches: int
    waits_for_metrics: bool

    def compute(self, step: Step) -> Updated | None:
        """Compute a step, and update the weights.

        Returns:
            what the update told; None if the step was skipped.
        """
        trainer = self.trainer
        counts = Counts.of(trainer, step, self.run)
        loss = step.run(
            ShardLoss.of(trainer, self.model, counts, step.batch), update=partial(self._update, step, counts)
        )
        updated: Updated | None = step.returned
        if step.is_skipped:  # it counts all the same, and the scheduler waits
            self._count(step, counts)
        if step.is_skipped or updated is not None:
            trainer.optimizer._is_overflow = step.is_skipped
            self._note(torch.tensor(loss, device=trainer.args.device))
        return updated

    def _update(self, step: Step, counts: Counts) -> Updated:
        """Clip, step the optimizer and the scheduler, and count: as the trainer does behind its last batch."""
        trainer = self.trainer
        handler, args = trainer.callback_handler, trainer.args
        trainer.accelerator.gradient_state._set_sync_gradients(True)
        grad_norm = trainer._clip_grad_norm(self.model) if args.max_grad_norm > 0 else None
        grad_norm = trainer._get_grad_norm(self.model, grad_norm=grad_norm)
        trainer.control = handler.on_pre_optimizer_step(args, trainer.state, trainer.control)
        trainer.optimizer.step()
        trainer.control = handler.on_optimizer_step(args, trainer.state, trainer.control)
        learning_rate = trainer._get_learning_rate()
        if not self.waits_for_metrics:
            trainer.lr_scheduler.step()
        self._count(step, counts)
        return Updated(grad_norm, learning_rate)

    def _count(self, step: Step, counts: Counts) -> None:
        trainer = self.trainer
        trainer.current_flos += float(counts.operations)
        trainer.state.num_input_tokens_seen += counts.tokens
        trainer.state.global_step += 1
        trainer.state.epoch = step.epoch + self._share_of_epoch(step)

    def _share_of_epoch(self, step: Step) -> float:
        if step.is_last_in_epoch:
            return 1.0
        over: int = ceil(step.batch.stop / self.trainer._train_batch_size)
        return min(over, self.batches) / self.batches

    def _note(self, loss: torch.Tensor) -> None:
        trainer = self.trainer
        if trainer.args.logging_nan_inf_filter and not torch.isfinite(loss):
            loss = trainer._tr_loss / (trainer.state.global_step - trainer._globalstep_last_logged)
        trainer._tr_loss += loss
