"""Policies at work: who is asked when, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict
from typing import Any, Literal, NoReturn

from torch.optim import Optimizer

from unisono.adapt.view import BatchShape, Decision, Figure, Policy, Verb, View, decisions_digest
from unisono.errors import JobError, JobMismatch, PolicyError, Unreadable
from unisono.plan.topology import TOPOLOGIES
from unisono.received import short, value_of
from unisono.sync.named import strategy_of
from unisono.sync.strategy import AllReduce, Strategy
from unisono.train.config.run_config import RunConfig, StrategyConstraints
from unisono.train.group.workers import Workers
from unisono.train.state.registered import all_or_nothing

NAMES: dict[Verb, tuple[str, ...]] = {"set_topology": ("auto", *TOPOLOGIES), "set_balance": ("even", "speed")}
"""What verbs can be given that take a name."""

FORMS = {
    "batch_size": int,
    "shards": int,
    "base": BatchShape,
    "rate": float,
    "topology": str | None,
    "strategies": tuple[str, str],
    "balances": bool,
    "measures_links": bool,
    "has_begun": bool,
    "digest": int,
    "stopped": int | None,
    "observed": dict[str, dict[str, Figure | bool]],
    "policies": dict[str, dict[str, Any]],
}
"""Of the parts of its state."""

Hook = Literal["before_train", "after_step", "after_epoch", "after_train"]


class PolicyState:
    """The settings that policies have changed so far, and the policies that decide next.

    Args:
        policies: the policies of the run, in the order in which they are asked.
        batch_size: the number of samples of the job's first global batch.
        shards: the job's number of shards.
        balances: whether shards are split by speed to begin with.
        strategy: the job's first strategy.
        constraints: the run's constraints on strategies that policies choose; by default none.

    Attributes:
        constraints: the argument of that name.
        batch_size: the number of samples of the next step.
        shards: the number of shards of the next step: a multiple of the job's.
        rate: the factor on the script's learning rates.
        topology: the topology of the process group, if policies have chosen one.
        strategy: the strategy in use.
        balances: whether shards are split by speed.
        measures_links: whether a policy wants the speed of connections measured.
        has_begun: whether policies were told that training has begun.
        stopped: the number of the loop that is to end at the run's present position; None for none.
        decided: the decisions of the newest boundary.
        digest: a digest of ``decided``; 0 if there are no policies.
        observed: the newest observations of things outside of the training, by policy.

    Raises:
        JobError: two policies have one name, or one of them may choose a strategy that cannot be.
    """

    def __init__(
        self,
        policies: Sequence[Policy],
        batch_size: int,
        shards: int,
        *,
        balances: bool = False,
        strategy: Strategy | None = None,
        constraints: StrategyConstraints | None = None,
    ) -> None:
        self.batch_size, self.shards, self.rate = batch_size, shards, 1.0
        self.topology: str | None = None
        self.strategy = self._first_strategy = strategy or AllReduce()
        self.balances, self.measures_links = balances, False
        self.has_begun = False
        self.stopped: int | None = None
        self.decided: tuple[Decision, ...] = ()
        self.digest = 0
        self.observed: dict[str, dict[str, Figure]] = {}
        self._base, self.constraints = BatchShape(batch_size, shards), constraints or StrategyConstraints()
        self._policies = {policy.name: policy for policy in policies}
        if len(self._policies) < len(policies):
            names = ", ".join(policy.name for policy in policies)
            raise JobError(f"policies={names}: each name once; give one of them another name")
        for policy in policies:
            self._read_strategies(policy)

    @classmethod
    def of(cls, config: RunConfig) -> PolicyState:
        """As a run begins."""
        job, about = config.job, config.adaptation
        return cls(
            about.policies,
            job.batch_size or job.shards,  # a loop that says its own comes later
            job.shards,
            balances=config.settings.communication.balance == "speed",
            strategy=about.strategy,
            constraints=about.constraints,
        )

    def refuse(self, workers: Workers, step: int) -> NoReturn:
        """The workers' decisions before this step differ. Collective.

        Raises:
            PolicyError: says which worker decided what.
        """
        everybody = workers.gather_json([str(one) for one in self.decided])
        listed = "".join(f"\n  rank {rank}: {', '.join(words) or 'nothing'}" for rank, words in enumerate(everybody))
        raise PolicyError(
            f"the policies decided differently before step {step}; a policy must not go by its own clock, its "
            f"rank or chance:{listed}"
        )

    @property
    def is_empty(self) -> bool:
        """Whether there are no policies."""
        return not self._policies

    @property
    def shape(self) -> BatchShape:
        """Of the next step's batch."""
        return BatchShape(self.batch_size, self.shards)

    @property
    def policies(self) -> list[Policy]:
        """Of the run, in order."""
        return list(self._policies.values())

    @property
    def names(self) -> list[str]:
        """Of the policies, in order."""
        return list(self._policies)

    @property
    def needs_monitor(self) -> bool:
        """Whether a policy reads what is measured of the gradients."""
        return any(policy.needs_monitor for policy in self._policies.values())

    def observers(self, step: int) -> list[Policy]:
        """The policies that look at the world outside after ``step`` steps."""
        return [each for each in self._policies.values() if each.observe_every and step % each.observe_every == 0]

    def ask(self, hook: Hook, view: View) -> list[Decision]:
        """Ask all policies.

        Raises:
            PolicyError: one failed, or wants something that makes no sense; names it.
        """
        found: list[Decision] = []
        for policy in self._policies.values():
            try:
                getattr(policy, hook)(view)
            except Exception as error:
                what = f"{type(error).__name__}: {error}"
                raise PolicyError(f"the policy {policy.name} failed in {hook}: {what}") from error
            found += policy.decided()
        for decision in found:
            self._check(decision)
        return found

    def take(self, decisions: Sequence[Decision], view: View, loop: int) -> None:
        """Have decisions take effect, all together.

        Args:
            decisions: the decisions of all policies.
            view: the view on which they were taken.
            loop: the number of the present loop.
        """
        self.decided, self.digest = tuple(decisions), decisions_digest(decisions)
        before = self.shards
        for decision in decisions:
            match decision.verb:
                case "set_batch_size":
                    self.batch_size, self.shards = int(decision.value or 0), decision.shards or before
                case "set_learning_rate" if view.learning_rate:
                    self.rate *= float(decision.value or 0.0) / view.learning_rate
                case "set_topology":
                    self.topology = str(decision.value)
                case "set_strategy":
                    self.strategy = self._read(str(decision.value))
                case "set_balance":
                    self.balances = decision.value == "speed"
                case "measure_links":
                    self.measures_links = True
                case "stop":
                    self.stopped = loop

    def begin_loop(self, batch_size: int, *, is_under_way: bool) -> None:
        """A loop begins whose batches have so many samples, as long as no policy changes that.

        Args:
            batch_size: the number of samples.
            is_under_way: whether the run stands in the middle of the loop.

        Raises:
            JobMismatch: the batches of its steps so far had another size.
        """
        if is_under_way and self.is_empty and batch_size != self.batch_size:
            raise JobMismatch(
                f"the loop that resumes has batches of {batch_size} samples here, and had {self.batch_size} when its "
                f"checkpoint was written: go on with those, or begin in another run folder"
            )
        if self.is_empty:
            self.batch_size = batch_size

    @contextmanager
    def scaled(self, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """The optimizers' learning rates are what the policies made of them; the script finds its own again."""
        if self.rate == 1.0:
            yield
            return
        groups = [group for optimizer in optimizers for group in optimizer.param_groups if "lr" in group]
        own = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * self.rate
        try:
            yield
        finally:
            for group, rate in zip(groups, own, strict=True):
                group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        """All of it, as numbers and text by name: a copy, which later steps do not reach."""
        apart: dict[str, Any] = {
            "base": asdict(self._base),
            "strategies": [str(self._first_strategy), str(self.strategy)],
            "policies": {name: deepcopy(policy.state_dict()) for name, policy in self._policies.items()},
        }
        return {name: apart[name] if name in apart else deepcopy(getattr(self, name)) for name in FORMS}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`. A policy that is new begins anew; of one that is gone its effects stay.

        A job that was changed on purpose, to another batch, number of shards or strategy, begins with its own.

        Raises:
            JobError: policies had chosen a strategy that this run cannot use; says what to change.
            Unreadable: a value is of a wrong type, or makes no sense. Of this too, nothing has changed then, unless
                a policy of somebody else's has set a part of its state.
        """
        with all_or_nothing(self, *self._policies.values()):
            found = value_of(FORMS, deepcopy(state), "state")
            self._set_batch(found)
            self._set_rest(found)
            for name, policy in self._policies.items():
                if name in found["policies"]:
                    policy.load_state_dict(found["policies"][name])

    def _set_batch(self, found: Mapping[str, Any]) -> None:
        shape = BatchShape(found["batch_size"], found["shards"])
        if found["base"] == self._base:
            if shape.samples < 1 or shape.shards < 1 or shape.shards % self._base.shards:
                raise Unreadable(f"a batch of {shape.samples} samples in {shape.shards} shards cannot be")
            self.batch_size, self.shards = shape.samples, shape.shards
        first, strategy = found["strategies"]
        if first == str(self._first_strategy):
            self.strategy = self._read(strategy)

    def _set_rest(self, found: Mapping[str, Any]) -> None:
        if not 0 < found["rate"] < math.inf or not 0 <= found["digest"] < 2**49:
            raise Unreadable(f"rate={found['rate']!r} is above 0, digest={found['digest']!r} from 0 and below 2**49")
        if found["topology"] not in (None, *NAMES["set_topology"]):
            raise Unreadable(f"there is no topology {short(found['topology'])}")
        for name in ("rate", "topology", "balances", "measures_links", "has_begun", "digest", "stopped", "observed"):
            setattr(self, name, found[name])

    def _check(self, decision: Decision) -> None:
        value = decision.value
        wrong = {
            "resize": not isinstance(value, int) or value < 1,
            "replace": not isinstance(value, int) or value < 0,
            "set_learning_rate": not isinstance(value, int | float) or not 0 < value < float("inf"),
        }
        if wrong.get(decision.verb):
            raise PolicyError(
                f"the policy {decision.policy} wants {decision.verb}({short(value)}): there is at least 1 worker, "
                f"ranks count from 0, and a rate is above 0"
            )
        known = NAMES.get(decision.verb)
        if known is not None and value not in known:
            raise PolicyError(
                f"the policy {decision.policy} wants {decision.verb}({short(value)}): use one of {', '.join(known)}"
            )
        if decision.verb == "set_strategy":
            self._check_strategy(decision)
        if decision.verb == "set_batch_size":
            self._check_batch(decision)

    def _check_strategy(self, decision: Decision) -> None:
        try:
            self._read(str(decision.value))
        except JobError as error:
            raise PolicyError(
                f"the policy {decision.policy} wants set_strategy({short(decision.value)}): {error}"
            ) from None

    def _read_strategies(self, policy: Policy) -> None:
        try:
            policy.read_strategies(lambda given: str(self._read(given)))
        except JobError as error:
            raise JobError(f"the policy {policy.name} may choose a strategy that cannot be: {error}") from None

    def _read(self, given: Any) -> Strategy:
        strategy = strategy_of(given)
        self.constraints.require(strategy)
        return strategy

    def _check_batch(self, decision: Decision) -> None:
        samples, base = decision.value, self._base.shards
        shards: Any = decision.shards  # whatever the policy gave
        cut = "" if shards is None else f", shards={short(shards)}"
        wants = f"the policy {decision.policy} wants set_batch_size({short(samples)}{cut})"
        if shards is not None and (not isinstance(shards, int) or shards < 1 or shards % base):
            raise PolicyError(
                f"{wants}: shards can only be cut finer, into a multiple of the job's {base} shards, such as {2 * base}"
            )
        least = shards or self.shards
        if not isinstance(samples, int) or samples < least:
            raise PolicyError(
                f"{wants}: a batch has at least as many samples as shards ({least}); the number of shards can be "
                f"{base}, which the job has, or a multiple of it"
            )


def observed(policy: Policy, view: View) -> dict[str, Figure]:
    """What a policy sees of the world outside.

    Raises:
        PolicyError: it failed, or saw something else than figures; names it.
    """
    try:
        found: dict[Any, Any] = dict(policy.observe(view))
    except Exception as error:
        raise PolicyError(f"the policy {policy.name} failed in observe: {type(error).__name__}: {error}") from error
    wrong = [name for name, value in found.items() if not isinstance(value, Figure | None)]
    if wrong or not all(isinstance(name, str) for name in found):
        raise PolicyError(f"the policy {policy.name} observed {short(found)}: return numbers, text or None, by name")
    return found
