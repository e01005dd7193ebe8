"""What of a Lightning trainer cannot be kept exact, and is refused with the cure."""

from __future__ import annotations

from typing import Any

import torch

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
    if isinstance(trainer.optimizers[0], torch.optim.LBFGS):
        raise ModelError(
            "torch.optim.LBFGS computes the loss several times for one step, and shards are computed once: use "
            "another optimizer"
        )
    if isinstance(getattr(trainer, "_val_check_time_interval", None), int | float):
        raise JobError(
            f"val_check_interval={trainer._val_check_time_interval} s goes by a clock, and workers have different "
            f"ones: give a number of batches"
        )
