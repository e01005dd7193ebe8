"""A call of ``fit``: it enters the run's loop at the others' place, gives Lightning the steps, and has a state."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor

from unisono.data.generators import generators_kept
from unisono.errors import CheckpointError, JobError
from unisono.integrations.kept import Trainings
from unisono.integrations.kit import refused
from unisono.integrations.lightning.framework import Leaves, call, is_overridden, part, pl
from unisono.integrations.lightning.joined_loaders import CombinedLoader, joined
from unisono.integrations.lightning.logged import FLAGS, LogKind, add
from unisono.integrations.lightning.loops import GlobalBatch, TrainingLoader, let_pass, limited, own_loaders
from unisono.integrations.lightning.metrics import Metrics
from unisono.integrations.lightning.training import Training
from unisono.integrations.lightning.whole_batches import LoaderBatches, StepFetcher, is_indexed, whole_of
from unisono.integrations.shard_state import ShardState
from unisono.train.run import Run
from unisono.train.step.step import Step

_Loop = part("loops.loop")._Loop

SHOWN = ("_progress_bar_metrics", "_logged_metrics", "_callback_metrics")
"""The newest values, as Lightning's logger connector keeps them."""

SAVES = ("_last_global_step_saved", "_last_checkpoint_saved")
"""The attributes of a ModelCheckpoint about its saves that are not in its state."""


# The state of one ``fit`` besides weights, optimizers and metrics, which are the run's. It is read and set where
# Lightning asks for a step's batch: there all workers stand at the same place of its loops.


def state_of(training: Training) -> dict[str, Any]:
    """Return the whole state of a training."""
    trainer, module = training.trainer, training.trainer.lightning_module
    connector, metrics = trainer._logger_connector, training.metrics
    own: dict[str, Any] = {}
    for rows in trainer.strategy.rows:
        rows.settle()
    if is_overridden("on_save_checkpoint", module):
        known, checkpoint = _checkpoint(trainer), _checkpoint(trainer)
        module.on_save_checkpoint(checkpoint)
        own = {name: value for name, value in checkpoint.items() if name not in known}
    return {
        "loops": trainer.fit_loop.state_dict(),
        "stops": bool(trainer.should_stop),
        "results": [_result(metric) for metric in trainer.fit_loop.epoch_loop._results.values()],
        "shown": {name: dict(getattr(connector, name)) for name in SHOWN},
        "first": connector._first_loop_iter,
        "fx": connector._current_fx,
        "callbacks": call._call_callbacks_state_dict(trainer),
        "saved": sorted(trainer.strategy.saved),
        "saves": {saver.state_key: [getattr(saver, name) for name in SAVES] for saver in _savers(trainer)},
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "data": {} if trainer.datamodule is None else dict(trainer.datamodule.state_dict() or {}),
        "module": own,
        "kept": training.kept.state(),
        "kinds": [asdict(kind) for kind in training.kinds.values()],
        "trained": sorted(metrics.trained),
        "updates": {name: metric._update_count for name, metric in metrics.by_name.items()},
        "rows": [rows.count for rows in trainer.strategy.rows],
        "whole": trainer.strategy.evaluating.is_whole,
        "accumulated": list(training.accumulated),
        "spoiled": training.is_spoiled,
    }


def _savers(trainer: Any) -> list[Any]:
    """The callbacks that save as Lightning's ModelCheckpoint does, and not in a way of their own."""
    return [saver for saver in trainer.checkpoint_callbacks if all(hasattr(saver, name) for name in SAVES)]


