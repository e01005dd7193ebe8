"""What of a Lightning trainer cannot be kept exact, and is refused with the cure."""

from __future__ import annotations

from typing import Any

import torch

from unisono.errors import JobError, ModelError
from unisono.integrations.lightning.framework import pl

_WHOLLY = ("16-true", "transformer-engine-float16")
_SEARCHES = pl.callbacks.LearningRateFinder, pl.callbacks.BatchSizeFinder


def require_one_training(trainer: Any) -> None:
    """Refuse what trains with other loaders, or other batches, than the run has entered its loop with.

    Args:
        trainer: the trainer, before anything is set up.

    Raises:
        JobError: a callback or a setting of the trainer; says what to do.
    """
    for one in trainer.callbacks:
        if isinstance(one, _SEARCHES):
            raise JobError(
                f"{type(one).__name__} (and Tuner) trains inside of the training, and takes it back: search with a "
                f"Trainer without this strategy, in a script of its own, and write down what it finds"
            )
    if trainer.reload_dataloaders_every_n_epochs:
        raise JobError(
            "reload_dataloaders_every_n_epochs: the epochs of a run are those of one loader: have the data set or a "
            "sampler go by the epoch, or call fit once for each loader"
        )


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
    if trainer.precision_plugin.precision in _WHOLLY:
        raise JobError(
            f"precision={trainer.precision_plugin.precision!r} has weights in float16, where small updates are lost: "
            f"use precision='16-mixed' or 'bf16-mixed'"
        )
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
