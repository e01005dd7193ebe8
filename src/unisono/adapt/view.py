"""Policies, which watch training from inside and change it while it runs, and the view of it that they get."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from numbers import Real
from typing import Any, ClassVar, Literal

from unisono.adapt.norms import GradientNorms, Noise
from unisono.errors import Unreadable
from unisono.plan.topology import Links
from unisono.received import short, value_of

# The decisions of a policy, and their reasons.

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
    """A number above 0 and below 2**49 that differs if decisions differ; the figures behind them do not count."""
    text = json.dumps([[decision.policy, decision.verb, decision.value, decision.shards] for decision in decisions])
    return 1 + int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "little")


# A worker's measurements of its own steps.


@dataclass(frozen=True, slots=True)
class Timings:
    """A worker's figures, by its own clock. They travel with the control word, so that all workers see the same.

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


# The conditions under which a step was computed.


@dataclass(frozen=True, slots=True)
class Setting:
    """The conditions under which a step was computed: all that its times depend on.

    Attributes:
        generation: the number of the workers' generation.
        world_size: the number of workers.
        batch_size: the number of samples in a global batch; the last one of an epoch may have had fewer.
        shards: the number of shards of the batch.
        topology: the way of the partial sums over a process group; empty where there was none.
        departures: the number of workers that had been lost by then, or had left on notice, in the whole job.
    """

    generation: int = 0
    world_size: int = 0
    batch_size: int = 0
    shards: int = 0
    topology: str = ""
    departures: int = 0