def load_state(training: Training, state: Mapping[str, Any]) -> None:
    """Set all of it.

    Raises:
        CheckpointError: it is of another trainer: other callbacks or schedulers.
    """
    trainer = training.trainer
    _require_alike(trainer, state)
    _set_progress(trainer.fit_loop, state["loops"])
    trainer.should_stop = state["stops"]
    training.kinds = {f"{kind['fx']}.{kind['name']}": LogKind(**kind) for kind in state["kinds"]}
    training.metrics.trained = set(state["trained"])
    for name, count in state["updates"].items():
        training.metrics.by_name[name]._update_count = count
        training.metrics.by_name[name]._computed = None
    training.kept.load(state.get("kept", {}))
    trainer.strategy.evaluating.is_whole = state["whole"]
    training.accumulated, training.is_spoiled = list(state["accumulated"]), state.get("spoiled", False)
    _load_results(trainer, state)
    for rows, count in zip(trainer.strategy.rows, state["rows"], strict=False):
        rows.resume(count)
    for callback in trainer.callbacks:
        if (kept := state["callbacks"].get(callback.state_key)) is not None:
            callback.load_state_dict(dict(kept))
    for saver in _savers(trainer):
        for name, value in zip(SAVES, state["saves"][saver.state_key], strict=True):
            setattr(saver, name, value)
    trainer.strategy.keep_only(state.get("saved", ()))
    for config, kept in zip(trainer.lr_scheduler_configs, state["schedulers"], strict=True):
        config.scheduler.load_state_dict(dict(kept))
    if state["data"]:
        trainer.datamodule.load_state_dict(dict(state["data"]))
    if is_overridden("on_load_checkpoint", trainer.lightning_module):
        trainer.lightning_module.on_load_checkpoint({**_checkpoint(trainer), **state["module"]})


def _checkpoint(trainer: Any) -> dict[str, Any]:
    """The parts of a checkpoint of Lightning's that hooks of a module may look for. The run keeps them by itself."""
    return {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": pl.__version__,
        "state_dict": trainer.strategy.lightning_module_state_dict(),
        "loops": {"fit_loop": trainer.fit_loop.state_dict()},
        "callbacks": call._call_callbacks_state_dict(trainer),
        "optimizer_states": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        trainer.lightning_module.CHECKPOINT_HYPER_PARAMS_KEY: dict(trainer.lightning_module.hparams),
    }


def _load_results(trainer: Any, state: Mapping[str, Any]) -> None:
    connector, results = trainer._logger_connector, trainer.fit_loop.epoch_loop._results
    results.clear()
    for result in state["results"]:
        _restore_result(trainer, results, result)
    for name in SHOWN:
        setattr(connector, name, dict(state["shown"][name]))
    connector._first_loop_iter, connector._current_fx = state["first"], state["fx"]


def _require_alike(trainer: Any, state: Mapping[str, Any]) -> None:
    callbacks = sorted(callback.state_key for callback in trainer.checkpoint_callbacks)
    schedulers, theirs, their_callbacks = (
        len(trainer.lr_scheduler_configs),
        len(state["schedulers"]),
        sorted(state["saves"]),
    )
    if (schedulers, callbacks) != (theirs, their_callbacks):
        raise CheckpointError(
            refused(
                "lightning.other-trainer",
                schedulers=schedulers,
                callbacks=callbacks,
                their_schedulers=theirs,
                their_callbacks=their_callbacks,
            )
        )


def loops_of(loop: Any) -> Iterator[Any]:
    """A loop of Lightning, and those inside of it."""
    yield loop
    for inner in vars(loop).values():
        if isinstance(inner, _Loop):
            yield from loops_of(inner)


def _set_progress(fit_loop: Any, state: Mapping[str, Any]) -> None:
    """Have the loops count from there on, as if they had come there by themselves."""
    fit_loop.load_state_dict(dict(state))
    for loop in loops_of(fit_loop):
        loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
    if fit_loop._data_fetcher is not None:
        fit_loop._data_fetcher.fetched = fit_loop.epoch_loop.batch_progress.current.ready
        fit_loop._data_fetcher.done = False


def _result(metric: Any) -> dict[str, Any]:
    """A result that Lightning adds up over an epoch, as plain values."""
    meta, is_number = metric.meta, metric.is_tensor
    flags = {flag: getattr(meta, flag) for flag in FLAGS}
    attribute = "" if is_number else meta.metric_attribute
    kind = LogKind(meta.fx, meta.name, attribute, reduce=meta.reduce_fx.__name__, **flags)
    forward = metric._forward_cache
    return {
        "kind": asdict(kind),
        "value": metric.value if is_number else None,
        "samples": metric.cumulated_batch_size if is_number and meta.is_mean_reduction else None,
        "newest": forward if isinstance(forward, Tensor) else None,
        "has_reset": metric.has_reset,
        "updates": metric._update_count,
    }


