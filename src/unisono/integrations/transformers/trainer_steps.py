"""A training: its state for checkpoints and other workers, and the steps of a run as a ``Trainer`` takes them."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback
from transformers.trainer_pt_utils import find_batch_size

from unisono.data.generators import generators_kept
from unisono.errors import LossError
from unisono.integrations.kept import BatchTrace, KeptAttributes, KeptCallbacks, put
from unisono.integrations.kit import each_twice, in_words_of, is_sum
from unisono.integrations.shard_state import ShardState
from unisono.plan.batches import Batch
from unisono.train.group.workers import Workers
from unisono.train.loop.evaluation import evaluating
from unisono.train.run import Run
from unisono.train.step.loss import BackwardDone, Weighted
from unisono.train.step.step import Step


class MainWorker(TrainerCallback):  # type: ignore[misc]  # optional: it may be missing
    """Comes before all other callbacks, and tells them whether they are on the main worker now.

    Transformers' callbacks that write do so where the state says that this is the main process. One that becomes so in
    the middle of a training hears of its beginning.
    """

    def __init__(self, run: Run, callbacks: Any) -> None:
        self._run, self._callbacks = run, callbacks
        self._has_begun: bool | None = None  # there, on the main worker; None outside of trainings

    def _note_main(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        is_main = self._run.is_main
        state.is_world_process_zero = state.is_local_process_zero = is_main
        if self._has_begun is False and is_main:
            self._has_begun = True
            for writer in writers(self._callbacks.callbacks):
                writer.on_train_begin(args, state, control, **parts)

    on_epoch_begin = on_epoch_end = on_step_begin = on_step_end = on_pre_optimizer_step = on_optimizer_step = _note_main
    on_evaluate = on_predict = on_prediction_step = on_save = on_log = on_push_begin = on_init_end = _note_main

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Note the beginning of a training, before the other callbacks are called."""
        self._has_begun = self._run.is_main
        self._note_main(args, state, control, **parts)

    def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Note the end of the training."""
        self._note_main(args, state, control, **parts)
        self._has_begun = None


def writers(callbacks: Any) -> list[Any]:
    """Those of Transformers' own callbacks that write or show."""
    return [
        callback
        for callback in callbacks
        if type(callback).__module__.startswith("transformers.") and not decides(callback)
    ]


def decides(callback: Any) -> bool:
    """Whether a callback keeps a state that decides something, as far as Transformers knows."""
    return hasattr(callback, "state") or not type(callback).__module__.startswith("transformers.")


OF_THIS_WORKER = ("is_local_process_zero", "is_world_process_zero", "stateful_callbacks")
"""Fields of ``TrainerState`` that say something of this worker, or are made anew when it saves."""

