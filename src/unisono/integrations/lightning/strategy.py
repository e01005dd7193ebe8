"""A strategy for Lightning's ``Trainer`` that distributes each batch among the workers of a run."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from unisono.errors import JobError, ModelError
from unisono.integrations.kit import RunScaler, follow_rank, rank_of, refused, require_scaling, run_for
from unisono.integrations.lightning.fit import Fits, LightningFit
from unisono.integrations.lightning.framework import Leaves, fabric, part, pl
from unisono.integrations.lightning.logged import Rows, agree_on_versions, rows_of
from unisono.integrations.lightning.loops import (
    EvaluatedBatch,
    Evaluating,
    EvaluationLoader,
    GlobalBatch,
    TrainingLoader,
)
from unisono.train.run import Run

is_param_in_hook_signature = part("utilities.signature_utils").is_param_in_hook_signature

_WHOLLY = ("16-true", "transformer-engine-float16")
_SEARCHES = pl.callbacks.LearningRateFinder, pl.callbacks.BatchSizeFinder


def require_one_training(trainer: Any) -> None:
    """Refuse what trains with other loaders, or other batches, than the run has entered its loop with.

    The trainer has set up nothing yet.

    Raises:
        JobError: a callback or a setting of the trainer; says what to do.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, _SEARCHES):
            raise JobError(refused("lightning.search", callback=type(callback).__name__))
    if trainer.reload_dataloaders_every_n_epochs:
        raise JobError(refused("lightning.reload-loaders"))


def require_kept(trainer: Any) -> None:
    """Refuse a trainer, or a module, that cannot train on several workers as it does on one.

    The trainer is set up to fit.

    Raises:
        JobError: a setting of the trainer; says what to do.
        ModelError: something in the module; says what to do.
    """
    module = trainer.lightning_module
    if trainer.precision_plugin.precision in _WHOLLY:
        raise JobError(refused("lightning.weights-in-float16", precision=trainer.precision_plugin.precision))
    if trainer._accelerator_connector._layer_sync is not None:
        raise JobError(refused("lightning.sync-batchnorm"))
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in trainer.optimizers):
        raise ModelError(refused("lightning.lbfgs"))
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ModelError(refused("lightning.dataloader-iter"))


_rank_zero_only = fabric("utilities.rank_zero").rank_zero_only
_ClusterEnvironment = fabric("plugins.environments").ClusterEnvironment