# The size of a global batch, and of its shards.


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
        """The number of samples in the largest shard."""
        return -(-self.samples // self.shards)


def shards_for(batch_size: int, base_shards: int, largest_shard: int) -> int:
    """The number of shards into which to split a batch so that none is larger than a worker's memory allows.

    Args:
        batch_size: the number of samples in the batch.
        base_shards: the job's number of shards.
        largest_shard: the largest number of samples in one shard.

    Returns:
        the smallest sufficient number that is a power of two times ``base_shards``.

    Raises:
        ValueError: a number is below 1.
    """
    if min(batch_size, base_shards, largest_shard) < 1:
        arguments = f"batch_size={batch_size}, base_shards={base_shards}, largest_shard={largest_shard}"
        raise ValueError(f"shards_for({arguments}): all need to be above 0")
    shards = base_shards
    while BatchShape(batch_size, shards).largest_shard > largest_shard:
        shards *= 2
    return shards


# The view of a policy.

LOCAL = ("seconds", "samples_per_s", "generation", "world_size")
"""The fields of a line of metrics that may differ between workers. In the view, they are the same on all workers."""


@dataclass(frozen=True, slots=True)
class View:
    """A run as it stands at a step boundary.

    All workers see the same view. With another number of workers, and in another run, only the values that depend on
    workers and on time differ: a policy that is to decide the same there must not use them.

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
        metrics: the newest line of ``metrics.jsonl``, without the values that each worker measures by itself.
        noise: the averaged noise of the gradients; None as long as it is unknown.
        norms: the squared norms of the newest step's gradients; None if they were not measured.
        workers: the measurements of each worker, by rank.
        steady: the number of steps in a row, with this one, that these workers computed with this batch and these
            shards. Timings of the step before belong to this setting from 2 on; below 3, memory was still allocated.
        seconds: the seconds of training so far: the sum of the slowest worker's step times.
        generation: the number of the workers' generation.
        departures: the number of workers that were lost or left on notice so far, in the whole job.
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
        return max((worker.step_s for worker in self.workers), default=0.0)


ReadStrategy = Callable[[object], str]
"""Returns the canonical text of a strategy, or of its text. Raises ``JobError`` for one that the run cannot use."""


@cache
def _name_of_class(name: str) -> str:
    return "-".join(re.findall(r"[A-Z][a-z0-9]*", name.removesuffix("Policy"))).lower()


class Policy:
    """Base of all policies. Override the hooks that matter, and call the verbs in them.

    Every worker has its own copy of each policy and calls it at the same steps; all copies have to decide alike, which
    is checked. A decision takes effect before the next step, on every worker, and is written into the journal with the
    figures that the verb got. A policy's public attributes (numbers, text, lists and dicts of them) are part of every
    checkpoint.

    Attributes:
        needs_monitor: whether it reads ``view.noise``, which then is measured in every step.
        curvature_every: steps from one before whose update the critical sharpness is measured to the next, where the
            script asks for no other measurement of curvature; 0 for none.
        observe_every: steps from one call of :meth:`observe` to the next; 0 for never.
    """

    needs_monitor: ClassVar[bool] = False
    curvature_every: ClassVar[int] = 0
    observe_every: int = 0
    _forms: ClassVar[Mapping[str, Any]] = {}
    """The types of public attributes whose first values do not show them, such as those of empty lists."""

    @property
    def name(self) -> str:
        """The name in the journal and on the command line: ``noise-scale`` for ``NoiseScalePolicy``."""
        return _name_of_class(type(self).__name__)

    def read_strategies(self, read: ReadStrategy) -> None:
        """Read all strategies that this policy may choose, so that a wrong one is refused when the run begins.

        Args:
            read: a function to call with each of them; it returns the text that ``view.strategy`` will have.
        """

    # -- hooks

    def before_train(self, view: View) -> None:
        """Called before the first step is computed."""

    def after_step(self, view: View) -> None:
        """Called when a step is committed, and the loop's body is done."""

    def after_epoch(self, view: View) -> None:
        """Called after the last step of an epoch, after :meth:`after_step`."""

    def after_train(self, view: View) -> None:
        """Called when the script finishes the run. Verbs do nothing any more."""

    def observe(self, view: View) -> Mapping[str, Figure]:
        """Observe what is outside of training: clocks, prices, notices. Called on the main worker, before other hooks.

        Returns:
            figures, which all workers find in ``view.observed[self.name]`` until the next call.
        """
        return {}

    # -- verbs

    def resize(self, workers: int, **why: Figure) -> None:
        """Ask for another number of workers; only elastic jobs have one."""
        self._decide("resize", workers, why)

    def set_batch_size(self, samples: int, shards: int | None = None, **why: Figure) -> None:
        """Change the global batch.

        Args:
            samples: the number of samples in it.
            shards: the number of shards, a multiple of the job's (``view.base_shards``). A worker computes its shards
                one after the other, so its memory is that of the largest. By default the number that there is stays,
                and shards become larger or smaller.
            why: the figures behind the decision, by name.
        """
        self._decide("set_batch_size", samples, why, shards)

    def set_learning_rate(self, rate: float, **why: Figure) -> None:
        """Change the learning rate of the first parameter group; all others change by the same factor.

        What the script does to the rates itself (a scheduler) goes on: the factor is applied on top.
        """
        self._decide("set_learning_rate", rate, why)

    def set_topology(self, name: str, **why: Figure) -> None:
        """Change the way of the partial sums: one of ``direct``, ``ring``, ``tree``, ``star``; ``auto`` measures anew.

        Where there is no process group (workers share memory, or there is one) it makes no difference.
        """
        self._decide("set_topology", name, why)

    def set_strategy(self, strategy: object, **why: Figure) -> None:
        """Change how workers synchronise: a strategy, or its text, such as ``local-sgd:every=16``."""
        self._decide("set_strategy", str(strategy), why)

    def set_balance(self, balance: str, **why: Figure) -> None:
        """Split shards evenly (``even``), or by the workers' speed (``speed``); only elastic jobs do the latter."""
        self._decide("set_balance", balance, why)

    def replace(self, rank: int, **why: Figure) -> None:
        """Have a worker leave, and another one started instead of it; only in elastic jobs."""
        self._decide("replace", rank, why)

    def measure_links(self, **why: Figure) -> None:
        """Measure latency and bandwidth between each two workers after the next step: ``view.links`` has them."""
        self._decide("measure_links", None, why)

    def checkpoint(self, **why: Figure) -> None:
        """Write a checkpoint."""
        self._decide("checkpoint", None, why)

    def stop(self, **why: Figure) -> None:
        """End the loop."""
        self._decide("stop", None, why)

    # -- state, and decisions

    def state_dict(self) -> dict[str, Any]:
        """The public attributes."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`, and nothing else.

        Raises:
            Unreadable: it has another name, or a value of another kind. Then nothing has changed.
        """
        own = self.state_dict()
        for name, value in state.items():
            if name not in own:
                raise Unreadable(
                    f"the policy {self.name} keeps no {short(name)}, but {', '.join(own) or 'nothing'}: set what it "
                    f"keeps in its __init__"
                )
            value_of(self._forms.get(name, Any), value, name)
            _require_alike(own[name], value, f"{name} of the policy {self.name}")
        vars(self).update(state)

    def decided(self) -> list[Decision]:
        """Return the decisions since the last call, and forget them."""
        decisions = vars(self).pop("_decisions", [])
        return list(decisions)

    def _decide(
        self, verb: Verb, value: float | int | str | None, why: Mapping[str, Figure], shards: int | None = None
    ) -> None:
        vars(self).setdefault("_decisions", []).append(Decision(self.name, verb, value, dict(why), shards))


def _require_alike(own: Any, value: Any, name: str) -> None:
    """Refuse a value of another kind than the present one. All numbers are of one kind; None may become anything."""
    if own is None or value is None or type(own) is type(value) or (isinstance(own, Real) and isinstance(value, Real)):
        return
    raise Unreadable(f"{name} is {short(value)}, and no {type(own).__name__}")
