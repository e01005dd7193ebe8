"""Evaluations and predictions that every worker makes of all batches, with Keras' callbacks around each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import torch

from unisono.data.generators import generators_kept, seed_generators
from unisono.errors import DataError
from unisono.integrations.keras.data import KerasData
from unisono.integrations.keras.fitting import OnMain
from unisono.integrations.keras.shard_step import own_casts
from unisono.integrations.keras.variables import seeds_drawn
from unisono.plan.order import Stream, stream_seed
from unisono.train.loop.prefetch import to_device
from unisono.train.run import Run

STOPS = {"test": "stop_evaluating", "predict": "stop_predicting"}
"""The attributes of a model by which callbacks end an evaluation or a prediction."""


def sees_batches(callbacks: Any, kind: str) -> bool:
    """Whether a callback of the script's own is called around each batch. ``kind`` is ``test`` or ``predict``."""
    for name in (f"on_{kind}_batch_begin", f"on_{kind}_batch_end"):
        for callback in callbacks.callbacks:
            own = callback.inner if isinstance(callback, OnMain) else callback
            is_keras = getattr(keras.callbacks, type(own).__name__, None) is type(own)
            has_method = getattr(type(own), name, None) not in (getattr(keras.callbacks.Callback, name), None)
            if name in vars(own or callback) or (has_method and not is_keras):
                return True
    return False


@dataclass(frozen=True)
class WholePass:
    """A pass over data in which this worker evaluates, or predicts, all batches.

    Attributes:
        kind: ``test`` or ``predict``.
        salt: the number by which the draws of this pass differ from those of others behind the same step.
    """

    run: Run
    model: Any
    samples: KerasData
    batch_size: int
    kind: str
    callbacks: Any
    salt: int = 0

    def results(self, logs_of: Callable[[Any], Any]) -> list[Any]:
        """What the model's step returns for each batch; ``logs_of`` makes of it what callbacks get.

        Raises:
            DataError: there is no batch.
        """
        run, model, returned = self.run, self.model, list[Any]()
        before, after = (getattr(self.callbacks, f"on_{self.kind}_batch_{time}") for time in ("begin", "end"))
        step: Callable[[Any], Any] = getattr(model, f"{self.kind}_step")
        key = run.job.seed, Stream.EVALUATION, run.inside.trained.progress.position.step
        setattr(model, STOPS[self.kind], False)
        model.eval()
        with generators_kept():
            for number, batch in enumerate(self.samples.collated(self.batch_size)):
                seed_generators(stream_seed(*key, number, self.salt))
                before(number)
                with torch.no_grad(), seeds_drawn(model), own_casts(model):
                    returned.append(step(self.samples.unpack(to_device(batch, run.device))))
                after(number, logs_of(returned[-1]))
                if getattr(model, STOPS[self.kind]):
                    break
        if not returned:
            raise DataError(
                "the data have no batch left: make a generator endless, and say steps (fit: validation_steps)"
            )
        self.samples.go_to(self.samples.position + len(returned))
        return returned