SUMS = ("_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "_initial_num_input_tokens_seen")
"""Numbers that the trainer keeps of a training, besides its state."""


class KeptState:
    """A trainer's state, as checkpoints and other workers get it: counters, history, decisions, scheduler, callbacks.

    Attributes:
        has_evaluated: whether the model was evaluated before the first step.
        keeps_of_batches: whether predicting a batch changes what the trainer keeps, so that each worker predicts all.
        is_sum: whether a loss of the script's own is a sum over samples; None before the first step.
        has_schedulers: whether schedulers are part of it.
        of_shards: what ``training_step`` keeps in the trainer's attributes.
    """

    has_schedulers = True

    def __init__(self, trainer: Any, run: Run) -> None:
        self._trainer = trainer
        self.of_shards = ShardState(run, trainer, "trainer")
        self._callbacks = KeptCallbacks("the trainer", (), "transformers")
        self._awaited: Mapping[str, Any] | None = None
        self._is_under_way = False
        self.has_evaluated = self.keeps_of_batches = False
        self.is_sum: bool | None = None

    def begin(self) -> None:
        """Begin a training, with everything as it was made."""
        self._awaited, self._is_under_way, self.has_evaluated = None, False, False
        callbacks = (
            callback for callback in self._trainer.callback_handler.callbacks if not isinstance(callback, MainWorker)
        )
        kept = (KeptAttributes(callback) for callback in callbacks if decides(callback))
        self._callbacks = KeptCallbacks("the trainer", kept, "transformers")

    def go_on(self) -> None:
        """Go on at the place of the other workers: set again the state that the loop has set up since."""
        state, self._awaited, self._is_under_way = self._awaited, None, True
        if state is not None:
            self._set(state)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state."""
        trainer = self._trainer
        state = {field.name: getattr(trainer.state, field.name) for field in fields(trainer.state)}
        return {
            "state": {name: value for name, value in state.items() if name not in OF_THIS_WORKER},
            "control": dict(vars(trainer.control)),
            "loss": float(getattr(trainer, "_tr_loss", 0.0)),
            "sums": {name: getattr(trainer, name, 0) for name in SUMS},
            "operations": trainer.current_flos,
            "scheduler": None if trainer.lr_scheduler is None else trainer.lr_scheduler.state_dict(),
            "has evaluated": self.has_evaluated,
            "keeps of batches": self.keeps_of_batches,
            "is sum": self.is_sum,
            "of shards": self.of_shards.state(),
            "callbacks": self._callbacks.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set all of it.

        Raises:
            CheckpointError: it was with other callbacks.
        """
        self._callbacks.require_alike(state["callbacks"])
        if not self._is_under_way:
            self._awaited = state
        self._set(state)

    def _set(self, state: Mapping[str, Any]) -> None:
        trainer = self._trainer
        for name, value in state["state"].items():
            setattr(trainer.state, name, value)
        for name, value in state["control"].items():
            setattr(trainer.control, name, value)
        trainer._tr_loss = torch.tensor(state["loss"], device=trainer.args.device)
        for name, value in state["sums"].items():
            setattr(trainer, name, value)
        trainer.current_flos = state["operations"]
        if trainer.lr_scheduler is not None and state["scheduler"] is not None:
            trainer.lr_scheduler.load_state_dict(dict(state["scheduler"]))
        self.has_evaluated, self.keeps_of_batches = state["has evaluated"], state.get("keeps of batches", False)
        self.is_sum = state.get("is sum")
        self.of_shards.load(state.get("of shards", {}))
        self._callbacks.load(state["callbacks"])


@dataclass(frozen=True)
class Counts:
    """The counts of all shards of a global batch together.

    Attributes:
        items: the number of labels that count, as the trainer counts them; None if it does not.
        tokens: the number of tokens that the trainer keeps count of.
    """

    items: int | None
    operations: int
    tokens: int

    @classmethod
    def of(cls, trainer: Any, step: Step, run: Run) -> Counts:
        """Count the samples and tokens of this worker's shards, and add up the counts of all workers. Collective."""

        def summed(workers: Workers) -> list[int]:  # again if a worker is lost, whose shards this one may have then
            mine = _counted(trainer, [shard for shard in step.shards if shard is not None])
            counts: list[int] = workers.all_reduce(torch.tensor(mine), "sum").tolist()
            return counts

        run.inside.synchronisation.before_call()
        is_counted, items, operations, tokens = run.inside.collectives.together(summed)  # nothing in it draws
        return cls(items if is_counted else None, operations, tokens)


def _counted(trainer: Any, shards: Sequence[Any]) -> list[int]:
    _, items = trainer.get_batch_samples(iter(shards), len(shards), trainer.args.device)
    operations = sum(int(trainer.floating_point_ops(shard)) for shard in shards)
    before = trainer.state.num_input_tokens_seen
    for shard in shards:
        trainer._track_num_input_tokens(shard)
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
        items: the number of labels that count in the global batch, as ``training_step`` gets it; or None.
        sizes: the number of samples in each shard of the global batch; 0 for an empty one.
        are_batches: whether the shards are the trainer's batches.
        is_sum: whether the trainer's own loss is a sum over samples.
    """

    trainer: Any
    model: Any
    items: Any
    sizes: Sequence[int]
    are_batches: bool
    is_sum: bool

    @classmethod
    def of(cls, trainer: Any, model: Any, counts: Counts, batch: Batch, *, is_sum: bool) -> ShardLoss:
        """The loss of a global batch's shards."""
        items = None if counts.items is None else torch.tensor(counts.items, device=trainer.args.device) / 1
        sizes = [len(batch.shard(number)) for number in range(batch.shards)]
        return cls(trainer, model, items, sizes, batch.shards == trainer.args.gradient_accumulation_steps, is_sum)

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
        counted = items if items is None else items.clamp(min=1)
        if self.is_sum:
            return self._computed(inputs, counted, 1, rows, sum(self.sizes) / rows)
        return self._computed(inputs, counted, 1, rows if items is None else items)

    def _computed(self, inputs: Any, items: Any, shards: int, weight: Any, factor: float = 1.0) -> Any:
        trainer, held = self.trainer, list[Tensor]()
        trainer.current_gradient_accumulation_steps = shards
        going_backward = put(trainer.accelerator, "backward", lambda loss, **_: held.append(loss))
        with trainer._kept.of_shards.of_shard(), going_backward:
            returned = trainer.training_step(self.model, inputs, items)
        if held:
            loss = held[0] if len(held) == 1 else torch.stack(held).sum()
            return Weighted(loss * (shards * factor), weight)
        if not isinstance(returned, Tensor):
            raise LossError(
                f"training_step returned a {type(returned).__name__}: return the loss, as Trainer's own does"
            )
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(shards * factor)
        return BackwardDone(returned * (shards * factor), weight)

    @property
    def _is_share_of_items(self) -> bool:
        """Whether the trainer takes the loss as it is, instead of dividing it by the number of batches."""
        is_scaled = getattr(self.trainer, "loss_is_scaled_for_ga", None)
        if is_scaled is not None:
            return bool(is_scaled)
        counts = self.trainer.model_accepts_loss_kwargs and self.items is not None
        return counts or self.trainer.compute_loss_func is not None


def sums_over_samples(trainer: Any, run: Run, model: Any, shards: Sequence[Any]) -> bool | None:
    """Whether a loss of the script's own is a sum over samples. Return None without a shard to try it on."""
    if type(trainer).compute_loss is Trainer.compute_loss and trainer.compute_loss_func is None:
        return False
    inputs = next((shard for shard in shards if shard is not None), None)
    if inputs is None:
        return None
    trace = BatchTrace(run, [])
    try:
        with evaluating([model]), torch.no_grad(), generators_kept():
            losses = [float(trainer.compute_loss(model, dict(batch))) for batch in (inputs, each_twice(dict(inputs)))]
    except Exception:  # noqa: BLE001 (the loss may want other inputs: then nobody knows)
        return False
    finally:
        trace.is_clean()
    return is_sum(*losses)


Updated = tuple[Any, float]
"""The figures of an update: the norm of the gradient before it was clipped, and the learning rate of the update."""


@dataclass(frozen=True)
class TrainerSteps:
    """A training that is under way.

    Attributes:
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
        """Compute a step, and update the weights. Return the figures of the update; None if the step was skipped."""
        trainer = self.trainer
        counts = Counts.of(trainer, step, self.run)
        kept = trainer._kept
        if kept.is_sum is None:
            own = sums_over_samples(trainer, self.run, self.model, step.shards)
            known = self.run.together(lambda workers: workers.gather_json(own))
            kept.is_sum = next((answer for answer in known if answer is not None), False)
        shard_loss = ShardLoss.of(trainer, self.model, counts, step.batch, is_sum=kept.is_sum)
        with in_words_of("transformers"):
            loss = step.run(shard_loss, update=partial(self._update, step, counts))
        kept.of_shards.settle()
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
        trainer._kept.of_shards.put_back()  # callbacks find the trainer as the step began
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
        return grad_norm, learning_rate

    def _count(self, step: Step, counts: Counts) -> None:
        trainer = self.trainer
        trainer.current_flos += float(counts.operations)
        trainer.state.num_input_tokens_seen += counts.tokens
        trainer.state.global_step += 1
        trainer.state.epoch = step.epoch + self._share_of_epoch(step)

    def _share_of_epoch(self, step: Step) -> float:
        if step.is_last_in_epoch and not isinstance(self.trainer._loader.dataset, IterableDataset):
            return 1.0
        over: int = ceil(step.batch.stop / self.trainer._train_batch_size)
        return min(over, self.batches) / self.batches

    def _note(self, loss: torch.Tensor) -> None:
        trainer = self.trainer
        if trainer.args.logging_nan_inf_filter and not torch.isfinite(loss):
            loss = trainer._tr_loss / (trainer.state.global_step - trainer._globalstep_last_logged)
        trainer._tr_loss += loss
