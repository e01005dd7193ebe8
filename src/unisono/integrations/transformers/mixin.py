"""A ``Trainer`` whose training, evaluation and prediction are distributed among the workers of a run."""

from __future__ import annotations

import copyreg
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainingArguments
from transformers.optimization import GreedyLR
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import seed_worker

from unisono.data.generators import generators_kept
from unisono.errors import DataError, JobError
from unisono.integrations.kept import BatchTrace, are_same, evaluate, put, register
from unisono.integrations.kit import Grouped, like, refused, run_for, take_scaling
from unisono.integrations.transformers.trainer_steps import KeptState, MainWorker, TrainerSteps
from unisono.train.group.workers import Workers
from unisono.train.run import Run

# Evaluation and prediction, put together by the trainer's own loop.

Outcome = tuple[int, Any, Any, Any, Any]
"""The outcome of a batch: its number of samples, loss, logits, labels, and inputs where metrics ask for them."""


def main_input_of(trainer: Any) -> str:
    """The name of the input that stands for a sample."""
    return str(getattr(trainer.model, "main_input_name", "input_ids"))


def predict_batch(
    trainer: Any, model: Any, loss_only: bool, ignored: Sequence[str] | None, _: Any, inputs: Any
) -> Outcome:
    """Return the outcome of the trainer's ``prediction_step`` on a batch.

    Logits are preprocessed for metrics here, as that makes them small.
    """
    main = inputs[main_input_of(trainer)] if "inputs" in trainer.args.include_for_metrics else None
    rows = int(find_batch_size(inputs) or 0)
    loss, logits, labels = trainer.prediction_step(model, inputs, loss_only, ignore_keys=ignored)
    if logits is not None and trainer.preprocess_logits_for_metrics is not None:
        logits = trainer.preprocess_logits_for_metrics(logits, labels)
    return rows, loss, logits, labels, main


class Predicted:
    """The predictions of all workers, batch by batch, for the trainer's own evaluation loop.

    Args:
        main_input: the name of the input that stands for a sample.
    """

    def __init__(self, outcomes: Sequence[Outcome], loader: DataLoader[Any], main_input: str) -> None:
        self._outcomes, self._main_input = outcomes, main_input
        self.dataset = loader.dataset
        self._at = 0  # the number of the present batch

    def __len__(self) -> int:
        return len(self._outcomes)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """As many samples as each batch has, and the inputs where they are asked for."""
        for number, (rows, *_, inputs) in enumerate(self._outcomes):
            self._at = number
            yield {self._main_input: torch.empty(rows) if inputs is None else inputs}

    def prediction_step(self, *_: Any, **__: Any) -> tuple[Any, Any, Any]:
        """Return the outcome of the present batch."""
        outcome = self._outcomes[self._at]
        return outcome[1], outcome[2], outcome[3]

    def gathered(self, rows: Any, **_: Any) -> Any:
        """No more rows than the batch has samples: a loss is repeated for each."""
        if isinstance(rows, Tensor):
            return rows[: self._outcomes[self._at][0]]
        if isinstance(rows, dict):
            return type(rows)({name: self.gathered(part) for name, part in rows.items()})
        return type(rows)(self.gathered(part) for part in rows) if isinstance(rows, list | tuple) else rows


class _OnWorker:
    """The training arguments that a run decides. Transformers sees one process: the run has the others."""

    _run: Run
    _kind: type

    @property
    def process_index(self) -> int:
        """The worker's rank, by which Transformers decides who saves: 0 for one at a time, also after a loss."""
        return self._run.rank

    local_process_index = process_index

    world_size = 1  # as far as Transformers is concerned

    @property
    def n_gpu(self) -> int:
        """Return 1: each worker has one device, without torch's DataParallel."""
        return min(1, int(self._run.device.type != "cpu"))

    @property
    def device(self) -> torch.device:
        return self._run.device

    def __reduce_ex__(self, protocol: Any) -> Any:
        # In files they are as they were, for readers without Unisono.
        return copyreg._reconstructor, (self._kind, object, None), self.__dict__  # type: ignore[attr-defined]


def host(args: Any, run: Run) -> None:
    """Have training arguments ask the run who this worker is. They stay the script's own object.

    Their class derives from ``TrainingArguments``.
    """
    kind = getattr(args, "_kind", type(args))
    args.__class__ = type(kind.__name__, (_OnWorker, kind), {"_run": run, "_kind": kind, "__module__": kind.__module__})


