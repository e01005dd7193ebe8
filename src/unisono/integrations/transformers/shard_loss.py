"""The loss of one shard, by the trainer's own ``training_step``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.trainer_pt_utils import find_batch_size

from unisono.errors import LossError
from unisono.integrations.attributes import put
from unisono.plan.batches import Batch
from unisono.train.group.workers import Workers
from unisono.train.run import Run
from unisono.train.step.loss import BackwardDone
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

        is_counted, items, operations, tokens = run.together(summed)
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

    A trainer adds up what ``training_step`` goes backward from, over all batches of an update: each is a share of the
    whole. A run takes the mean over shards, so a shard's loss is its share, times the number of shards. Shares that are
    means over samples are weighted by their samples.

    Attributes:
        trainer: the trainer.
        model: the model, as the trainer has prepared it.
        items: the number of labels that count in the global batch, as ``training_step`` gets it; or None.
        sizes: the number of samples in each shard of the global batch; 0 for an empty one.
    """

    trainer: Any
    model: Any
    items: Any
    sizes: Sequence[int]

    @classmethod
    def of(cls, trainer: Any, model: Any, counts: Counts, batch: Batch) -> ShardLoss:
        """The loss of a global batch's shards."""
        items = None if counts.items is None else torch.tensor(counts.items, device=trainer.args.device) / 1
        return cls(trainer, model, items, [len(batch.shard(number)) for number in range(batch.shards)])

    def __call__(self, _: Any, inputs: Any) -> Any:
        """Compute the shard's loss; the run goes backward from it, unless ``training_step`` has.

        Raises:
            LossError: ``training_step`` returned no loss.
        """
        trainer, held = self.trainer, list[Tensor]()
        shards = sum(size > 0 for size in self.sizes)
        trainer.current_gradient_accumulation_steps = shards
        with put(trainer.accelerator, "backward", lambda loss, **_: held.append(loss)):
            told = trainer.training_step(self.model, inputs, self.items)
        weight = 1.0 if self._is_share_of_items else find_batch_size(inputs) / max(self.sizes)
        if held:
            loss = held[0] if len(held) == 1 else torch.stack(held).sum()
            return loss * shards, weight
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
