"""The losses of a shard: what each is a mean of, and what they come to over the global batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from keras.src.losses import loss as of_keras
from torch import Tensor

from unisono.errors import ModelError
from unisono.integrations.refused import refused

BY_WEIGHT = "mean_with_sample_weight"


class LossWeight:
    """The weight of a shard, by which its mean loss counts in that of the global batch.

    Attributes:
        samples: the number of the shard's samples.
    """

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self._is_plain = False
        self._found: list[float] = []

    def note(self, weight: Tensor | None) -> None:
        """A loss was a mean over samples, or over what some numbers add up to."""
        if weight is None:
            self._is_plain = True
        else:
            self._found.append(float(weight))

    @property
    def value(self) -> float:
        """The weight: samples, or what a mask leaves, or the sum of the samples' weights.

        Raises:
            ModelError: losses are means of different things.
        """
        if not self._found:
            return float(self.samples)
        if self._is_plain or len(set(self._found)) > 1:
            counts = [*(["all samples"] if self._is_plain else []), *(f"{one:g}" for one in self._found)]
            raise ModelError(refused("keras.means-differ", counts=", ".join(counts), reduction=BY_WEIGHT))
        return self._found[0]


@contextmanager
def weighed(samples: int, batch: int) -> Iterator[LossWeight]:
    """Losses of Keras are noted in here, and sums are such that the mean over the shards is that of the global batch.

    Args:
        samples: the number of the shard's samples.
        batch: the number of the global batch's samples.

    Yields:
        the shard's weight, once all losses are computed.
    """
    found, usual = LossWeight(samples), of_keras.reduce_weighted_values

    def reduced(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: Any = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        if reduction not in (None, "none"):
            found.note(None if reduction == "sum" else _weight(sample_weight, mask, reduction))
        value = usual(values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)
        return value * (batch / samples) if reduction == "sum" else value

    of_keras.reduce_weighted_values = reduced
    try:
        yield found
    finally:
        of_keras.reduce_weighted_values = usual


@torch.no_grad()
def _weight(sample_weight: Any, mask: Any, reduction: str) -> Tensor | None:
    """What a loss is divided by, unless that is its number of values."""
    if reduction == BY_WEIGHT:
        own = None if sample_weight is None else torch.as_tensor(sample_weight).clone()  # Keras multiplies it in place
        weight = of_keras.apply_mask(own, mask, dtype="float32", reduction=reduction)
        return None if weight is None else torch.as_tensor(weight).double().sum()
    return None if mask is None else torch.as_tensor(mask).double().sum()


class LossTracker:
    """Has Keras' mean of the loss go by the global batches' losses, and not by their shards'.

    Args:
        model: the Keras model, compiled.
    """

    def __init__(self, model: Any) -> None:
        self._tracker = getattr(model, "_loss_tracker", None)
        self._before: list[Tensor] = []

    @torch.no_grad()
    def step_begins(self) -> None:
        """A step begins."""
        if self._tracker is not None:
            self._before = [one.value.detach().clone() for one in self._tracker.variables]

    @torch.no_grad()
    def step_ends(self, loss: float, samples: int) -> None:
        """A step is done. What its shards have told is replaced, if it was their means, each with its samples."""
        if self._tracker is None:
            return
        (total, count), kept = self._before, self._tracker.total.value
        if float(self._tracker.count.value - count) == samples:
            kept.copy_(total + torch.tensor(loss, dtype=total.dtype, device=total.device) * samples)
