"""The state of one ``fit`` besides weights, optimizers and metrics, which are the run's.

It is read and set where Lightning asks for a step's batch: there all workers stand at the same place of its loops.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from unisono.errors import CheckpointError
from unisono.integrations.kit import refused
from unisono.integrations.lightning.clock import set_waited, waited
from unisono.integrations.lightning.framework import call, is_overridden, part, pl
from unisono.integrations.lightning.logged import FLAGS, LogKind, add
from unisono.integrations.lightning.training import Training

_Loop = part("loops.loop")._Loop

SHOWN = ("_progress_bar_metrics", "_logged_metrics", "_callback_metrics")
"""The newest values, as Lightning's logger connector keeps them."""

SAVES = ("_last_global_step_saved", "_last_checkpoint_saved")
"""The attributes of a ModelCheckpoint about its saves that are not in its state."""


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
        "callbacks": {str(key): kept for key, kept in call._call_callbacks_state_dict(trainer).items()},
        "saved": sorted(trainer.strategy.saved),
        "saves": {str(saver.state_key): [getattr(saver, name) for name in SAVES] for saver in _savers(trainer)},
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
        "held": [] if training.manual is None else training.manual.held.state(training.manual.parameters),
        "spoiled": training.is_spoiled,
        "tickets": training.pruning.state(),
        "waited": waited(trainer),
        "left out": training.left_out,
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
    if training.manual is not None:
        training.manual.held.load(state["held"], training.manual.parameters)
    training.accumulated, training.is_spoiled = list(state["accumulated"]), state.get("spoiled", False)
    training.pruning.load(state.get("tickets", ()))
    training.left_out = state.get("left out", -1)
    if (seconds := state.get("waited")) is not None:
        set_waited(trainer, seconds)
    _load_results(trainer, state)
    for rows, count in zip(trainer.strategy.rows, state["rows"], strict=False):
        rows.resume(count)
    for callback in trainer.callbacks:
        if (kept := state["callbacks"].get(str(callback.state_key))) is not None:
            callback.load_state_dict(dict(kept))
    for saver in _savers(trainer):
        for name, value in zip(SAVES, state["saves"][str(saver.state_key)], strict=True):
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
    callbacks = sorted(str(callback.state_key) for callback in trainer.checkpoint_callbacks)
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
