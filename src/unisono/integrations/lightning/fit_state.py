"""Where a ``fit`` of Lightning stands, as checkpoints and workers that join get it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from unisono.errors import CheckpointError
from unisono.integrations.lightning.framework import part
from unisono.integrations.lightning.logged import LogKind, add
from unisono.integrations.lightning.training import Training

_call = part("trainer.call")
_Loop = part("loops.loop")._Loop
_is_overridden = part("utilities.model_helpers").is_overridden

SHOWN = ("_progress_bar_metrics", "_logged_metrics", "_callback_metrics")
"""The newest values, as Lightning's logger connector keeps them."""

SAVES = ("_last_global_step_saved", "_last_checkpoint_saved")
"""What a ModelCheckpoint remembers of its saves besides its state."""


class FitState:
    """The state of one ``fit`` besides weights, optimizers and metrics, which are the run's.

    It is told and set where Lightning asks for a step's batch: there all workers stand at the same place of its loops.

    Args:
        training: what computes the steps.
    """

    def __init__(self, training: Training) -> None:
        self._training, self._trainer = training, training.trainer

    def state(self) -> dict[str, Any]:
        """All of it."""
        trainer, module = self._trainer, self._trainer.lightning_module
        connector, epoch_loop = trainer._logger_connector, trainer.fit_loop.epoch_loop
        own: dict[str, Any] = {}
        for rows in trainer.strategy.rows:
            rows.settle()
        if _is_overridden("on_save_checkpoint", module):
            module.on_save_checkpoint(own)
        return {
            "loops": trainer.fit_loop.state_dict(),
            "stops": bool(trainer.should_stop),
            "results": [_result(one) for one in epoch_loop._results.values()],
            "shown": {name: dict(getattr(connector, name)) for name in SHOWN},
            "first": connector._first_loop_iter,
            "fx": connector._current_fx,
            "callbacks": _call._call_callbacks_state_dict(trainer),
            "saved": sorted(trainer.strategy.saved),
            "saves": {one.state_key: [getattr(one, name) for name in SAVES] for one in trainer.checkpoint_callbacks},
            "schedulers": [one.scheduler.state_dict() for one in trainer.lr_scheduler_configs],
            "data": _of_data(trainer),
            "module": own,
            "kinds": [one.state() for one in self._training.kinds.values()],
            "trained": sorted(self._training.metrics.trained),
            "updates": {name: one._update_count for name, one in self._training.metrics.by_name.items()},
            "rows": [one.count for one in trainer.strategy.rows],
            "whole": trainer.strategy.evaluating.is_whole,
            "accumulated": list(self._training.accumulated),
            "spoiled": self._training.is_spoiled,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Set all of it.

        Raises:
            CheckpointError: it is of another trainer: other callbacks or schedulers.
        """
        trainer, training = self._trainer, self._training
        self._require_alike(state)
        _set_progress(trainer.fit_loop, state["loops"])
        trainer.should_stop = state["stops"]
        training.kinds = {f"{one['fx']}.{one['name']}": LogKind(**one) for one in state["kinds"]}
        training.metrics.trained = set(state["trained"])
        for name, count in state["updates"].items():
            training.metrics.by_name[name]._update_count = count
            training.metrics.by_name[name]._computed = None
        trainer.strategy.evaluating.is_whole = state["whole"]
        training.accumulated, training.is_spoiled = list(state["accumulated"]), state.get("spoiled", False)
        self._load_results(state)
        for rows, count in zip(trainer.strategy.rows, state["rows"], strict=False):
            rows.resume(count)
        for callback in trainer.callbacks:
            if (kept := state["callbacks"].get(callback.state_key)) is not None:
                callback.load_state_dict(dict(kept))
        for callback in trainer.checkpoint_callbacks:
            for name, value in zip(SAVES, state["saves"][callback.state_key], strict=True):
                setattr(callback, name, value)
        trainer.strategy.keep_only(state.get("saved", ()))
        for config, kept in zip(trainer.lr_scheduler_configs, state["schedulers"], strict=True):
            config.scheduler.load_state_dict(dict(kept))
        if state["data"]:
            trainer.datamodule.load_state_dict(dict(state["data"]))
        if _is_overridden("on_load_checkpoint", trainer.lightning_module):
            trainer.lightning_module.on_load_checkpoint(dict(state["module"]))

    def _load_results(self, state: Mapping[str, Any]) -> None:
        trainer = self._trainer
        connector, results = trainer._logger_connector, trainer.fit_loop.epoch_loop._results
        results.clear()
        for one in state["results"]:
            _restore_result(trainer, results, one)
        for name in SHOWN:
            setattr(connector, name, dict(state["shown"][name]))
        connector._first_loop_iter, connector._current_fx = state["first"], state["fx"]

    def _require_alike(self, state: Mapping[str, Any]) -> None:
        trainer = self._trainer
        here = [len(trainer.lr_scheduler_configs), sorted(one.state_key for one in trainer.checkpoint_callbacks)]
        there = [len(state["schedulers"]), sorted(state["saves"])]
        if here != there:
            raise CheckpointError(
                f"the trainer has {here[0]} schedulers and checkpoint callbacks {here[1]}, and its state is of "
                f"{there[0]} and {there[1]}"
            )


def _of_data(trainer: Any) -> dict[str, Any]:
    return {} if trainer.datamodule is None else dict(trainer.datamodule.state_dict() or {})


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
    kind = LogKind(
        meta.fx,
        meta.name,
        "" if is_number else meta.metric_attribute,
        meta.prog_bar,
        meta.logger,
        meta.on_step,
        meta.on_epoch,
        meta.reduce_fx.__name__,
        add_dataloader_idx=meta.add_dataloader_idx,
    )
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
