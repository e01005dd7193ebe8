"""Policies at work: who is asked when, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import asdict
from typing import Any, Literal, NamedTuple, NoReturn

from torch.optim import Optimizer

from unisono.adapt.view import BatchShape, Decision, Figure, Policy, Verb, View, decisions_digest
from unisono.errors import JobError, JobMismatch, PolicyError, Unreadable
from unisono.plan.topology import TOPOLOGIES
from unisono.received import short, value_of
from unisono.sync import AllReduce, Strategy, strategy_of
from unisono.train.config.run_config import RunConfig, StrategyConstraints
from unisono.train.group.workers import Workers
from unisono.train.state.registry import Copied, Registry

NAMES: dict[Verb, tuple[str, ...]] = {"set_topology": ("auto", *TOPOLOGIES), "set_balance": ("even", "speed")}
"""The names that verbs accept which take a name."""


class Numbers(NamedTuple):
    """The numbers that a verb can be given, in words, and from the least to the most."""

    words: str
    kind: Any
    least: float
    most: float = math.inf

    def have(self, value: Any) -> bool:
        """Whether a value is one of them."""
        return isinstance(value, self.kind) and not isinstance(value, bool) and self.least <= value <= self.most


NUMBERS: dict[Verb, Numbers] = {
    "resize": Numbers("a whole number of workers, at least 1", int, 1),
    "replace": Numbers("the rank of a worker, a whole number from 0 on", int, 0),
    "set_learning_rate": Numbers("a rate, a number from 1e-30 to 1e30", int | float, 1e-30, 1e30),
}
"""What verbs can be given that take a number."""

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
"""The types of the parts of its state."""

Hook = Literal["before_train", "after_step", "after_epoch", "after_train"]


class PolicyState:
    """The settings that policies have changed so far, and the policies that decide next.

    Args:
        batch_size: the number of samples of the job's first global batch.
        shards: the job's number of shards.
        balances: whether shards are split by speed to begin with.
        strategy: the job's first strategy.

    Attributes:
        batch_size: the number of samples of the next step.
        shards: the number of shards of the next step: a multiple of the job's.
        rate: the factor on the script's learning rates.
        topology: the topology of the process group, if policies have chosen one.
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
        self.policies, self.names, self.is_empty = list(policies), [policy.name for policy in policies], not policies
        if len(set(self.names)) < len(policies):
            raise JobError(f"policies={', '.join(self.names)}: each name once; give one of them another name")
        for policy in policies:
            if type(policy.observe_every) is not int or policy.observe_every < 0:
                needs = "needs a whole number of steps, 0 for never"
                raise JobError(f"the policy {policy.name} has observe_every={short(policy.observe_every)}: {needs}")
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
        everybody = workers.gather_json([str(decision) for decision in self.decided])
        listed = "".join(f"\n  rank {rank}: {', '.join(words) or 'nothing'}" for rank, words in enumerate(everybody))
        raise PolicyError(
            f"the policies decided differently before step {step}; a policy must not go by its own clock, its "
            f"rank or chance:{listed}"
        )

    @property
    def may_scale(self) -> bool:
        """Whether learning rates are, or may become, other ones than the script's."""
        return not self.is_empty or self.rate != 1.0

    @property
    def shape(self) -> BatchShape:
        """The shape of the next step's batch."""
        return BatchShape(self.batch_size, self.shards)

    @property
    def needs_monitor(self) -> bool:
        """Whether a policy reads measurements of the gradients."""
        return any(policy.needs_monitor for policy in self.policies)

    def observers(self, step: int) -> list[Policy]:
        """The policies that look at the world outside after ``step`` steps."""
        return [policy for policy in self.policies if policy.observe_every and step % policy.observe_every == 0]

    def ask(self, hook: Hook, view: View) -> list[Decision]:
        """Ask all policies.

        Raises:
            PolicyError: one failed, or wants something that makes no sense; names it.
        """
        decisions: list[Decision] = []
        for policy in self.policies:
            try:
                getattr(policy, hook)(view)
            except Exception as error:
                what = f"{type(error).__name__}: {error}"
                raise PolicyError(f"the policy {policy.name} failed in {hook}: {what}") from error
            decisions += policy.decided()
        for decision in decisions:
            self._check(decision)
        return decisions

    def take(self, decisions: Sequence[Decision], view: View, loop: int) -> None:
        """Have decisions take effect, all together."""
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
        """Begin a loop whose batches have so many samples, as long as no policy changes that.

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

    def scaled(self, optimizers: Sequence[Optimizer]) -> AbstractContextManager[None]:
        """The optimizers' learning rates are what the policies made of them; the script finds its own again."""
        return nullcontext() if self.rate == 1.0 else self._scaled(optimizers)

    @contextmanager
    def _scaled(self, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups if "lr" in group]
        own = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * self.rate
        try:
            yield
        finally:
            for group, rate in zip(groups, own, strict=True):
                group["lr"] = rate

    def register(self, registry: Registry) -> None:
        """Have all of it kept. A policy that is new begins anew; of one that is gone its effects stay."""
        registry.add("adaptation", self, within=(), when=("early",))
        for policy in self.policies:
            registry.add(policy.name, Copied(policy), within=("adaptation", "policies"), when=("early",), optional=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as numbers and text by name: a copy, which later steps do not change."""
        apart: dict[str, Any] = {
            "base": asdict(self._base),
            "strategies": [str(self._first_strategy), str(self.strategy)],
            "policies": {},  # each has an entry of its own, which puts its state here
        }
        return {name: apart[name] if name in apart else deepcopy(getattr(self, name)) for name in FORMS}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`.

        A job that was changed on purpose, to another batch, number of shards or strategy, begins with its own.

        Raises:
            JobError: policies had chosen a strategy that this run cannot use; says what to change.
            Unreadable: a value is of a wrong type, or makes no sense. Of this too, nothing has changed then.
        """
        values = value_of(FORMS, deepcopy(state), "state")
        if not 0 < values["rate"] < math.inf or not 0 <= values["digest"] < 2**49:
            raise Unreadable(f"rate={values['rate']!r} is above 0, digest={values['digest']!r} from 0 and below 2**49")
        if values["topology"] not in (None, *NAMES["set_topology"]):
            raise Unreadable(f"there is no topology {short(values['topology'])}")
        first, strategy = values["strategies"]
        strategy = self._read(strategy) if first == str(self._first_strategy) else self.strategy
        samples, shards, is_ours = values["batch_size"], values["shards"], values["base"] == self._base
        if is_ours and (samples < 1 or shards < 1 or shards % self._base.shards):
            raise Unreadable(f"a batch of {samples} samples in {shards} shards cannot be")
        if is_ours:
            self.batch_size, self.shards = samples, shards
        self.strategy = strategy
        for name in ("rate", "topology", "balances", "measures_links", "has_begun", "digest", "stopped", "observed"):
            setattr(self, name, values[name])

    def _check(self, decision: Decision) -> None:
        value, known = decision.value, NAMES.get(decision.verb)
        wants = f"the policy {decision.policy} wants {decision.verb}({short(value)})"
        if (numbers := NUMBERS.get(decision.verb)) is not None and not numbers.have(value):
            raise PolicyError(f"{wants}: needs {numbers.words}")
        if known is not None and value not in known:
            raise PolicyError(f"{wants}: use one of {', '.join(known)}")
        if decision.verb == "set_strategy":
            try:
                self._read(str(value))
            except JobError as error:
                raise PolicyError(f"{wants}: {error}") from None
        if decision.verb == "set_batch_size":
            self._check_batch(decision)

    def _read_strategies(self, policy: Policy) -> None:
        try:
            policy.read_strategies(lambda strategy_name: str(self._read(strategy_name)))
        except JobError as error:
            raise JobError(f"the policy {policy.name} may choose a strategy that cannot be: {error}") from None

    def _read(self, strategy_name: Any) -> Strategy:
        strategy = strategy_of(strategy_name)
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
    """Return the figures that a policy sees of the world outside.

    Raises:
        PolicyError: it failed, or saw something else than figures; names it.
    """
    try:
        figures: dict[Any, Any] = dict(policy.observe(view))
    except Exception as error:
        raise PolicyError(f"the policy {policy.name} failed in observe: {type(error).__name__}: {error}") from error
    wrong = [name for name, value in figures.items() if not isinstance(value, Figure | None)]
    if wrong or not all(isinstance(name, str) for name in figures):
        raise PolicyError(f"the policy {policy.name} observed {short(figures)}: return numbers, text or None, by name")
    return figures
