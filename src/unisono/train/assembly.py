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
from unisono.train.record.lone_updates import LoneUpdates
from unisono.train.record.metrics_line import MetricsLine
from unisono.train.record.notices import Notices
from unisono.train.record.results import ResultWriter
from unisono.train.record.sample_log import SampleLog
from unisono.train.record.step_timeline import StepTimeline
from unisono.train.record.torch_profile import TorchProfile
from unisono.train.record.trace import Trace
from unisono.train.recovery.copies import StateCopies
from unisono.train.recovery.integrity import Integrity
from unisono.train.recovery.recovery import Recovery, Snapshots
from unisono.train.recovery.verification import AuditJudge, Verification
from unisono.train.state.checkpoints import RunCheckpoints
from unisono.train.state.ending import Ending, LeaveRequest, Requests
from unisono.train.state.first_weights import FirstWeights
from unisono.train.state.policy_state import PolicyState
from unisono.train.state.trained import Trained
from unisono.train.step.current import CurrentSteps
from unisono.train.step.listeners import Listener, Listeners
from unisono.train.step.synchronisation import Synchronisation, Timer, WorkerReport
from unisono.train.step_loop import StepLoop
from unisono.train.strategies.exact_steps import ExactSteps
from unisono.train.strategies.local_rounds import begin_local_rounds
from unisono.train.strategies.local_training import LocalTraining


@dataclass(frozen=True)
class Inside:
    """The parts of a run, for the run itself and for fault injection; scripts leave them alone.

    Attributes:
        job: the job to train.
        device: the device on which this worker computes.
        membership: the members of the job.
        folder: the run folder.
        ending: the end of the run on this worker.
        trained: the state of the run: models, optimizers, position.
        checkpoints: the checkpoints of the run.
        integrity: the record of verified states.
        exact: the step computer after whose steps all workers have the same weights.
        steps: the present step computer.
        collectives: the collective calls.
        recovery: the recovery when workers come and go.
        snapshots: the writer of checkpoints.
        synchronisation: the synchronisation of workers that have weights of their own.
        verification: the comparison of the state between steps.
        policy_runner: the runner of policies.
        loop: the loops over data sets.
        first_weights: the weights with which the training begins.
        evaluator: the evaluation between steps.
        listeners: the run's listeners.
        metrics: the writer of ``metrics.jsonl``.
        callbacks: the callbacks of the script and of plugins.
        results: the writer of ``result.json``.
        log_follower: the thread of the loggers.
    """

    job: Job
    device: torch.device
    membership: Membership
    folder: RunFolder
    ending: Ending
    trained: Trained
    checkpoints: RunCheckpoints
    integrity: Integrity
    exact: ExactSteps
    steps: CurrentSteps
    collectives: CollectiveCalls
    recovery: Recovery
    snapshots: Snapshots
    synchronisation: Synchronisation
    verification: Verification
    policy_runner: PolicyRunner
    loop: StepLoop
    first_weights: FirstWeights
    evaluator: Evaluator
    listeners: Listeners
    metrics: MetricsLine
    callbacks: Callbacks
    results: ResultWriter
    log_follower: LogFollower


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
    job, device, membership, checkpoints = config.job, config.device, opened.membership, opened.checkpoints
    if not membership.joins and membership.workers.rank == 0:
        checkpoints.begin_writing()
    base = _base(config, opened)
    made = _computing(base)
    collectives, trained, folder = made.collectives, base.trained, opened.folder
    policy_runner = PolicyRunner(job, trained, membership, checkpoints, base.metrics, folder, collectives)
    loop = _loop(base, made, policy_runner)
    base.ending.also(loop.leave)
    allow = config.settings.checkpoints.allow_job_change
    return Inside(
        job=job,
        device=device,
        membership=membership,
        folder=folder,
        ending=base.ending,
        trained=trained,
        checkpoints=checkpoints,
        integrity=made.integrity,
        exact=made.exact,
        steps=made.steps,
        collectives=collectives,
        recovery=made.recovery,
        snapshots=made.snapshots,
        synchronisation=made.synchronisation,
        verification=made.verification,
        policy_runner=policy_runner,
        loop=loop,
        first_weights=FirstWeights(
            trained,
            checkpoints,
            folder,
            opened.fingerprint,
            allow_job_change=allow,
            measures=config.recording.curvature is not None,
        ),
        evaluator=Evaluator(job, device, trained, collectives, config.settings.faults.timeout_s),
        listeners=base.listeners,
        metrics=base.metrics,
        callbacks=base.callbacks,
        results=base.results,
        log_follower=base.log_follower,
    )


