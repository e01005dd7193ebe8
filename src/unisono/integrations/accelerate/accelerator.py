"""An ``Accelerator`` whose loaders share their batches out among the workers of a run."""

from __future__ import annotations

import inspect
import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator as Original
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor
from torch.utils.data import DataLoader

from unisono.errors import JobError, ModelError
from unisono.integrations.accelerate.collectives import routed
from unisono.integrations.accelerate.evaluation_loop import EvaluationLoop, Evaluations, from_main, leaves_of, rebuilt
from unisono.integrations.accelerate.gradient_state import StepState
from unisono.integrations.accelerate.loaders import Loader, seeded, size_of, together
from unisono.integrations.accelerate.records import RecordingAccelerator, Saves
from unisono.integrations.kept import are_same, register
from unisono.integrations.kit import follow_rank, in_words_of, refused, run_for, take_scaling
from unisono.train.run import Run
from unisono.train.script_loop import ScriptLoop
from unisono.train.script_parts import TurnBatches

_OTHERS = {
    "deepspeed_plugin": "DeepSpeed",
    "deepspeed_plugins": "DeepSpeed",
    "fsdp_plugin": "FSDP",
    "megatron_lm_plugin": "Megatron-LM",
    "torch_tp_plugin": "tensor parallelism",
    "parallelism_config": "other parallelism",
}
_VARIABLES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "other parallelism",
}