class WorkersEnvironment(_ClusterEnvironment):  # type: ignore[misc,valid-type]  # Lightning is not looked into by mypy
    """The workers of a run, which a launcher has started. Batches come from one loader, whatever their number."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    creates_processes_externally = True  # Lightning starts no processes
    main_address, main_port = "127.0.0.1", 0  # nobody connects there

    @staticmethod
    def detect() -> bool:
        """Return False: the strategy is never chosen by itself."""
        return False

    def world_size(self) -> int:
        """Return 1, so that nothing that a script derives from it depends on the number of workers."""
        return 1

    def set_world_size(self, size: int) -> None:
        """Do nothing: the run decides the world size."""

    def global_rank(self) -> int:
        """The worker's rank."""
        return rank_of(self._run)

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the run decides the rank."""

    def local_rank(self) -> int:
        """Return 0: each worker has one device, which the run has chosen."""
        return 0

    def node_rank(self) -> int:
        """Hosts make no difference."""
        return 0


_TrainerFn = part("trainer.states").TrainerFn
do_nothing_closure = part("core.optimizer").do_nothing_closure


class LightningStrategy(pl.strategies.Strategy):  # type: ignore[misc]  # Lightning is not looked into by mypy
    """Trains with Lightning on all workers of a run, to the same bits on any number of them.

    Args:
        run: the run, from ``unisono.init``; by default the one that is open, or else one that is started here, and
            finished when the script ends well.
        accelerator: Lightning's accelerator; by default the trainer chooses it.
        checkpoint_io: the plugin that writes Lightning's checkpoints; by default torch's.
        precision_plugin: the plugin for the precision; by default the trainer chooses it.
        settings: arguments of ``unisono.init`` for the run that is started here.

    Attributes:
        run: the run.
        evaluating: what shares the batches of evaluations out.
        rows: the rows of loggers that write CSV files.
        saved: the paths of Lightning's checkpoints that trainings have written, and not removed.
        cluster_environment: what Lightning asks about workers.
    """

    strategy_name = "unisono"

    def __init__(
        self,
        run: Run | None = None,
        *,
        accelerator: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        **settings: Any,
    ) -> None:
        super().__init__(accelerator, checkpoint_io, precision_plugin)
        is_half = getattr(precision_plugin, "scaler", None) is not None
        self.run = run_for(
            "unisono.lightning.Strategy", run, settings, {"arithmetic.precision": "fp16"} if is_half else {}
        )
        self.cluster_environment = WorkersEnvironment(self.run)
        self.evaluating = Evaluating(self.run, self)
        self._fits = Fits(self.run)
        self._fitting: LightningFit | None = None
        self.rows: list[Rows] = []
        self.saved: set[str] = set()
        _rank_zero_only.rank = follow_rank(self.run)  # by which Lightning's functions for rank 0 alone go

    # -- who and where ---------------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        """The device of this worker."""
        return self.run.device

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the main worker, now."""
        return self.run.is_main

    @property
    def global_rank(self) -> int:
        """The worker's rank, now."""
        return rank_of(self.run)

    local_rank = 0  # each worker has one device, and the run has chosen it
    world_size = 1  # so that nothing that a script derives of it depends on the number of workers

    def model_to_device(self) -> None:
        """Move the model to this worker's device."""
        self.model.to(self.root_device)

    def setup_environment(self) -> None:
        """Agree on where loggers write, before they do."""
        super().setup_environment()
        require_one_training(self._trainer)
        for loop in (self._trainer.validate_loop, self._trainer.test_loop, self._trainer.predict_loop):
            loop.inference_mode = False  # tensors that it makes, such as metrics' states, do not tell of writes
        fits = self._trainer.state.fn == _TrainerFn.FITTING
        if fits and getattr(self.precision_plugin, "scaler", None) is not None:
            require_scaling(self.run, "precision='16-mixed'")
            self.precision_plugin.scaler = RunScaler(self.run)
        elif fits and self.run.job.precision == "fp16":
            raise JobError(refused("lightning.fp16-on-cpu", precision=self.precision_plugin.precision))
        if fits and self.may_ask:
            agree_on_versions(self.run, self._trainer.loggers)
            self.rows = rows_of(self.run, self._trainer.loggers)

    # -- what workers tell each other ------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        """Wait for nobody: what Lightning's loops do is the same on all workers. A ``fit`` begins at the last one."""
        if name == "run-stage" and self._trainer.state.fn == _TrainerFn.FITTING:
            require_kept(self._trainer)
            self._fitting = self._fits.begin(self._trainer)
            if self._fitting is not None and self._fitting.is_over:
                raise Leaves
        elif name == "Trainer.save_checkpoint" and self.may_ask:
            self.run.barrier()  # others may read what the main worker has written

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the main worker's object where a collective call is possible; else the object itself."""
        return self.run.broadcast(obj, src) if self.may_ask and _is_plain(obj) else obj

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the tensor as it is: results are those of the global batch already."""
        return tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the tensor as it is: that of a batch, and in a training step, of which that is told, of a shard."""
        if self._fitting is not None and self._fitting.training.shard is not None and self.run.job.shards > 1:
            words, cure = refused("lightning.gather"), "A loss over the whole batch needs Strategy(shards=1)"
            self.run.inside.states.tell("all_gather", words, cure, breaks=False)
        return tensor

    # -- Lightning's checkpoints -----------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint on the main worker."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        self.saved.add(str(filepath))

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint on the main worker."""
        super().remove_checkpoint(filepath)
        self.saved.discard(str(filepath))

    def keep_only(self, saved: Collection[str]) -> None:
        """Go back with the run: files written since then come again, and would get other names beside the old ones."""
        for path in sorted(self.saved.difference(saved)):
            self.remove_checkpoint(path)
        self.saved = set(saved)

    # -- training --------------------------------------------------------------------------------------------

    @property
    def handles_gradient_accumulation(self) -> bool:
        """Every batch comes to ``optimizer_step``; in the last one of an epoch Lightning updates whatever there is."""
        return self._fitting is not None and not self._trainer.fit_loop.epoch_loop._num_ready_batches_reached()

    def process_dataloader(self, dataloader: Any) -> Any:
        """Lightning gets the loader's steps, one for each global batch, or the batches that workers have evaluated."""
        if isinstance(dataloader, TrainingLoader | EvaluationLoader):  # an earlier fit has left it in a CombinedLoader
            dataloader = dataloader.loader
        if self._trainer.predicting:
            return dataloader
        if self._trainer.training:
            return TrainingLoader(dataloader, self._next_step)
        return EvaluationLoader(dataloader, self.evaluating)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch, unless it is distributed."""
        return batch if isinstance(batch, GlobalBatch) else super().batch_to_device(batch, device, dataloader_idx)

    def shard_to_device(self, batch: Any, loader: int = 0) -> Any:
        """Have a part of a batch, or a batch that this worker evaluates, pass the hooks that a batch passes."""
        module = self.lightning_module
        batch = module._on_before_batch_transfer(self.precision_plugin.convert_input(batch), dataloader_idx=loader)
        return self.batch_to_device(batch, dataloader_idx=loader)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training step, on a shard where Lightning has the global batch."""
        usual = super().training_step
        if self._fitting is None:  # a script calls Lightning's loops by itself, outside of a fit
            return usual(*args, **kwargs)
        return self._fitting.training.training_step(usual, *args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Keep the loss of a shard."""
        if self._fitting is None:
            loss: Tensor = super().backward(closure_loss, optimizer, *args, **kwargs)
            return loss
        training = self._fitting.training
        if training.manual is not None:
            own: Tensor = training.manual.backward(closure_loss)
            return own
        return training.backward(closure_loss, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Compute the step, and have Lightning clip the mean gradient and update the weights."""
        usual = super().optimizer_step
        if self._fitting is not None and (manual := self._fitting.training.manual) is not None:
            return manual.step_of(closure, lambda closure: usual(optimizer, closure, model, **kwargs))
        if self._fitting is None or closure is do_nothing_closure:  # which Lightning refuses behind it
            return usual(optimizer, closure, model, **kwargs)

        def update(gone_backward: Callable[[], Any]) -> Any:
            return usual(optimizer, gone_backward, model, **kwargs)

        return self._fitting.training.compute(closure, update)

    def accumulate(self, closure: Callable[[], Any]) -> None:
        """Compute a step whose gradient a later one is added to."""
        if self._fitting is None:
            closure()
        else:
            self._fitting.training.compute(closure, lambda _: None)

    def refresh(self) -> None:
        """Have pruned weights as a forward pass has them, where an evaluation begins."""
        if self._fitting is not None:
            self._fitting.training.pruning.refresh()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's validation step, or take its results from another worker."""
        return self._evaluated(super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's test step, or take its results from another worker."""
        return self._evaluated(super().test_step, *args, **kwargs)

    def _evaluated(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], EvaluatedBatch):
            return self.evaluating.receive(args[0])
        return step(*args, **kwargs)

    def on_train_end(self) -> None:
        """End the loop, wherever in its epochs it stands."""
        if self._fitting is not None:
            self._fitting.end()
            self._fitting.leave()

    def teardown(self) -> None:
        """Let go of the attributes that the training has set."""
        if self._fitting is not None:
            self._fitting.close()
            self._fitting = None
        for rows in self.rows:
            rows.close()
        self.rows = []
        super().teardown()

    def _next_step(self, loader: TrainingLoader) -> GlobalBatch:
        if self._fitting is None:  # Lightning looks whether a loader without a length has a batch
            return GlobalBatch.of(0)
        return self._fitting.next_step(loader)

    @property
    def may_ask(self) -> bool:
        """Whether a collective call can be made here."""
        if self.run.inside.ending.is_closed or self.evaluating.is_under_way:
            return False
        return self._fitting is None or self._fitting.may_ask

    @property
    def _trainer(self) -> Any:
        return self.lightning_module.trainer


def _is_plain(obj: Any) -> bool:
    return obj is None or isinstance(obj, bool | int | float | str)
