"""One training: the steps of a run as a ``Trainer``'s loop takes them."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor
from transformers.trainer_pt_utils import find_batch_size

from unisono.errors import LossError
from unisono.integrations.kept_attributes import put
from unisono.plan.batches import Batch
from unisono.train.group.workers import Workers
from unisono.train.run import Run
from unisono.train.step.loss import BackwardDone, Weighted
from unisono.train.step.step import Step


@dataclass(frozen=True)
class Counts:
    """What all shards of a global batch hold together.

    Attributes:
        items: the number of labels that count, as the trainer counts them; None if it does not.
        operations: the number of floating-point operations.
        tokens: the number of tokens that the trainer keeps count of.
    """

    items: int | None
    operations: int
    tokens: int

    @classmethod
    def of(cls, trainer: Any, step: Step, run: Run) -> Counts:
        """Count what this worker's shards hold, and add up what the others' do. Collective.

        Args:
            trainer: the trainer.
            step: the step that is about to be computed.
            run: the run.
        """

        def summed(workers: Workers) -> list[int]:  # again if a worker is lost, whose shards this one may have then
            mine = _counted(trainer, [one for one in step.shards if one is not None])
            found: list[int] = workers.all_reduce(torch.tensor(mine), "sum").tolist()
            return found

        run.inside.synchronisation.before_call()
        is_counted, items, operations, tokens = run.inside.collectives.together(summed)  # nothing in it draws
        return cls(items if is_counted else None, operations, tokens)


def _counted(trainer: Any, shards: Sequence[Any]) -> list[int]:
    _, items = trainer.get_batch_samples(iter(shards), len(shards), trainer.args.device)
    operations = sum(int(trainer.floating_point_ops(one)) for one in shards)
    before = trainer.state.num_input_tokens_seen
    for one in shards:
        trainer._track_num_input_tokens(one)
    tokens, trainer.state.num_input_tokens_seen = trainer.state.num_input_tokens_seen - before, before
    return [int(items is not None), int(items or 0), operations, int(tokens)]


@dataclass(frozen=True)
class ShardLoss:
    """A loss function that runs ``training_step`` on a shard.

    Where shards are the batches over which the trainer accumulates gradients, each gets what it gets there: a share of
    the whole, of which the trainer takes the sum. A run takes the mean over shards, so a shard's loss is its share,
    times the number of shards. Where shards are other slices of the global batch, each has its own mean, which is
    weighted by its labels or samples.

    Attributes:
        trainer: the trainer.
        model: the model, as the trainer has prepared it.
        items: the number of labels that count in the global batch, as ``training_step`` gets it; or None.
        sizes: the number of samples in each shard of the global batch; 0 for an empty one.
        are_batches: whether the shards are the trainer's batches.
    """

    trainer: Any
    model: Any
    items: Any
    sizes: Sequence[int]
    are_batches: bool

    @classmethod
    def of(cls, trainer: Any, model: Any, counts: Counts, batch: Batch) -> ShardLoss:
        """The loss of a global batch's shards."""
        items = None if counts.items is None else torch.tensor(counts.items, device=trainer.args.device) / 1
        sizes = [len(batch.shard(number)) for number in range(batch.shards)]
        return cls(trainer, model, items, sizes, batch.shards == trainer.args.gradient_accumulation_steps)

    def __call__(self, _: Any, inputs: Any) -> Any:
        """Compute the shard's loss; the run goes backward from it, unless ``training_step`` has.

        Raises:
            LossError: ``training_step`` returned no loss.
        """
        rows = find_batch_size(inputs)
        if self.are_batches:
            shards = sum(size > 0 for size in self.sizes)
            weight = 1.0 if self._is_share_of_items else rows / max(self.sizes)
            return self._computed(inputs, self.items, shards, weight)
        _, items = self.trainer.get_batch_samples(iter([inputs]), 1, self.trainer.args.device)
        return self._computed(
            inputs, items if items is None else items.clamp(min=1), 1, rows if items is None else items
        )

    def _computed(self, inputs: Any, items: Any, shards: int, weight: Any) -> Any:
        trainer, held = self.trainer, list[Tensor]()
        trainer.current_gradient_accumulation_steps = shards
        with put(trainer.accelerator, "backward", lambda loss, **_: held.append(loss)):
            told = trainer.training_step(self.model, inputs, items)
        if held:
            loss = held[0] if len(held) == 1 else torch.stack(held).sum()
            return Weighted(loss * shards, weight)
        if not isinstance(told, Tensor):
            raise LossError(f"training_step returned a {type(told).__name__}: return the loss, as Trainer's own does")
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(shards)
        return BackwardDone(told * shards, weight)

    @property
    def _is_share_of_items(self) -> bool:
        """Whether the trainer takes the loss as it is, instead of dividing it by the number of batches."""
        said = getattr(self.trainer, "loss_is_scaled_for_ga", None)
        if said is not None:
            return bool(said)
        counts = self.trainer.model_accepts_loss_kwargs and self.items is not None
        return counts or self.trainer.compute_loss_func is not None


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