def require_kept(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of accelerate's ``Accelerator`` with which it cannot train on several workers as on one.

    Raises:
        JobError: there is such a thing; says what to do.
    """
    for name, alternative in _OTHERS.items():
        if arguments.get(name) is not None:
            raise JobError(refused("accelerate.split", where=f"{name}=…", what=alternative))
    for name, alternative in _VARIABLES.items():
        if os.environ.get(name, "").lower() in ("1", "true", "yes"):
            raise JobError(refused("accelerate.split", where=f"{name}={os.environ[name]}", what=alternative))
    require_kept_of_loaders(arguments.get("dataloader_config"))
    plugin = arguments.get("gradient_accumulation_plugin")
    is_so = {
        "accelerate.fp8": precision_of(arguments) == "fp8",
        "accelerate.compiled": any(arguments.get(name) is not None for name in ("dynamo_backend", "dynamo_plugin"))
        or os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no",
        "accelerate.scheduler-steps": arguments.get("step_scheduler_with_optimizer") is False,
        "accelerate.epoch-end": plugin is not None and not plugin.sync_with_dataloader,
        "accelerate.process-group": PartialState._shared_state.get("num_processes", 1) > 1,
    }
    for name in filter(is_so.get, is_so):
        raise JobError(refused(name))


def require_kept_of_loaders(config: Any) -> None:
    """Refuse settings of loaders, of accelerate's ``DataLoaderConfiguration``, with which loaders cannot be kept.

    Raises:
        JobError: there is one; says what to do.
    """
    if config is not None and config.dispatch_batches:
        raise JobError(refused("accelerate.dispatch-batches"))
    if config is not None and config.use_stateful_dataloader:
        raise JobError(refused("accelerate.stateful-loader"))


def precision_of(arguments: Mapping[str, Any]) -> str:
    """The precision that an accelerator is made with."""
    return str(arguments.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION", "no"))


class Optimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """An optimizer that makes its step in the last turn of a step's body."""

    def __init__(self, optimizer: Any, state: StepState, loop: ScriptLoop) -> None:
        super().__init__(optimizer)
        self.gradient_state = state
        self._loop = loop

    def step(self, closure: Any = None) -> None:
        """Make the step, if this is the last turn.

        Raises:
            ModelError: there is a closure.
            JobError: outside of a training loop.
        """
        if closure is not None:
            raise ModelError("optimizer.step(closure): it would compute shards by itself; use an optimizer without one")
        self._loop.take_step(self.optimizer, self.optimizer.step)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the present step makes no update, since its loss or gradient is not finite."""
        return self._loop.was_skipped


_NARROW = ("bf16", "fp16")
_OWN = frozenset(inspect.signature(Original.__init__).parameters)


class Accelerator(RecordingAccelerator):
    """accelerate's ``Accelerator`` for a script whose loop trains on all workers of a run, to the same bits.

    The body of a loop over a prepared loader runs once for each shard that this worker has of a global batch. In the
    last of these turns, behind ``accelerator.backward``, ``sync_gradients`` is true and the gradients are the mean over
    all shards of all workers: there ``optimizer.step``, ``scheduler.step``, ``zero_grad`` and clipping act.

    Args:
        arguments: those of accelerate's own.
        run: the run, from ``unisono.init``. By default the one that is open; if there is none a new one, which is
            finished when the script ends well.
        settings: accelerate's arguments by name, and arguments of :func:`unisono.init` for a new run.

    Attributes:
        run: the run.

    Raises:
        JobError: what cannot be kept exact; or settings that cannot work, or that come too late.
    """

    def __init__(self, *arguments: Any, run: Run | None = None, **settings: Any) -> None:
        own = {name: value for name, value in settings.items() if name in _OWN}
        ours = {name: value for name, value in settings.items() if name not in _OWN}
        given = inspect.signature(Original.__init__).bind_partial(None, *arguments, **own).arguments
        require_kept(given)
        if given.get("cpu"):
            ours.setdefault("device", "cpu")
        precision = precision_of(given)
        defaults = {"arithmetic.precision": precision} if precision in _NARROW else {}  # it is part of the job
        self.run = run_for("unisono.accelerate.Accelerator", run, ours, defaults)
        if given.get("mixed_precision") is None and self.run.job.precision in _NARROW:
            own["mixed_precision"] = self.run.job.precision
        super().__init__(*arguments, **own)
        take_scaling(self, self.run, "mixed_precision='fp16'")
        if self.project_dir is not None and Path(self.project_dir).resolve() == self.run.dir.resolve():
            raise JobError(refused("accelerate.run-folder", run=self.run.dir))  # states among the run's checkpoints
        rank = follow_rank(self.run)
        for shared in (PartialState._shared_state, AcceleratorState._shared_state):
            shared.update(device=self.run.device, process_index=rank, local_process_index=rank)
        self._loop, self._evaluations = ScriptLoop(self.run.inside, "accelerator"), Evaluations(self.run)
        self._saves = Saves(self.project_configuration)
        register(self.run, "accelerate", self._loop)
        register(self.run, "accelerate saves", self._saves)
        self._state = StepState(GradientState(), self._loop)
        self.gradient_state: Any = self._state
        self._prepared_for: list[Any] = []
        self._has_trigger = False
        self.run.inside.ending.also(routed(self))

    # -- what is trained -------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Every worker gets the same weights, before anything that needs them; again when others are trained.

        Not in ``prepare``, which scripts call for one model after the other: a checkpoint holds all of them.

        Raises:
            ModelError: nothing to train.
            JobMismatch: the workers hold different models.
        """
        if not (self._models and self._optimizers):
            return
        models = [self.unwrap_model(model) for model in self._models]
        trained = [parameter for model in models for parameter in model.parameters() if parameter.requires_grad]
        parts = [*models, *self._optimizers, *trained]
        if not are_same(parts, self._prepared_for):
            self._prepared_for = parts
            self.run.prepare(
                models if len(models) > 1 else models[0], [optimizer.optimizer for optimizer in self._optimizers]
            )

    def prepare_data_loader(
        self, data_loader: Any, device_placement: Any = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """A loader whose batches are distributed.

        Raises:
            JobError: ``dataloader_config`` was given what cannot be kept, after the accelerator was made.
        """
        if isinstance(data_loader, Loader):
            return data_loader
        require_kept_of_loaders(self.dataloader_config)
        if self.use_seedable_sampler:
            data_loader = seeded(data_loader, self.dataloader_config.data_seed)
        loader = Loader(data_loader, self._read)
        self._dataloaders.append(loader)
        return loader

    def prepare_optimizer(self, optimizer: Any, device_placement: Any = None) -> Any:
        """An optimizer that acts in the last turn of a step."""
        if not isinstance(optimizer, Optimizer):
            optimizer = Optimizer(optimizer, self.gradient_state, self._loop)
            self._optimizers.append(optimizer)
        return optimizer

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """A scheduler that acts in the last turn of a step, and is part of checkpoints."""
        prepared = super().prepare_scheduler(scheduler)
        if scheduler is not prepared:
            prepared.gradient_state = self.gradient_state
            register(self.run, "accelerate scheduler", prepared.scheduler)
        return prepared

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Have objects in the run's checkpoints, too."""
        super().register_for_checkpointing(*objects)
        for thing in objects:
            register(self.run, "accelerate object", thing)

    # -- training --------------------------------------------------------------------------------------------

    @property
    def mean_loss(self) -> float:
        """The newest step's mean loss over its global batch, the same on all workers; NaN before the first step."""
        return self._loop.loss

    @property
    def steps_done(self) -> int:
        """The number of steps of the whole job that are over."""
        return self._loop.steps

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Go backward from a shard's loss, the mean over its samples. Waits for the others behind the last shard.

        Args:
            loss: the loss.
            kwargs: ``weight``, the number of samples or tokens that it is the mean of, if these are not its samples.

        Raises:
            ModelError: other arguments; or no optimizer is prepared.
            JobError: outside of a training loop.
        """
        if not self._optimizers:
            raise ModelError(refused("accelerate.no-optimizer"))
        weight = kwargs.pop("weight", None)
        if kwargs:
            raise ModelError(f"accelerator.backward({', '.join(kwargs)}=…): the run goes backward once for each shard")
        with in_words_of("accelerate"):
            self._loop.backward(loss, weight)

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """Nothing: the loop's global batch is that of all batches which are accumulated."""
        yield

    def no_sync(self, model: Any) -> Any:
        """Refused: it accumulates by hand.

        Raises:
            JobError: always.
        """
        raise JobError("accelerator.no_sync: to accumulate gradients say Accelerator(gradient_accumulation_steps=…)")

    def clip_grad_norm_(self, parameters: Any, max_norm: Any, norm_type: Any = 2) -> Any:
        """Limit the norm of the mean gradient, in the last turn of a step; returns 0 in others."""
        if self._loop.updates:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        return torch.zeros((), device=self.device)

    def clip_grad_value_(self, parameters: Any, clip_value: Any) -> None:
        """Limit each value of the mean gradient, in the last turn of a step."""
        if self._loop.updates:
            super().clip_grad_value_(parameters, clip_value)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """A loader without the first global batches of an epoch."""
        return (
            dataloader.behind(num_batches)
            if isinstance(dataloader, Loader)
            else super().skip_first_batches(dataloader, num_batches)
        )

    def _read(self, loader: Loader) -> Iterator[Any]:
        self._evaluations.require_whole()
        self._begin()
        base = loader.base_dataloader
        in_training_mode = [model for model in self._models if model.training]
        if in_training_mode and self._optimizers and torch.is_grad_enabled():
            turns = self._state.follow(loader, self._train(base), lambda: self._loop.ends_epoch)
            return TurnBatches(turns, self._loop, refused("accelerate.enumerated"))
        evaluation = self._evaluations.of(base, in_training_mode, has_optimizer=bool(self._optimizers))
        return self._state.follow(loader, self._evaluate(evaluation), lambda: evaluation.is_at_end)

    def _train(self, loader: DataLoader[Any]) -> Generator[Any, None, None]:
        self._evaluations.forget()
        count = self.gradient_accumulation_steps
        size = size_of(loader)
        steps = self.run.steps(together(loader, count), batch_size=None if size is None else size * count)
        return self._loop.of(steps)

    def _evaluate(self, evaluation: EvaluationLoop) -> Generator[Any, None, None]:
        self._loop.settle("an evaluation")
        yield from self._evaluations.read(evaluation)

    # -- what workers tell each other ------------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Gather the workers' tensors of the present round of an evaluation loop, each sample once, in order.

        Outside of loops every worker has the same, and gets what the main worker has.

        Raises:
            JobError: in the body of a training loop.
        """
        self._evaluations.require_whole()
        leaves = leaves_of(tensor)
        if (evaluation := self._evaluations.newest) is not None:
            return rebuilt(tensor, evaluation.gather(leaves))
        if not self._loop.is_outside:
            raise JobError(refused("accelerate.gather-in-body"))
        return rebuilt(tensor, from_main(self.run, leaves))

    def from_main(self, data: Any) -> Any:
        """Return what the main worker has: tensors in any structure, or a list of plain values.

        Raises:
            JobError: in the body of a loop.
        """
        if self._evaluations.newest is not None or not self._loop.is_outside:
            raise JobError(refused("accelerate.broadcast-in-body"))
        return rebuilt(data, from_main(self.run, leaves_of(data)))

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As :meth:`gather`: no sample comes twice."""
        return self.gather(input_data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the main worker's tensor; all have the same. An evaluation loop that reduces is not distributed.

        Raises:
            JobError: in the body of a training loop.
        """
        return self.gather(tensor) if self._evaluations.newest is None else self._whole(tensor)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Return the tensor as it is: an evaluation loop that pads is not distributed."""
        return tensor if self._evaluations.newest is None else self._whole(tensor)

    def _whole(self, tensor: Any) -> Any:
        evaluation = self._evaluations.newest
        assert evaluation is not None, "asked before"
        return rebuilt(tensor, evaluation.whole(leaves_of(tensor)))

    def wait_for_everyone(self) -> None:
        """Wait for all workers; nothing in the body of a training loop."""
        if self._evaluations.newest is None and self._loop.is_outside:
            self.run.barrier()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """The main worker goes first, and the others behind it."""
        is_first = self.is_main_process
        if not is_first:
            self.wait_for_everyone()
        yield
        if is_first:
            self.wait_for_everyone()

    local_main_process_first = main_process_first

    def set_trigger(self) -> None:
        """Have :meth:`check_trigger` return true on all workers. In a training loop's body call it in each turn."""
        self._has_trigger = True

    def check_trigger(self) -> bool:
        """Whether a worker has set the trigger since the last time. In other turns of a step than the last, false."""
        if not self._loop.is_last:
            return False
        self._loop.settle("accelerator.check_trigger")
        own, self._has_trigger = self._has_trigger, False
        return any(self.run.together(lambda workers: workers.gather_json(own)))
