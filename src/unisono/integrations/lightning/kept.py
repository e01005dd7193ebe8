"""What of a Lightning trainer cannot be kept exact, and is refused with the cure."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from unisono.errors import JobError, ModelError


def require_kept(trainer: Any) -> None:
    """Refuse a trainer, or a module, that cannot train on several workers as it does on one.

    Args:
        trainer: the trainer, set up to fit.

    Raises:
        JobError: a setting of the trainer; says what to do.
        ModelError: something in the module; says what to do.
    """
    module = trainer.lightning_module
    if not module.automatic_optimization:
        raise ModelError(
            "automatic_optimization = False: the run goes backward and updates once for all shards of a step. Let "
            "Lightning do it, or write the training as a loop, with one step.run for each optimizer (run.prepare, "
            "run.steps)"
        )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise JobError("precision='16-mixed' scales the loss, shard by shard: use precision='bf16-mixed'")
    if trainer._accelerator_connector._layer_sync is not None:
        raise JobError(
            "sync_batchnorm=True: statistics are over a shard, the same on any number of workers: leave it out"
        )
    if isinstance(trainer.val_check_interval, timedelta | str | dict):
        raise JobError(
            f"val_check_interval={trainer.val_check_interval!r} goes by a clock, and workers have different ones: "
            f"give a number of batches"
        )
