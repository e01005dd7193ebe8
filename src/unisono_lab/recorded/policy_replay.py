"""The replay of policies on a recorded run: the decisions that they would have made."""

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
from unisono.plan.topology import Links
from unisono.train.state.policy_state import Hook, PolicyState
from unisono_lab.recorded.record import Record, first_problem, valid_decisions, valid_lines

# Recorded steps, as policies see them.


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A recorded step of a run.

    Attributes:
        view: the view of policies after the step, with the batch that the job began with.
        lr_factor: the factor by which the run's policies had changed the script's learning rates.
        observed_before: the observations of policies before the step.
    """

    view: View
    lr_factor: float
    ends_epoch: bool
    observed_before: Mapping[str, Mapping[str, Figure]] = field(default_factory=dict)

    def view_with(self, batch_size: int, shards: int, lr_factor: float) -> View:
        """The view with the batch, the shards and the learning rate that the replayed policies have set."""
        # For a policy that decides the same as in the run the quotient is exactly 1, so it sees the same bits.
        rate = self.view.learning_rate * (lr_factor / self.lr_factor)
        return replace(self.view, batch_size=batch_size, shards=shards, learning_rate=rate)

    @property
    def before(self) -> View:
        """The view before this step, if it is the first."""
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
    """The steps in the lines of ``metrics.jsonl``, in order; lines that scripts logged beside them are left out.

    Observations come in order: committed steps, the policy's name, the figures.

    Raises:
        JobError: a line lacks a field of every step; the message names the step and the field.
    """
    by_step = {line["step"]: line for line in lines if "loss" in line and "step" in line}
    ordered = [(_line(by_step[step]), by_step[step]) for step in sorted(by_step)]
    steps: list[RecordedStep] = []
    noise: Noise | None = None
    setting = _Setting()
    workers: tuple[Timings, ...] = ()
    links: Links | None = None
    observed: dict[str, Mapping[str, Figure]] = {}
    to_come = deque(observations)
    for number, (line, fields) in enumerate(ordered):
        noise, setting, workers = line.noise or noise, line.setting or setting, line.workers or workers
        links = Links.from_json(line.links) if line.links else links
        observed_before = observed = _with(observed, to_come, line.step)
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
            metrics={name: _with_nan(value) for name, value in fields.items() if name not in LOCAL},
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
        steps.append(RecordedStep(view, line.lr_factor, line.ends_epoch, observed_before))
    return steps


def gaps(steps: Sequence[RecordedStep]) -> list[int]:
    """The steps between the first and the last one that are not recorded."""
    recorded = {step.view.step - 1 for step in steps}
    return [step for step in range(min(recorded, default=0), max(recorded, default=0)) if step not in recorded]


class _Setting(BaseModel):
    """The conditions and times of a recorded step; defaults if they were not recorded."""

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
        """The noise of the gradients, if it was measured in the step."""
        if self.gradient_variance is None or self.gradient_signal is None:
            return None
        return Noise(self.gradient_variance, self.gradient_signal)

    def rate_before(self, following: _Line) -> float:
        """The learning rate between this step and the next one.

        Without policies it is not recorded. A script mostly changes it after ``step.run``, so the rate of the next step
        is taken.
        """
        if self.learning_rate is not None:
            return self.learning_rate
        return _rate(following.lr)


def _line(line: Mapping[str, Any]) -> _Line:
    try:
        return _Line.model_validate(line)
    except ValidationError as error:
        raise JobError(
            f"metrics.jsonl lacks fields of step {line.get('step')} that policies read: {first_problem(error)}; was it "
            f"written by an older version?"
        ) from error


def _with(
    observed: Mapping[str, Mapping[str, Figure]], to_come: deque[tuple[int, str, Mapping[str, Figure]]], step: int
) -> dict[str, Mapping[str, Figure]]:
    """The newest observations up to a step, which are removed from those to come."""
    newest = dict(observed)
    while to_come and to_come[0][0] <= step:
        _, policy, figures = to_come.popleft()
        newest[policy] = figures
    return newest


def _rate(lr: float | None) -> float:
    return 0.0 if lr is None else lr


def _with_nan(value: Any) -> Any:
    """A value with NaN in the place of None: JSON has no NaN, which was written as null."""
    if isinstance(value, dict):
        return {name: _with_nan(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_with_nan(part) for part in value]
    return math.nan if value is None else value


# The replay.


RECORDING = "record them with unisono.init(records={'monitor': 1}), or UNISONO_MONITOR_EVERY=1"


@dataclass(frozen=True, slots=True)
class Replay:
    """The decisions that policies would have made in a run.

    Attributes:
        decisions: the decisions, in order, each with the number of committed steps.
        settings: the settings that the policies want after each recorded step: steps committed, batch size, learning
            rate.
        stopped: the number of steps after which the policies would have ended the training; None if they would not.
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
    """Ask new policies after each recorded step, in the order in which a run asks them.

    Policies see the measurements of the run, which do not react to their decisions. Batch size, shards and learning
    rate alone follow their decisions, since policies continue from the values that they have set.

    Raises:
        JobError: the record lacks figures that the policies read; the message says how to record them.
        PolicyError: a policy failed, or its decision makes no sense; the message names the policy.
    """
    job = record.job
    observations = valid_lines(record.journal, "observed")
    observed = [(line["step"], str(line.get("policy")), line.get("figures") or {}) for line in observations]
    steps = recorded_steps(record.metrics, record.batch_size, job.shards, observed)
    policy_state = PolicyState(policies, record.batch_size, job.shards)
    _require_figures(record, steps, policy_state)
    untimed = sum("workers" not in step.view.metrics for step in steps)
    unwatched = sum("gradient_norm" not in step.view.metrics for step in steps) if policy_state.needs_monitor else 0
    ends = {step for step, decision in valid_decisions(record.journal) if decision.verb == "stop"}
    decisions: list[tuple[int, Decision]] = []
    settings: list[tuple[int, int, float]] = []
    stopped = None
    for hooks, view in _moments(steps, policy_state):
        new_decisions = _decisions_of(policy_state, hooks, view)
        policy_state.take(new_decisions, view, loop=0)
        decisions += [(view.step, decision) for decision in new_decisions]
        settings.append((view.step, view.batch_size, view.learning_rate))
        if any(decision.verb == "stop" for decision in new_decisions) and view.step not in ends:
            stopped = view.step  # the policies saw nothing of what the run measured later
            break
    else:
        if any(line.get("event") == "finished" for line in record.journal):
            _decisions_of(policy_state, ("after_train",), replace(view, epoch=0))
    return Replay(decisions, settings, stopped, gaps(steps), unwatched, untimed)