def require_arguments(args: Any) -> None:
    """Refuse arguments by which a training could not be distributed, or would have other bits on other workers.

    Raises:
        JobError: one of them; says what to do.
    """
    state = getattr(args, "distributed_state", None)
    if state is not None and state.num_processes > 1:
        raise JobError(refused("transformers.process-group", count=state.num_processes))
    for setting, cure in _refused(args):
        raise JobError(f"{setting}: {cure}")


_SHARES = "Unisono distributes the work itself, and every worker has the whole model: leave it out"
_ROUNDS = "it rounds the weights for good; use bf16=True or fp16=True instead"
_REFUSED = {
    **dict.fromkeys(("deepspeed", "fsdp", "parallelism_config"), _SHARES),
    **dict.fromkeys(("fp16_full_eval", "bf16_full_eval"), _ROUNDS),
    "torch_compile": "compiled steps have bits that depend on the machine's compiler; leave it out",
    "auto_find_batch_size": "the batch is part of the job; unisono batch-size finds the largest",
    "enable_jit_checkpoint": "a run checkpoints by itself when it is asked to leave; leave it out",
    "batch_eval_metrics": "metrics are computed on all rows in order; leave it out",
}
"""Arguments that are to be left out, and why."""


def _refused(args: Any) -> Iterator[tuple[str, str]]:
    for name, cure in _REFUSED.items():
        if value := getattr(args, name, None):
            yield f"{name}=True" if value is True else name, cure
    if getattr(args, "train_sampling_strategy", None) == "batch_rebalance":
        yield "train_sampling_strategy='batch_rebalance'", "it distributes batches by ranks; use 'group_by_length'"
    name = str(getattr(args.optim, "value", args.optim))
    if "lomo" in name or "layerwise" in name:
        yield f"optim={name!r}", "it updates weights in the middle of the backward pass; use another one"


if TYPE_CHECKING:
    from transformers import Trainer as Extended
else:
    Extended = object


def read_by_run(loader: Any, accumulated: int = 1) -> DataLoader[Any]:
    """A plain loader of the same batches, or of those of several accumulated.

    The loader is the trainer's, or a script's in its place; prepared by accelerate or not. ``accumulated`` of its
    batches are one of the result's.

    Raises:
        DataError: it makes no batches.
    """
    batches, size = getattr(loader, "batch_sampler", None), loader.batch_size
    is_stream = isinstance(loader.dataset, IterableDataset)
    if size is None if is_stream else batches is None:
        raise DataError("the loader makes no batches (batch_size=None): give it per_device_train_batch_size")
    first = loader.worker_init_fn
    # Transformers' own would seed by the worker's rank; the run seeds each sample.
    is_theirs = isinstance(first, partial) and first.func is seed_worker
    seeded = {"worker_init_fn": None if is_theirs else first}
    if is_stream:
        return like(loader, batch_size=size * accumulated, drop_last=loader.drop_last, **seeded)
    return like(loader, batch_sampler=batches if accumulated == 1 else Grouped(batches, accumulated), **seeded)


MOST_EPOCHS = 2**31 - 1
"""Epochs of a stream, whose training ends with its steps."""

WAITING = (torch.optim.lr_scheduler.ReduceLROnPlateau, GreedyLR)
"""Schedulers that are told a metric."""


