"""All that a run consists of, made in an order in which nothing needs what comes later."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unisono.checkpoint.folder import RunFolder
from unisono.host.again import again
from unisono.job import Job
from unisono.membership.environment import device_name
from unisono.spans import Spans
from unisono.train.config.run_config import RunConfig
from unisono.train.group.collectives import CollectiveCalls
from unisono.train.group.membership import Membership
from unisono.train.loop.boundary import Boundary
from unisono.train.loop.evaluation import Evaluator
from unisono.train.policy_runner import PolicyRunner
from unisono.train.record.callbacks import Callbacks
from unisono.train.record.log_follower import LogFollower
from unisono.train.record.metrics_line import MetricsLine
from unisono.train.record.notices import LoneUpdates, Notices
from unisono.train.record.results import ResultWriter
from unisono.train.record.sample_log import SampleLog
from unisono.train.record.step_timeline import StepTimeline, TorchProfile
from unisono.train.record.trace import Trace
from unisono.train.recovery.integrity import Integrity
from unisono.train.recovery.known_states import StateCopies
from unisono.train.recovery.recovery import Recovery, Snapshots
from unisono.train.recovery.verification import AuditJudge, Verification
from unisono.train.state.checkpoints import RunCheckpoints
from unisono.train.state.ending import Ending, LeaveRequest, Requests
from unisono.train.state.first_weights import FirstWeights
from unisono.train.state.policy_state import PolicyState
from unisono.train.state.trained import Trained
from unisono.train.step.current import CurrentSteps
from unisono.train.step.listeners import Listener, Listeners
from unisono.train.step.run_base import RunBase
from unisono.train.step.synchronisation import Synchronisation, Timer, WorkerReport
from unisono.train.step_loop import StepLoop
from unisono.train.strategies.exact_steps import ExactSteps
from unisono.train.strategies.local_rounds import begin_local_rounds
from unisono.train.strategies.local_training import LocalTraining


@dataclass(frozen=True, eq=False)
class RunListeners:
    """The listeners of a run that others have to do with.

    Attributes:
        metrics: the writer of ``metrics.jsonl``.
        timer: the timer of this worker's steps.
        callbacks: the callbacks of the script and of plugins.
        results: the writer of ``result.json``.
        log_follower: the thread of the loggers.
    """

    metrics: MetricsLine
    timer: Timer
    callbacks: Callbacks
    results: ResultWriter
    log_follower: LogFollower


@dataclass(frozen=True, eq=False)
class Computing:
    """The parts of a run that compute steps, and keep their state right.

    Attributes:
        integrity: the record of verified states.
        exact: the step computer after whose steps all workers have the same weights.
        steps: the present step computer.
        snapshots: the writer of checkpoints.
        recovery: the recovery when workers come and go.
        collectives: the collective calls.
        synchronisation: the synchronisation of workers that have weights of their own.
        verification: the comparison of the state between steps.
    """

    integrity: Integrity
    exact: ExactSteps
    steps: CurrentSteps
    snapshots: Snapshots
    recovery: Recovery
    collectives: CollectiveCalls
    synchronisation: Synchronisation
    verification: Verification


@dataclass(frozen=True, eq=False)
class Inside(Computing, RunListeners, RunBase):
    """All parts of a run, for the run itself and for fault injection; scripts leave them alone.

    Attributes:
        job: the job to train.
        device: the device on which this worker computes.
        policy_runner: the runner of policies.
        loop: the loops over data sets.
        first_weights: the weights with which the training begins.
        evaluator: the evaluation between steps.
    """

    job: Job
    device: torch.device
    policy_runner: PolicyRunner
    loop: StepLoop
    first_weights: FirstWeights
    evaluator: Evaluator


@dataclass(frozen=True)
class Opened:
    """The objects that were opened for a run, and are closed with it.

    Attributes:
        membership: the members of the job.
        folder: the run folder.
        checkpoints: the checkpoints of the run.
        collectives: the collective calls so far.
        leave: the request to this worker to leave, once there is one.
        fingerprint: the fingerprint of job and machine.
        policy_state: the policies, and what they have changed.
        closing: the stack that closes all of it.
        spans: this worker's spans; None if they are not kept.
    """

    membership: Membership
    folder: RunFolder
    checkpoints: RunCheckpoints
    collectives: CollectiveCalls
    leave: LeaveRequest
    fingerprint: dict[str, Any]
    policy_state: PolicyState
    closing: ExitStack
    spans: Spans | None = None


def assemble(config: RunConfig, opened: Opened) -> Inside:
    """Make everything, each with all that it needs.

    Args:
        config: the configuration of the run.
        opened: what was opened for it.
    """
    membership, checkpoints = opened.membership, opened.checkpoints
    if not membership.joins and membership.workers.rank == 0:
        checkpoints.begin_writing()
    run, listening = _base(config, opened)
    made = _computing(run, listening, opened.collectives)
    policy_runner = PolicyRunner(run, listening.metrics, made.collectives)
    loop = _loop(run, listening, made, policy_runner)
    run.ending.also(loop.leave)
    first_weights = FirstWeights(run.trained, checkpoints, opened.folder, opened.fingerprint, config)
    about = {"job": config.job, "device": config.device, "evaluator": Evaluator(run, made.collectives)}
    parts: dict[str, Any] = {**vars(run), **vars(listening), **vars(made), **about}
    return Inside(**parts, policy_runner=policy_runner, loop=loop, first_weights=first_weights)


def _base(config: RunConfig, opened: Opened) -> tuple[RunBase, RunListeners]:
    folder, membership, ending = opened.folder, opened.membership, Ending(opened.closing, opened.leave)
    about = {"job": asdict(config.job), "fingerprint": opened.fingerprint}
    trained = Trained(about, opened.policy_state)
    look_s = config.settings.special.log_every_s
    follower = LogFollower(folder, membership, about["job"], config.recording.loggers, look_s)
    results = ResultWriter(folder, trained, membership, config)
    listening = RunListeners(MetricsLine(folder, trained, membership), Timer(), Callbacks(), results, follower)
    before, lone = [*_watching(config, opened), Notices(folder, membership)], LoneUpdates(membership)
    listeners = Listeners([listening.metrics, *before, results, listening.callbacks, listening.timer, lone, follower])
    ending.also(lambda: listeners.tell(lambda one: one.close()))
    checkpoints, leave, spans = opened.checkpoints, opened.leave, opened.spans
    run = RunBase(config, membership, folder, checkpoints, leave, spans, trained, ending, Requests(), listeners)
    return run, listening


def _watching(config: RunConfig, opened: Opened) -> list[Listener]:
    """Those who write down what somebody is going to check."""
    recording, coordinator, found = config.recording, config.connection.coordinator, list[Listener]()
    rank = -1 if opened.membership.joins else opened.membership.workers.process
    device = opened.membership.workers.devices.rank
    worker = f"rank-{rank}" if coordinator is None else device_name(coordinator.worker, device)
    if config.settings.special.samples:
        found.append(SampleLog(opened.folder.path, worker))
    if opened.spans is not None:
        host = config.connection.environment.host
        found.append(StepTimeline(opened.folder.path, worker, host, opened.spans, opened.membership))
    if recording.profile is not None:
        found.append(TorchProfile(opened.folder.path, worker, recording.profile))
    if recording.trace is not None:
        found.append(Trace.open(recording.trace, rank))
    return found


def _computing(run: RunBase, listening: RunListeners, calls: CollectiveCalls) -> Computing:
    config, trained = run.config, run.trained
    report, copies = WorkerReport(run, listening.timer), StateCopies(trained)
    integrity = Integrity(trained, copies, config.verify_every, audits=config.execution.audit > 0)
    judge = AuditJudge(run, integrity)
    exact = ExactSteps(run, integrity, judge, report, newest_loss=lambda: listening.metrics.newest_loss)
    begin = partial(begin_local_rounds, spans=run.spans)
    steps = CurrentSteps(run, exact, LocalTraining(config, trained, run.membership, run.listeners, begin))
    run.ending.also(steps.drop)
    snapshots = Snapshots(run, steps)
    recovery = Recovery(run, steps, integrity, snapshots, _again(config.connection.launcher, run.folder.path))
    collectives = calls.changing(recovery)
    synchronisation = Synchronisation(run, collectives, steps, report)
    verification = Verification(run, collectives, steps, integrity, copies, judge, snapshots)
    return Computing(integrity, exact, steps, snapshots, recovery, collectives, synchronisation, verification)


def _again(launcher: str, run_dir: Path) -> str:
    """How people go on with a job that has left."""
    if launcher == "unisono":  # which says it itself, since it knows what was typed
        return "start the job again to go on"
    if launcher != "single":
        return f"start the job again with UNISONO_RUN_DIR={run_dir} in its environment to go on"
    if not hasattr(sys.modules["__main__"], "__file__"):  # a notebook's kernel
        return f"unisono.init(run_dir={str(run_dir)!r}) goes on"
    return f"to go on: {again(run_dir)}"


def _loop(run: RunBase, listening: RunListeners, made: Computing, policy_runner: PolicyRunner) -> StepLoop:
    collectives, steps = made.collectives, made.steps
    between = Boundary(run, collectives, steps, made.integrity, made.verification, made.recovery, made.snapshots)
    return StepLoop(
        run, collectives, steps, made.synchronisation, between, policy_runner, listening.metrics, listening.timer
    )
