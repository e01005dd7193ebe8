"""What a policy sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unisono.adapt.decision import Figure
from unisono.adapt.norms import GradientNorms, Noise
from unisono.adapt.timings import Timings
from unisono.plan.links import Links

LOCAL = ("seconds", "samples_per_s", "generation", "world_size")
"""What workers may find different in a line of metrics. It has its places in the view, where it is the same on all."""


@dataclass(frozen=True, slots=True)
class View:
    """A run as it stands at a step boundary.

    All workers see the same view. On another number of workers, and in another run, all is the same but what depends
    on workers and on time: a policy whose decisions are to be so as well leaves these aside.

    Attributes:
        step: steps committed so far.
        epoch: the pass over the data that the newest step belonged to, from 0.
        samples: used so far.
        batch_size: samples in a global batch, now.
        base_batch_size: the one that the job began with.
        shards: that a global batch is cut into, now.
        base_shards: that the job began with; there are always a multiple of these.
        world_size: workers that computed the step.
        learning_rate: of the first parameter group, now.
        metrics: the newest line of ``metrics.jsonl``, without what each worker measures by itself.
        noise: of the gradients, averaged; None as long as nothing is known.
        norms: of the newest step's gradients; None if it was not watched.
        workers: what each worker measured, by rank.
        steady: steps in a row, with this one, that these workers computed with this batch and these shards. Timings of
            the step before belong to the present setting from 2 on; below 3, memory was still made anew.
        seconds: of training so far: the slowest worker's step times, added up.
        generation: of the workers.
        departures: workers that were lost or left on notice so far, in the whole job.
        topology: the way of the partial sums over a process group; empty where there is none.
        strategy: by which workers synchronise, as its text.
        links: between the workers, as measured last; None as long as nobody has, or where workers share memory.
        observed: what policies' :meth:`~unisono.Policy.observe` said last, by the policy's name.
    """

    step: int
    epoch: int
    samples: int
    batch_size: int
    base_batch_size: int
    shards: int
    base_shards: int
    world_size: int
    learning_rate: float
    metrics: Mapping[str, Any] = field(default_factory=dict)
    noise: Noise | None = None
    norms: GradientNorms | None = None
    workers: tuple[Timings, ...] = ()
    steady: int = 0
    seconds: float = 0.0
    generation: int = 0
    departures: int = 0
    topology: str = ""
    strategy: str = "all-reduce"
    links: Links | None = None
    observed: Mapping[str, Mapping[str, Figure]] = field(default_factory=dict)

    @property
    def step_s(self) -> float:
        """Seconds that the slowest worker took for the step before; 0 if that is not known."""
        return max((each.step_s for each in self.workers), default=0.0)