class TrainerMixin(Extended):  # type: ignore[misc]  # optional: it may be missing
    """Has a Transformers ``Trainer`` train on all workers of a run, to the same bits on any number of them.

    It stands before the trainer: ``class MyTrainer(unisono.transformers.TrainerMixin, Trainer)``. Arguments are those
    of the trainer; a global batch has ``per_device_train_batch_size * gradient_accumulation_steps`` samples, on however
    many workers.

    Args:
        run: the run, from ``unisono.init``; by default the one that is open, or a new one, which is finished when the
            script ends well. That has the arguments' seed, and as many shards as gradients are accumulated over; if
            over none, the batch decides how many of 8 have samples.

    Attributes:
        run: the run.

    Raises:
        JobError: what cannot be kept; says what to do.
    """

    run: Run
    control: Any

    def __init__(self, *values: Any, run: Run | None = None, **options: Any) -> None:
        args = options.get("args", values[1] if len(values) > 1 else None)
        if args is None:
            args = options["args"] = TrainingArguments(output_dir="tmp_trainer")
        require_arguments(args)
        self.run = run_for(type(self).__name__, run, {}, _settings(args))
        host(args, self.run)
        super().__init__(*values, **options)
        self.callback_handler.callbacks.insert(0, MainWorker(self.run, self.callback_handler))
        self._kept = KeptState(self, self.run)
        register(self.run, "transformers", self._kept)
        self._training: TrainerSteps | None = None
        self._is_over = False  # the training, where this worker enters it
        self._training_parts: tuple[Any, Any] = None, None
        self._prepared_for: list[Any] = []

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator. Each epoch's order follows from the seed of the arguments, whatever was drawn."""
        super().create_accelerator_and_postprocess()
        take_scaling(self.accelerator, self.run, "fp16=True")
        config = self.accelerator.dataloader_config
        if config.data_seed is None:
            config.data_seed = self.args.seed

    # -- training --------------------------------------------------------------------------------------------

    def train(self, *values: Any, **options: Any) -> Any:
        """Train. A loop that an error has left is over: a script may catch it, and train again."""
        try:
            return super().train(*values, **options)
        finally:
            if self._training is not None:
                self._training.steps.close()

    def set_initial_training_values(self, args: Any, dataloader: Any, *values: Any) -> Any:
        """Note the loader, which the training enters next."""
        initial = super().set_initial_training_values(args, dataloader, *values)
        self._loader = dataloader
        return initial

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: Any,
        trial: Any,
    ) -> tuple[int, int]:
        """Enter the loop where it is to go on, before the trainer's begins there."""
        require_arguments(self.args)
        super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        accumulated, dataset = self.args.gradient_accumulation_steps, self._loader.dataset
        batches = max_steps * accumulated if isinstance(dataset, IterableDataset) else len(self._loader)
        begin = self.state.global_step if not self.args.ignore_data_skip else 0
        self._training_parts = super()._prepare_for_training(max_steps, self._loader, resume_from_checkpoint)
        model, _ = self._training_parts
        self._kept.begin()
        self._prepare(self.optimizer.optimizer)
        steps = self.run.steps(
            read_by_run(self._loader, accumulated),
            min(num_train_epochs, MOST_EPOCHS),
            batch_size=self._train_batch_size * accumulated,
            begin=begin,
        )
        place = self.run.enter()
        waits = isinstance(self.lr_scheduler, WAITING)
        self._training = TrainerSteps(self, self.run, model, steps, batches, waits)
        self._is_over = place.is_over or self.control.should_training_stop
        if self._is_over:
            return num_train_epochs, 0
        return place.epoch, place.batch * accumulated

    def _prepare_for_training(self, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Return the model and loader that were prepared when the loop was entered."""
        return self._training_parts

    def _run_epoch(
        self,
        model: Any,
        epoch: int,
        *,
        trial: Any = None,
        ignore_keys_for_eval: Any = None,
        start_time: float = 0.0,
        **_: Any,
    ) -> None:
        """Train for an epoch, or the rest of it, in steps of the run."""
        training, updated = self._training, None
        assert training is not None, "the loop was entered"
        self._kept.go_on()
        while (step := next(training.steps, None)) is not None:
            if self.control.should_training_stop:  # the step that has said so is compared by now, and right
                return
            self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)
            updated = training.compute(step)
            self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
            rest = model, trial, epoch, ignore_keys_for_eval, start_time
            self._log_save_evaluate(updated, *rest)
            self._require_whole_epochs()
            if not step.is_last_in_epoch and not self.control.should_training_stop:
                continue
            self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
            self._log_save_evaluate(updated, *rest)
            if step.is_last or self.control.should_training_stop:
                # What comes next, if anything does, comes after a fault of a memory that has set the run back.
                self.run.inside.loop.compare_next()
                continue
            if step.epoch >= epoch:
                return
            # A fault of a memory has set the run back by epochs, which come again.
            self.control = self.callback_handler.on_epoch_begin(self.args, self.state, self.control)
        self.control.should_training_stop = True

    def _log_save_evaluate(self, updated: Any, model: Any, trial: Any, epoch: int, ignored: Any, begun: float) -> None:
        grad_norm, learning_rate = updated or (None, None)
        self._maybe_log_save_evaluate(
            self._tr_loss, grad_norm, model, trial, epoch, ignored, begun, learning_rate=learning_rate
        )

    def _require_whole_epochs(self) -> None:
        if self.control.should_epoch_stop:
            raise JobError(refused("transformers.part-of-epoch"))

    def _finalize_training(self, *values: Any, **options: Any) -> Any:
        self._kept.go_on()
        if self._training is not None:
            self._training.steps.close()
        return super()._finalize_training(*values, **options)

    def _prepare(self, optimizer: Any) -> None:
        """Prepare the run for the model and optimizer, unless that was done."""
        parts = [
            self.model,
            optimizer,
            *(parameter for parameter in self.model.parameters() if parameter.requires_grad),
        ]
        if not are_same(parts, self._prepared_for):
            self.run.inside.states.add(trainer=self)
            self.run.prepare(self.model, optimizer, state=self._kept.of_shards.shared_state())
            self._prepared_for = parts

    # -- evaluation ------------------------------------------------------------------------------------------

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> dict[str, float]:
        """Evaluate in the middle of a training; at its start only where it starts."""
        if skip_scheduler:
            if self._is_over or self._kept.has_evaluated or self.state.global_step:
                return {}
            self._kept.has_evaluated = True
        metrics: dict[str, float] = super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)
        return metrics

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: Any = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Run the trainer's own loop over the predictions of all workers: each predicts a part of the batches.

        Where predicting one changes anything that can be reached from the trainer, and where they come from a stream,
        each worker predicts all of them.
        """
        args, accelerator = self.args, self.accelerator
        loss_only = args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        if not self._prepared_for:
            trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            self._prepare(torch.optim.SGD(trained or [torch.zeros((), requires_grad=True)]))  # a frozen model has none
        model = self._wrap_model(self.model, training=False)
        if len(accelerator._models) == 0 and model is self.model:
            model = accelerator.prepare_model(model, evaluation_mode=True)
        predict = partial(predict_batch, self, model, loss_only, ignore_keys)

        def traced(number: int, inputs: Any) -> tuple[bool, Outcome]:
            trace, outcome = BatchTrace(self.run, [self.model]), predict(number, inputs)
            return trace.is_clean(), outcome

        outcomes: list[Outcome] = []
        is_stream = isinstance(getattr(dataloader, "dataset", None), IterableDataset)
        if not (self._kept.keeps_of_batches or is_stream):
            results = evaluate(self.run, lambda evaluation: evaluation.values(traced), read_by_run(dataloader))
            self._kept.keeps_of_batches = not all(is_clean for is_clean, _ in results)
            outcomes = [outcome for _, outcome in results]
        if self._kept.keeps_of_batches or is_stream:
            self.gather_function = accelerator.gather_for_metrics
            with generators_kept():
                return super().evaluation_loop(dataloader, description, loss_only, ignore_keys, metric_key_prefix)
        predicted = Predicted(outcomes, dataloader, main_input_of(self))
        with ExitStack() as stack:
            stack.enter_context(put(self, "prediction_step", predicted.prediction_step))
            stack.enter_context(put(self, "preprocess_logits_for_metrics", None))
            self.gather_function = predicted.gathered
            return super().evaluation_loop(predicted, description, loss_only, ignore_keys, metric_key_prefix)

    # -- keeping ---------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write the trainer's checkpoint on the main worker; the others get a list of what it has written."""
        self.store_flos()

        def save(workers: Workers) -> Any:
            if workers.rank == 0:
                super(TrainerMixin, self)._save_checkpoint(model, trial)
            return workers.broadcast(self.state.best_model_checkpoint)

        self.state.best_model_checkpoint = self.run.together(save)

    def end(self) -> None:
        """Finish the run, which prints the digest of the weights: the script is done."""
        if hasattr(super(), "end"):  # not in older ones
            super().end()
        if not self.run.inside.ending.is_closed:
            self.run.finish(self.model)

    def hyperparameter_search(self, *_: Any, **__: Any) -> Any:
        """Refused: trials are jobs of their own.

        Raises:
            JobError: always; says what to do.
        """
        raise JobError("hyperparameter_search: each trial is a job of its own; start one run for each")


def _settings(args: Any) -> dict[str, Any]:
    accumulated = args.gradient_accumulation_steps
    shards = {"shards": accumulated} if accumulated > 1 else {}  # else the batch decides how many have samples
    is_half = args.fp16 or getattr(args, "mixed_precision", "no") == "fp16"
    return {"seed": args.seed, **shards, **({"arithmetic.precision": "fp16"} if is_half else {})}