@dataclass(frozen=True)
class _Base:
    """The part of a run that exists before anything computes: the state and the listeners."""

    config: RunConfig
    opened: Opened
    trained: Trained
    ending: Ending
    requests: Requests
    metrics: MetricsLine
    timer: Timer
    callbacks: Callbacks
    results: ResultWriter
    listeners: Listeners
    log_follower: LogFollower


def _base(config: RunConfig, opened: Opened) -> _Base:
    folder, membership, ending = opened.folder, opened.membership, Ending(opened.closing, opened.leave)
    about = {"job": asdict(config.job), "fingerprint": opened.fingerprint}
    trained = Trained(about, opened.policy_state)
    results = ResultWriter(folder, trained, membership, config)
    metrics, timer, callbacks = MetricsLine(folder, trained, membership), Timer(), Callbacks()
    notices = Notices(folder, membership)
    follower = LogFollower(
        folder, membership, about["job"], config.recording.loggers, config.settings.special.log_every_s
    )
    told = [metrics, *_watching(config, opened), notices, results, callbacks, timer, LoneUpdates(membership), follower]
    listeners = Listeners(told)
    ending.also(lambda: listeners.tell(lambda one: one.close()))
    return _Base(config, opened, trained, ending, Requests(), metrics, timer, callbacks, results, listeners, follower)


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


@dataclass(frozen=True)
class _Computing:
    """The part of a run that computes steps, and keeps their state right."""

    integrity: Integrity
    exact: ExactSteps
    steps: CurrentSteps
    snapshots: Snapshots
    recovery: Recovery
    collectives: CollectiveCalls
    synchronisation: Synchronisation
    verification: Verification


def _computing(base: _Base) -> _Computing:
    config, opened, trained, listeners = base.config, base.opened, base.trained, base.listeners
    membership, checkpoints, folder = opened.membership, opened.checkpoints, opened.folder
    requests, ending, how, every = base.requests, base.ending, config.execution, config.verify_every
    report = WorkerReport(membership, opened.leave, base.timer, checkpoints)
    copies = StateCopies(trained)
    integrity = Integrity(trained, copies, every, audits=how.audit > 0)
    judge = AuditJudge(membership, trained, integrity, checkpoints, listeners)
    exact = ExactSteps(
        config,
        trained,
        membership,
        integrity,
        judge,
        report,
        requests,
        listeners,
        newest_loss=lambda: base.metrics.newest_loss,
        spans=opened.spans,
    )
    begin = partial(begin_local_rounds, spans=opened.spans)
    local = LocalTraining(config, trained, membership, listeners, begin)
    steps = CurrentSteps(trained, membership, folder, exact, local)
    ending.also(steps.drop)
    snapshots = Snapshots(trained, checkpoints, membership, steps, listeners)
    recovery = Recovery(
        membership,
        steps,
        trained,
        integrity,
        requests,
        checkpoints,
        snapshots,
        folder,
        listeners,
        ending,
        again=_again(config.connection.launcher, folder.path),
    )
    collectives = opened.collectives.changing(recovery)
    synchronisation = Synchronisation(
        collectives, steps, trained, membership, checkpoints, requests, report, listeners, ending
    )
    verification = Verification(
        collectives,
        membership,
        steps,
        trained,
        integrity,
        copies,
        judge,
        snapshots,
        listeners,
    )
    return _Computing(integrity, exact, steps, snapshots, recovery, collectives, synchronisation, verification)


def _again(launcher: str, run_dir: Path) -> str:
    """How people go on with a job that has left."""
    if launcher == "unisono":  # which says it itself, since it knows what was typed
        return "start the job again to go on"
    if launcher != "single":
        return f"start the job again with UNISONO_RUN_DIR={run_dir} in its environment to go on"
    if not hasattr(sys.modules["__main__"], "__file__"):  # a notebook's kernel
        return f"unisono.init(run_dir={str(run_dir)!r}) goes on"
    return f"to go on: {again(run_dir)}"


def _loop(base: _Base, made: _Computing, policy_runner: PolicyRunner) -> StepLoop:
    opened, collectives, steps, trained = base.opened, made.collectives, made.steps, base.trained
    between = Boundary(
        collectives,
        steps,
        trained,
        made.integrity,
        made.verification,
        made.recovery,
        made.snapshots,
        opened.checkpoints,
        base.requests,
    )
    return StepLoop(
        base.config,
        collectives,
        opened.membership,
        steps,
        trained,
        made.synchronisation,
        between,
        policy_runner,
        base.listeners,
        base.metrics,
        base.timer,
        base.ending,
        opened.leave,
    )
