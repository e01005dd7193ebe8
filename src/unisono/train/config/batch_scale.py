"""Several times the batch a script asks for, without a change to the script: what weak scaling needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unisono.adapt.linear_scaling import LinearScaling
from unisono.adapt.policy import Policy
from unisono.errors import JobError
from unisono.job import default_shards

WARMUP_STEPS = 100
"""Steps, with the script's own batch, over whose samples the learning rate grows."""


@dataclass(frozen=True, slots=True)
class BatchScale:
    """Multiplies batch and shards, so that a shard has as many samples as before, and the learning rate.

    The rate grows from the script's to ``factor`` times that: Goyal et al., arXiv 1706.02677.

    Attributes:
        factor: by which all three are multiplied; 1 leaves everything as it is.
        warmup_steps: over whose samples the rate grows, counted with the script's own batch.
    """

    factor: int = 1
    warmup_steps: int = WARMUP_STEPS

    def scaled(self, batch_size: Any, shards: Any) -> dict[str, Any]:
        """``batch_size`` and ``shards`` of the job. What is no number stays, for the job to refuse.

        Args:
            batch_size: that the script asks for.
            shards: likewise; None for those that follow from its batch.
        """
        if self.factor > 1 and isinstance(batch_size, int) and batch_size >= 1:
            shards = default_shards(batch_size) if shards is None else shards
            batch_size, shards = batch_size * self.factor, shards * self.factor
        return {"batch_size": batch_size, "shards": shards}

    def policies(self, given: Sequence[Policy], batch_size: int) -> list[Policy]:
        """Those of a run, and the one that brings the learning rate to its multiple.

        Args:
            given: what the script and the environment name.
            batch_size: of the job, multiplied.

        Raises:
            JobError: one of them does the same already.
        """
        if self.factor == 1:
            return list(given)
        if any(isinstance(one, LinearScaling) for one in given):
            raise JobError(
                f"UNISONO_BATCH_SCALE={self.factor} multiplies the learning rate, and so does the LinearScaling among "
                f"this run's policies: leave one of the two out"
            )
        return [*given, LinearScaling(self.factor, self.warmup_steps * batch_size // self.factor)]
