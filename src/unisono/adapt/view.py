"""The view of a run that a policy gets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from unisono.adapt.norms import GradientNorms, Noise
from unisono.plan.links import Links

# What a policy wants, and why.

Verb = Literal[
    "resize",
    "set_batch_size",
    "set_learning_rate",
    "set_topology",
    "set_strategy",
    "set_balance",
    "replace",
    "measure_links",
    "checkpoint",
    "stop",
]

Figure = float | int | str | None


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision of one policy, taken after a step. All decisions of a step take effect together.

    Attributes:
        policy: its name.
        verb: the action.
        value: the action's value, if it takes one.
        why: the figures behind it, by name.
        shards: the new number of shards of a batch, if the verb sets it.
    """

    policy: str
    verb: Verb
    value: float | int | str | None = None
    why: Mapping[str, Figure] = field(default_factory=dict)
    shards: int | None = None

    def __str__(self) -> str:
        cut = "" if self.shards is None else f", shards={self.shards}"
        return f"{self.policy}: {self.verb}({'' if self.value is None else self.value}{cut})"


def decisions_digest(decisions: Sequence[Decision]) -> int:
    """A number above 0 and below 2**49 that differs where decisions do; the figures behind them do not count."""
    told = json.dumps([[one.policy, one.verb, one.value, one.shards] for one in decisions])
    return 1 + int.from_bytes(hashlib.blake2b(told.encode(), digest_size=6).digest(), "little")


# What a worker measured of its own steps.


@dataclass(frozen=True, slots=True)
class Timings:
    """One worker's figures, all of its own clock. They ride with the control word, so that all workers see the same.

    Attributes:
        shard_s: seconds that one shard took, in this step.
        step_s: seconds of the step before, from the end of the one before it to its own end.
        data_s: seconds of the step spent waiting for samples.
        exposed_s: seconds of the step spent waiting for the reduction after everything was computed.
        update_s: seconds of the step spent in the optimizer's update.
        sent_bytes: bytes of gradients and control words that this worker sent in the step before.
        formed_s: seconds that forming the present generation took; 0 in the first one.
        checkpoint_s: seconds that the newest checkpoint took; 0 where none was written.
        sent_messages: messages that this worker sent in the step before.
    """

    shard_s: float = 0.0
    step_s: float = 0.0
    data_s: float = 0.0
    exposed_s: float = 0.0
    update_s: float = 0.0
    sent_bytes: float = 0.0
    formed_s: float = 0.0
    checkpoint_s: float = 0.0
    sent_messages: float = 0.0


# How a step was computed.


@dataclass(frozen=True, slots=True)
class Setting:
    """The conditions under which a step was computed: all that its times depend on.

    Attributes:
        generation: the number of the workers' generation.
        world_size: the number of workers.
        batch_size: samples in the global batch that was wanted; the last one of an epoch may have had fewer.
        shards: into which it was cut.
        topology: the way of the partial sums over a process group; empty where there was none.
        departures: workers that had been lost by then, or had left on notice, in the whole job.
    """

    generation: int = 0
    world_size: int = 0
    batch_size: int = 0
    shards: int = 0
    topology: str = ""
    departures: int = 0


# How large a global batch is, and how fine it is cut.


@dataclass(frozen=True, slots=True)
class BatchShape:
    """A global batch as numbers.

    Attributes:
        samples: the number of samples in it.
        shards: the number of shards, whose sizes differ by at most one sample.
    """

    samples: int
    shards: int

    @property
    def largest_shard(self) -> int:
        """Samples in the largest shard."""
        return -(-self.samples // self.shards)


def shards_for(batch_size: int, base_shards: int, largest_shard: int) -> int:
    """Into how many shards a batch is cut so that none is larger than a worker's memory allows.

    Args:
        batch_size: samples in the batch.
        base_shards: the job's number of shards.
        largest_shard: samples in one shard at most.

    Returns:
        the smallest power of two times ``base_shards`` that does it.

    Raises:
        ValueError: a number is below 1.
    """
    if min(batch_size, base_shards, largest_shard) < 1:
        given = f"batch_size={batch_size}, base_shards={base_shards}, largest_shard={largest_shard}"
        raise ValueError(f"shards_for({given}): all need to be above 0")
    shards = base_shards
    while BatchShape(batch_size, shards).largest_shard > largest_shard:
        shards *= 2
    return shards


# What a policy sees.

LOCAL = ("seconds", "samples_per_s", "generation", "world_size")
"""What workers may find different in a line of metrics. It has its places in the view, where it is the same on all."""


@dataclass(frozen=True, slots=True)
class View:
    """A run as it stands at a step boundary.

    All workers see the same view. On another number of workers, and in another run, all is the same but what depends
    on workers and on time: a policy whose decisions are to be so as well leaves these aside.

    Attributes:
        step: the number of steps committed so far.
        epoch: the pass over the data that the newest step belonged to, from 0.
        samples: the number of samples used so far.
        batch_size: the present number of samples in a global batch.
        base_batch_size: the number of samples in the global batch that the job began with.
        shards: the present number of shards of a global batch.
        base_shards: the number of shards that the job began with; ``shards`` is a multiple of it.
        world_size: the number of workers that computed the step.
        learning_rate: the present learning rate of the first parameter group.
        metrics: the newest line of ``metrics.jsonl``, without what each worker measures by itself.
        noise: the averaged noise of the gradients; None as long as it is unknown.
        norms: the squared norms of the newest step's gradients; None if they were not measured.
        workers: the measurements of each worker, by rank.
        steady: steps in a row, with this one, that these workers computed with this batch and these shards. Timings of
            the step before belong to the present setting from 2 on; below 3, memory was still made anew.
        seconds: the seconds of training so far: the sum of the slowest worker's step times.
        generation: the number of the workers' generation.
        departures: workers that were lost or left on notice so far, in the whole job.
        topology: the way of the partial sums over a process group; empty where there is none.
        strategy: the strategy in use, as its text.
        links: the newest measurement of the connections between the workers; None before the first, or where workers
            share memory.
        observed: the newest result of each policy's :meth:`~unisono.Policy.observe`, by the policy's name.
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