def _moments(steps: Sequence[RecordedStep], policy_state: PolicyState) -> Iterator[tuple[tuple[Hook, ...], View]]:
    """The moments at which a run asks its policies: the hooks and the view."""
    yield ("before_train",), steps[0].before
    for step in steps:
        view = step.view_with(policy_state.batch_size, policy_state.shards, policy_state.rate)
        yield ("after_step", "after_epoch") if step.ends_epoch else ("after_step",), view


def _decisions_of(policy_state: PolicyState, hooks: Sequence[Hook], view: View) -> list[Decision]:
    try:
        return [decision for hook in hooks for decision in policy_state.ask(hook, view)]
    except PolicyError as error:
        hint = "" if view.workers else f". The run had not recorded its workers' times by then: {RECORDING}"
        raise PolicyError(f"after step {view.step} of the recorded run: {error}{hint}") from error


def _require_figures(record: Record, steps: Sequence[RecordedStep], policy_state: PolicyState) -> None:
    if not steps:
        raise JobError(f"{record.path / 'metrics.jsonl'} holds no step, so policies have nothing to read")
    if not policy_state.needs_monitor or any(step.view.noise is not None for step in steps):
        return
    names = ", ".join(policy_state.names)
    if record.job.shards < 2:
        raise JobError(
            f"{names}: reads the gradients' noise, which a job with one shard cannot measure; train with at least 2 "
            f"shards"
        )
    raise JobError(f"{names}: reads the gradients' noise, which {record.path} does not record; {RECORDING}")
