"""All that a run consists of, made in an order in which nothing needs what comes later."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from unisono.checkpoint.folder import RunFolder
from unisono.job import Job
from unisono.train.group.collectives import CollectiveCalls
from unisono.train.group.membership import Membership
from unisono.train.loop.evaluation import Evaluator
from unisono.train.policy_runner import PolicyRunner
from unisono.train.record.callbacks import Callbacks
from unisono.train.record.metrics_line import MetricsLine
from unisono.train.record.notices import Notices
from unisono.train.record.results import Results
from unisono.train.record.sample_log import SampleLog
from unisono.train.record.trace import Trace
from unisono.train.recovery.copies import StateCopies
from unisono.train.recovery.integrity import Integrity
from unisono.train.recovery.recovery import Recovery, Snapshots
from unisono.train.recovery.verification import AuditJudge, Verification
from unisono.train.state.checkpoints import Checkpoints
from unisono.train.state.ending import Ending, Requests
from unisono.train.state.first_weights import FirstWeights
from unisono.train.state.trained import Trained
from unisono.train.step.current import CurrentSteps
from unisono.train.step.listeners import Listener, Listeners
from unisono.train.step.run_context import RunContext
from unisono.train.step.synchronisation import Synchronisation
from unisono.train.step.worker_report import Timer, WorkerReport
from unisono.train.step_loop import LoopLimits, StepLoop
from unisono.train.strategies.exact_steps import ExactSteps
from unisono.train.strategies.local_training import LocalTraining


@dataclass(frozen=True)
class Inside:
    """What a run consists of. For the run, and for those who inject faults into it; scripts leave it alone.

    Attributes:
        job: that is trained.
        device: where this worker computes.
        membership: who trains.
        folder: of the run.
        ending: of the run on this worker.
        trained: models, optimizers, position: the state.
        checkpoints: of the state.
        integrity: what is known of older states.
        exact: computes steps after which all workers have the same weights.
        steps: who computes now.
        collectives: the collective calls.
        recovery: goes on when workers come and go.
        snapshots: takes the state.
        synchronisation: gets workers the same weights.
        verification: compares the state.
        policy_runner: asks policies.
        loop: carries loops out.
        first_weights: with which the training begins.
        evaluator: evaluates beside training.
        listeners: who is told what happens.
        metrics: the line of the step that is under way.
        callbacks: what the script wants to have called.
        results: what ``result.json`` says.
    """

    job: Job
    device: torch.device
    membership: Membership
    folder: RunFolder
    ending: Ending
    trained: Trained
    checkpoints: Checkpoints
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
    results: Results


def assemble(
    job: Job, membership: Membership, device: torch.device, checkpoints: Checkpoints, context: RunContext
) -> Inside:
    """Make everything, each with all that it needs.

    Args:
        job: that is trained.
        membership: who trains.
        device: where this worker computes.
        checkpoints: of the run.
        context: settings, and what was opened with them.
    """
    if not membership.joins and membership.workers.rank == 0:
        checkpoints.begin_writing()
    base = _base(job, membership, device, checkpoints, context)
    made = _computing(base)
    collectives, trained, folder = made.collectives, base.trained, base.folder
    policy_runner = PolicyRunner(job, trained, membership, checkpoints, base.metrics, folder, collectives)
    loop = _loop(base, made, policy_runner)
    base.ending.also(loop.leave)
    allow = context.settings.allow_job_change
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
        first_weights=FirstWeights(trained, checkpoints, folder, context.fingerprint, allow_job_change=allow),
        evaluator=Evaluator(job, device, trained, collectives),
        listeners=base.listeners,
        metrics=base.metrics,
        callbacks=base.callbacks,
        results=base.results,
    )


@dataclass(frozen=True)
class _Base:
    """What is there before anything computes: the state, and who listens."""

    job: Job
    membership: Membership
    device: torch.device
    checkpoints: Checkpoints
    context: RunContext
    folder: RunFolder
    trained: Trained
    ending: Ending
    requests: Requests
    metrics: MetricsLine
    timer: Timer
    callbacks: Callbacks
    results: Results
    listeners: Listeners


def _base(
    job: Job, membership: Membership, device: torch.device, checkpoints: Checkpoints, context: RunContext
) -> _Base:
    folder, ending, timeout_s = context.folder, Ending(context.opened), context.fault_tolerance.failure_timeout_s
    about = {"job": job.model_dump(mode="json"), "fingerprint": context.fingerprint}
    trained = Trained(about, context.policy_state)
    results = Results(folder, trained, membership, job, device, timeout_s, measures=context.settings.study)
    metrics, timer, callbacks = MetricsLine(folder, trained, membership), Timer(), Callbacks()
    notices = Notices(job, folder, membership)
    listeners = Listeners([metrics, *_watching(membership, context), notices, results, callbacks, timer])
    ending.also(lambda: listeners.tell(lambda one: one.close()))
    return _Base(
        job,
        membership,
        device,
        checkpoints,
        context,
        folder,
        trained,
        ending,
        Requests(),
        metrics,
        timer,
        callbacks,
        results,
        listeners,
    )


def _watching(membership: Membership, context: RunContext) -> list[Listener]:
    """Those who write down what somebody is going to check."""
    settings, rank, found = context.settings, -1 if membership.joins else membership.workers.rank, list[Listener]()
    if settings.samples:
        worker = f"rank-{rank}" if settings.coordinator is None else settings.coordinator.worker
        found.append(SampleLog(context.folder.path, worker))
    if settings.trace is not None:
        found.append(Trace.open(settings.trace, rank))
    return found


@dataclass(frozen=True)
class _Computing:
    """Who computes steps, and keeps their state right."""

    integrity: Integrity
    exact: ExactSteps
    steps: CurrentSteps
    snapshots: Snapshots
    recovery: Recovery
    collectives: CollectiveCalls
    synchronisation: Synchronisation
    verification: Verification


def _computing(base: _Base) -> _Computing:
    job, device, context, listeners = base.job, base.device, base.context, base.listeners
    membership, trained, checkpoints, folder = base.membership, base.trained, base.checkpoints, base.folder
    requests, ending, how, fault_tolerance = base.requests, base.ending, context.execution, context.fault_tolerance
    report = WorkerReport(membership, context.leave, base.timer, checkpoints)
    copies = StateCopies(trained)
    integrity = Integrity(trained, copies, fault_tolerance.verify_every, audits=how.audit > 0)
    judge = AuditJudge(membership, trained, integrity, checkpoints, listeners)
    exact = ExactSteps(
        job,
        device,
        how,
        trained,
        membership,
        integrity,
        judge,
        report,
        requests,
        listeners,
        newest_loss=lambda: base.metrics.newest_loss,
        tells_times=context.settings.study,
    )
    local = LocalTraining(job, device, trained, membership, listeners, fault_tolerance.failure_timeout_s)
    steps = CurrentSteps(trained, membership, folder, listeners, exact, local)
    ending.also(steps.drop)
    snapshots = Snapshots(trained, checkpoints, steps, listeners)
    recovery = Recovery(
        membership, steps, trained, integrity, requests, checkpoints, snapshots, folder, listeners, ending
    )
    collectives = context.collectives.changing(recovery)
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
        shares=how.shard_optimizer,
    )
    return _Computing(integrity, exact, steps, snapshots, recovery, collectives, synchronisation, verification)


def _loop(base: _Base, made: _Computing, policy_runner: PolicyRunner) -> StepLoop:
    settings, context = base.context.settings, base.context
    how = LoopLimits(
        context.fault_tolerance.failure_timeout_s,
        settings.stop_after,
        settings.stop_after_epochs,
        context.execution.monitoring,
    )
    return StepLoop(
        base.job,
        base.device,
        how,
        made.collectives,
        base.membership,
        made.steps,
        base.trained,
        made.synchronisation,
        made.integrity,
        made.verification,
        made.recovery,
        made.snapshots,
        base.checkpoints,
        base.requests,
        policy_runner,
        base.listeners,
        base.metrics,
        base.timer,
        base.ending,
    )
