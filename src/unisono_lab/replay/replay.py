"""Policies that look at a recorded run: what they would have done."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from unisono.adapt.norms import GradientNorms, Noise
from unisono.adapt.view import LOCAL, Decision, Figure, Policy, Timings, View
from unisono.errors import JobError, PolicyError
from unisono.plan.links import Links
from unisono.train.state.policy_state import Hook, PolicyState
from unisono_lab.replay.record import Record, first_problem
from unisono_lab.replay.timeline import decisions_that_hold, lines_that_hold

# Steps that a run wrote down, as policies see them.


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A step of a run that is over, or under way elsewhere.

    Attributes:
        view: the view of policies after the step, with the batch that the job began with.
        lr_factor: the factor by which the run's policies had changed the script's learning rates.
        ends_epoch: whether an epoch ended with it.
        observed_before: the observations of policies before the step.
    """

    view: View
    lr_factor: float
    ends_epoch: bool
    observed_before: Mapping[str, Mapping[str, Figure]] = field(default_factory=dict)

    def seen(self, batch_size: int, shards: int, lr_factor: float) -> View:
        """What policies see that have made these of the batch and of the script's learning rates."""
        # A policy that decides what the run's did finds a quotient of 1, and so the run's bits.
        rate = self.view.learning_rate * (lr_factor / self.lr_factor)
        return replace(self.view, batch_size=batch_size, shards=shards, learning_rate=rate)

    @property
    def before(self) -> View:
        """What policies see before the first step, if this is the first."""
        line = self.view.metrics
        return View(
            step=line["step"],
            epoch=0,
            samples=line["position"],
            batch_size=self.view.batch_size,
            base_batch_size=self.view.base_batch_size,
            shards=self.view.shards,
            base_shards=self.view.base_shards,
            world_size=self.view.world_size,
            learning_rate=_rate(line["lr"]),
            observed=self.observed_before,
        )


def recorded_steps(
    lines: Iterable[Mapping[str, Any]],
    batch_size: int,
    shards: int,
    observations: Iterable[tuple[int, str, Mapping[str, Figure]]] = (),
) -> list[RecordedStep]:
    """What lines of ``metrics.jsonl`` tell of steps, in their order; what scripts logged beside them is left out.

    Args:
        lines: the lines of one run's file.
        batch_size: samples in a batch, as the job says.
        shards: the job's number of shards.
        observations: the policies' observations, in order: committed steps, the policy's name, the figures.

    Raises:
        JobError: a line lacks what every step has; names the step and the field.
    """
    by_step = {line["step"]: line for line in lines if "loss" in line and "step" in line}
    ordered = [(_line(by_step[step]), by_step[step]) for step in sorted(by_step)]
    found: list[RecordedStep] = []
    noise: Noise | None = None
    setting = _Setting()
    workers: tuple[Timings, ...] = ()
    links: Links | None = None
    observed: dict[str, Mapping[str, Figure]] = {}
    to_come = deque(observations)
    for number, (line, written) in enumerate(ordered):
        noise, setting, workers = line.noise or noise, line.setting or setting, line.workers or workers
        links = Links.from_json(line.links) if line.links else links
        before = observed = _with(observed, to_come, line.step)
        observed = _with(observed, to_come, line.step + 1)
        following = ordered[min(number + 1, len(ordered) - 1)][0]
        view = View(
            step=line.step + 1,
            epoch=line.epoch,
            samples=line.position + line.batch_size,
            batch_size=batch_size,
            base_batch_size=batch_size,
            shards=shards,
            base_shards=shards,
            world_size=setting.world_size or line.world_size,
            learning_rate=line.rate_before(following),
            metrics={name: _with_nan(value) for name, value in written.items() if name not in LOCAL},
            noise=noise,
            workers=workers,
            steady=setting.steady,
            seconds=setting.seconds,
            generation=setting.generation,
            departures=setting.departures,
            topology=setting.topology,
            links=links,
            observed=observed,
            norms=line.norms,
        )
        found.append(RecordedStep(view, line.lr_factor, line.ends_epoch, before))
    return found


def gaps(steps: Sequence[RecordedStep]) -> list[int]:
    """The steps between the first and the last one that nothing is known of."""
    known = {step.view.step - 1 for step in steps}
    return [step for step in range(min(known, default=0), max(known, default=0)) if step not in known]


class _Setting(BaseModel):
    """The conditions of a recorded step, and its times; empty where nobody wrote them down."""

    generation: int = 0
    world_size: int = 0
    topology: str = ""
    departures: int = 0
    steady: int = 0
    seconds: float = 0.0


class _Line(BaseModel):
    """One line of ``metrics.jsonl``: the fields of every step, and those that only some have."""

    model_config = ConfigDict(extra="allow")

    step: int
    epoch: int
    position: int
    batch_size: int
    world_size: int
    lr: float | None
    lr_factor: float = 1.0
    learning_rate: float | None = None
    ends_epoch: bool = False
    gradient_variance: float | None = None
    gradient_signal: float | None = None
    setting: _Setting | None = None
    workers: tuple[Timings, ...] = ()
    links: dict[str, list[list[float]]] | None = None
    norms: GradientNorms | None = None

    @property
    def noise(self) -> Noise | None:
        """The averages, if the step was watched."""
        if self.gradient_variance is None or self.gradient_signal is None:
            return None
        return Noise(self.gradient_variance, self.gradient_signal)

    def rate_before(self, following: _Line) -> float:
        """The learning rate between this step and the next one.

        Without policies it is not written down. A script that changes it does so in its loop's body, and mostly behind
        ``step.run``, so the next step has it.
        """
        if self.learning_rate is not None:
            return self.learning_rate
        return _rate(following.lr)


