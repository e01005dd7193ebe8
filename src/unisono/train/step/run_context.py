"""What a run is given when it starts."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from unisono.checkpoint.folder import RunFolder
from unisono.errors import JobError
from unisono.received import LONGEST_S
from unisono.train.config.settings import Settings
from unisono.train.group.collectives import CollectiveCalls
from unisono.train.state.ending import LeaveRequest
from unisono.train.state.policy_state import PolicyState
from unisono.train.step.engine import Execution

VERIFY_EVERY = 100

BACKSTOP = 3.0
"""How many times ``failure_timeout_s`` workers of an elastic job wait for each other."""


@dataclass(frozen=True, slots=True)
class FaultTolerance:
    """The settings of failure detection and of state comparison. They decide no bit.

    Attributes:
        failure_timeout_s: the seconds for which a worker may be silent.
        verify_every: steps between comparisons of the workers' whole state; None for none, and none of weights either.
        balances: whether shards are split by speed.

    Raises:
        JobError: a value is out of range.
    """

    failure_timeout_s: float
    verify_every: int | None
    balances: bool

    @classmethod
    def of(cls, failure_timeout_s: float, verify_every: int | None, balance: str) -> FaultTolerance:
        """From what the user says; 0 steps for never, None for as often as it costs next to nothing."""
        if not 0 < failure_timeout_s <= LONGEST_S:
            raise JobError(f"failure_timeout_s={failure_timeout_s!r}: needs to be positive, and at most {LONGEST_S:g}")
        verify_every = VERIFY_EVERY if verify_every is None else verify_every
        if verify_every < 0:
            raise JobError(f"verify_every={verify_every!r}: use a number of steps, or 0 for never")
        if balance not in ("even", "speed"):
            raise JobError(f"balance={balance!r}: use 'even' or 'speed'")
        return cls(failure_timeout_s, verify_every or None, balance == "speed")


@dataclass(frozen=True)
class RunContext:
    """The settings of a run, and what was opened with them and is closed with the run.

    Attributes:
        settings: the settings from the environment.
        folder: the run folder.
        fingerprint: the fingerprint of job and machine, by name.
        collectives: the collective calls so far.
        leave: whether this worker was asked to leave.
        execution: the settings of the computation that decide no bit.
        fault_tolerance: the settings of failure detection and of state comparison.
        policy_state: the policies, and what they have changed.
        opened: the stack of what is to be closed.
    """

    settings: Settings
    folder: RunFolder
    fingerprint: dict[str, Any]
    collectives: CollectiveCalls
    leave: LeaveRequest
    execution: Execution
    fault_tolerance: FaultTolerance
    policy_state: PolicyState
    opened: ExitStack
