"""What a policy sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unisono.adapt.norms import Noise


@dataclass(frozen=True, slots=True)
class View:
    """A run as it stands at a step boundary.

    All but ``world_size`` and the times among the metrics is the same on any number of workers. A policy whose
    decisions are to be so as well leaves those aside.

    Attributes:
        step: steps committed so far.
        epoch: the pass over the data that the newest step belonged to, from 0.
        samples: used so far.
        batch_size: samples in a global batch, now.
        base_batch_size: the one that the job began with.
        shards: of the job.
        world_size: workers that take part.
        learning_rate: of the first parameter group, now.
        metrics: the newest line of ``metrics.jsonl``.
        noise: of the gradients, averaged; None as long as nothing is known.
    """

    step: int
    epoch: int
    samples: int
    batch_size: int
    base_batch_size: int
    shards: int
    world_size: int
    learning_rate: float
    metrics: Mapping[str, Any] = field(default_factory=dict)
    noise: Noise | None = None
