"""Policies that look at a recorded run: what they would have done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from unisono.adapt.view import Decision, Policy, View
from unisono.errors import JobError, PolicyError
from unisono.train.state.policy_state import Hook, PolicyState
from unisono_lab.replay.record import Record
from unisono_lab.replay.recorded_view import RecordedStep, gaps, recorded_steps
from unisono_lab.replay.timeline import decisions_that_hold, lines_that_hold

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