def _line(line: Mapping[str, Any]) -> _Line:
    try:
        return _Line.model_validate(line)
    except ValidationError as error:
        raise JobError(
            f"metrics.jsonl says of step {line.get('step')} too little for a policy: {first_problem(error)}; was it "
            f"written by an older version?"
        ) from error


def _with(
    observed: Mapping[str, Mapping[str, Figure]], to_come: deque[tuple[int, str, Mapping[str, Figure]]], step: int
) -> dict[str, Mapping[str, Figure]]:
    """With what was observed up to a step, which is taken from what is to come."""
    found = dict(observed)
    while to_come and to_come[0][0] <= step:
        _, policy, figures = to_come.popleft()
        found[policy] = figures
    return found


def _rate(lr: float | None) -> float:
    return 0.0 if lr is None else lr


def _with_nan(value: Any) -> Any:
    """JSON has no NaN: it was written as null."""
    if isinstance(value, dict):
        return {name: _with_nan(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_with_nan(part) for part in value]
    return math.nan if value is None else value


# Policies that look at a recorded run: what they would have done.


RECORDING = "record them with unisono.init(records={'monitor': 1}), or UNISONO_MONITOR_EVERY=1"


@dataclass(frozen=True, slots=True)
class Replay:
    """The decisions that policies would have taken in a run.

    Attributes:
        decisions: the decisions, in order, each with the number of steps committed by then.
        settings: the settings that the policies want after each recorded step: steps committed, batch size, learning
            rate.
        stopped: the number of steps after which they would have ended the training; None if they would not.
        gaps: the steps that are not recorded, after which policies were not asked.
        unwatched: the number of recorded steps whose gradients were not measured, if a policy reads them.
        untimed: the number of recorded steps without the workers' times.
    """

    decisions: Sequence[tuple[int, Decision]]
    settings: Sequence[tuple[int, int, float]]
    stopped: int | None
    gaps: Sequence[int]
    unwatched: int
    untimed: int


def replay(record: Record, policies: Sequence[Policy]) -> Replay:
    """Ask policies after each recorded step, in the order in which a run asks them.

    What they see is what the run measured: it does not react to what they decide. Batch size and learning rate alone
    are what they made of them, for policies go by what they have reached.

    Args:
        record: the run's record.
        policies: new ones, that nobody has asked yet.

    Raises:
        JobError: the record does not have what the policies read; says how to record it.
        PolicyError: a policy failed, or wants something that makes no sense; names it.
    """
    job = record.job
    seen = lines_that_hold(record.journal, "observed")
    observed = [(line["step"], str(line.get("policy")), line.get("figures") or {}) for line in seen]
    steps = recorded_steps(record.metrics, record.batch_size, job.shards, observed)
    policy_state = PolicyState(policies, record.batch_size, job.shards)
    _require_figures(record, steps, policy_state)
    untimed = sum("workers" not in step.view.metrics for step in steps)
    unwatched = sum("gradient_norm" not in step.view.metrics for step in steps) if policy_state.needs_monitor else 0
    ends = {step for step, decision in decisions_that_hold(record.journal) if decision.verb == "stop"}
    decisions: list[tuple[int, Decision]] = []
    settings: list[tuple[int, int, float]] = []
    stopped = None
    for hooks, view in _moments(steps, policy_state):
        found = _asked(policy_state, hooks, view)
        policy_state.take(found, view, loop=0)
        decisions += [(view.step, decision) for decision in found]
        settings.append((view.step, view.batch_size, view.learning_rate))
        if any(decision.verb == "stop" for decision in found) and view.step not in ends:
            stopped = view.step  # the run went on, and nobody knows what it would have measured elsewhere
            break
    else:
        if any(line.get("event") == "finished" for line in record.journal):
            _asked(policy_state, ("after_train",), replace(view, epoch=0))
    return Replay(decisions, settings, stopped, gaps(steps), unwatched, untimed)


def _moments(steps: Sequence[RecordedStep], policy_state: PolicyState) -> Iterator[tuple[tuple[Hook, ...], View]]:
    """When a run asks its policies: what, and with which view."""
    yield ("before_train",), steps[0].before
    for step in steps:
        view = step.seen(policy_state.batch_size, policy_state.shards, policy_state.rate)
        yield ("after_step", "after_epoch") if step.ends_epoch else ("after_step",), view


def _asked(policy_state: PolicyState, hooks: Sequence[Hook], view: View) -> list[Decision]:
    try:
        return [decision for hook in hooks for decision in policy_state.ask(hook, view)]
    except PolicyError as error:
        lacks = "" if view.workers else f". The run had not written down its workers' times by then: {RECORDING}"
        raise PolicyError(f"after step {view.step} of the recorded run: {error}{lacks}") from error


def _require_figures(record: Record, steps: Sequence[RecordedStep], policy_state: PolicyState) -> None:
    if not steps:
        raise JobError(f"{record.path / 'metrics.jsonl'} holds no step: there is nothing that a policy could look at")
    if not policy_state.needs_monitor or any(step.view.noise is not None for step in steps):
        return
    names = ", ".join(policy_state.names)
    if record.job.shards < 2:
        raise JobError(
            f"{names}: reads the gradients' noise, of which a job with one shard can say nothing; train with at least "
            f"2 shards"
        )
    raise JobError(f"{names}: reads the gradients' noise, which {record.path} has no figures of; {RECORDING}")