def _restore_result(trainer: Any, results: Any, state: Mapping[str, Any]) -> None:
    kind, device = LogKind(**state["kind"]), trainer.strategy.root_device
    value = trainer.lightning_module.get_submodule(kind.attribute) if kind.attribute else torch.zeros((), device=device)
    add(trainer, results, kind, value, 1)
    metric = results[f"{kind.fx}.{kind.name}"]
    if not kind.attribute:
        metric.value = state["value"].to(device)
        if state["samples"] is not None:
            metric.cumulated_batch_size = state["samples"].to(device)
    metric._forward_cache, metric.has_reset = state["newest"], state["has_reset"]
    metric._update_count, metric._computed = state["updates"], None


_FitLoop: Any = part("loops.fit_loop")._FitLoop
_PrefetchDataFetcher: Any = part("loops.fetchers")._PrefetchDataFetcher

ENDLESS = 2**31 - 1
"""Epochs of a training that something else than their number ends."""


class ComparedAtEnd(_FitLoop):  # type: ignore[misc]  # Lightning is not looked into by mypy
    """Lightning's loop over epochs, which ends when workers have compared its last step."""

    fit: LightningFit

    @property
    def done(self) -> bool:
        """Whether it is over, and right."""
        return bool(super().done) and self.fit.is_right()


class LightningFit:
    """Gives Lightning's loops the steps of the run, and has them stand where the run does.

    Args:
        trainer: the trainer, whose loader is set up.

    Attributes:
        may_ask: whether a collective call can be made: not between the loop's entrance and its first step.
    """

    def __init__(self, run: Run, trainer: Any) -> None:
        module = trainer.lightning_module
        kept = ShardState(run, module, "model")
        self.training = Training(run, trainer, Metrics(module), kept)
        self.is_over = False
        self._run, self._trainer = run, trainer
        self._steps: Generator[Step, None, None] | None = None
        self._again: Mapping[str, Any] | None = None
        self.may_ask = False
        self._ahead: Step | None = None  # that the run has gone back to from the training's end
        self._let_go: Callable[[], None] = lambda: None

    def prepare(self) -> None:
        """Give all workers the same weights."""
        module, trainer = self._trainer.lightning_module, self._trainer
        self._let_go = let_pass(module)
        # One way out: the run leaves at the end of a step, with a checkpoint.
        trainer._signal_connector.teardown()
        shared = self.training.metrics.shared_state() | self.training.kept.shared_state()
        self._run.prepare(module, trainer.optimizers, state=shared)

    def enter(self, loader: TrainingLoader) -> bool:
        """Enter the loop where the others are. Return whether something is left of it."""
        epochs, most = self._trainer.max_epochs, self._trainer.fit_loop.max_batches
        read: Any = loader.loader
        if not is_indexed(read):
            read = LoaderBatches(read, self._run.job.seed, None if most == inf else most)
        else:
            read = limited(read, most)
        over = self._trainer.fit_loop.epoch_loop.batch_progress.total.ready
        self._steps = self._run.steps(
            read,
            ENDLESS if epochs in (None, -1) else epochs,
            batch_size=getattr(getattr(read, "batch_sampler", None), "batch_size", None),
            begin=over if self._trainer.ckpt_path is not None else 0,
        )
        place = self._run.enter()
        self.is_over = place.is_over
        loop = self._trainer.fit_loop
        loop.__class__, loop.fit = ComparedAtEnd, self
        if self._again is not None:  # it was restored: Lightning is to skip what begins an epoch
            self._trainer.fit_loop._restarting = True
        return not place.is_over

    def next_step(self, loader: TrainingLoader) -> GlobalBatch:
        """Go on to the next step."""
        assert self._steps is not None, "the loop was entered"
        if (again := self._again) is not None:
            self._again = None
            load_state(self.training, again)  # what Lightning has set back on its way here
        for rows in self._trainer.strategy.rows:
            rows.begin()
        self.may_ask = True
        if self.training.step is not None and not self.training.step.calls:
            raise JobError(refused("lightning.rest-of-epoch"))
        try:
            step = self.training.step = self._ahead or next(self._steps)
            self._ahead = None
        except StopIteration:
            self.end()
            raise Leaves from None
        loader.has_ended = step.is_last_in_epoch and not is_indexed(loader.loader)
        self.training.batch = GlobalBatch.of(step.size, partial(self._whole, step))
        return self.training.batch

    def _whole(self, step: Step) -> Any:
        """The global batch of a step, as the hooks for batches make it."""
        with generators_kept():
            return self._trainer.strategy.shard_to_device(whole_of(self._run.inside.loop.body.source, step.batch))

    def is_right(self) -> bool:
        """Lightning has come to the end. Collective.

        Return whether the training is over; if not, a fault of a memory has set the run back into it.
        """
        loop = self._trainer.fit_loop
        if self._steps is None or self.training.step is None:
            return True
        self._run.inside.loop.end_here()
        self.may_ask = False
        self._ahead = next(self._steps, None)
        if self._ahead is None:
            self.may_ask = True
            return True
        loop._restarting = True  # as for a worker that joins
        loop.reset()
        return False

    def end(self) -> None:
        """End the training. A worker that has skipped it gets its final state: scripts ask callbacks for that."""
        self.is_over = True
        if self._steps is not None:
            self._steps.close()
        has_skipped = self._run.inside.membership.joins
        known = self._run.together(lambda workers: workers.broadcast(self.state() if workers.rank == 0 else None))
        if has_skipped:
            load_state(self.training, known)

    def close(self) -> None:
        """Give the module back as it was. A loop that an error has left is over: a script may catch it, and go on."""
        if self._steps is not None:
            self._steps.close()
        self._let_go()

    def state(self) -> dict[str, Any]:
        """Where it stands."""
        return state_of(self.training)

    def load(self, state: Mapping[str, Any]) -> None:
        """Stand there."""
        load_state(self.training, state)
        if not self.may_ask:
            self._again = state

    go_on = load


class Fits(Trainings):
    """The trainings of a script with Lightning."""

    def begin(self, trainer: Any) -> LightningFit:
        """Begin the next fit, which may be over where the run goes on.

        Raises:
            JobError: there is no loader that the run can read.
        """
        loader = _loader_of(trainer)
        fit = LightningFit(self.run, trainer)
        if loader is None:
            fit.is_over = True
            return fit
        fit.prepare()
        self.register("lightning", self)
        self.add(fit)
        if not fit.enter(loader):
            self.recall()
            fit.end()
        return fit

    def state_dict(self) -> dict[str, Any]:
        """The states of all."""
        return {"fits": self.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set all of them."""
        self.load(state["fits"])


def _loader_of(trainer: Any) -> TrainingLoader | None:
    """The loader that the trainer reads; None if there is nothing to train."""
    loop = trainer.fit_loop
    loop.setup_data()
    if loop.skip:
        return None
    combined = loop._combined_loader
    own = own_loaders(combined)
    if type(loop._data_fetcher) is _PrefetchDataFetcher:
        loop._data_fetcher = StepFetcher()
        loop._data_fetcher.setup(combined)
        iter(loop._data_fetcher)
    if len(combined.flattened) != 1 or combined.iterables is not combined.flattened[0]:
        step = combined.flattened[0].next_step
        combined = loop._combined_loader = CombinedLoader(TrainingLoader(joined(combined), step), "min_size")
        iter(combined)  # before it has a length
        loop._data_fetcher.setup(combined)
        iter(loop._data_fetcher)
    loader: TrainingLoader = combined.flattened[0]
    combined._iterables = own
    return loader
