"""All objects that a run consists of, made in an order in which none needs a later one."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unisono.checkpoint.folder import RunFolder
from unisono.host.process import resume_command
from unisono.job import Job
from unisono.spans import Spans
from unisono.train.config.run_config import RunConfig
from unisono.train.group.collectives import CollectiveCalls
from unisono.train.group.membership import Membership
from unisono.train.loop.evaluation import Evaluator
from unisono.train.loop.loop_data import LoopDataSets
from unisono.train.loop.loop_watch import LoopWatch
from unisono.train.plugins import Callbacks
from unisono.train.policy_runner import PolicyRunner
from unisono.train.record.log_follower import LogFollower
from unisono.train.record.metrics_line import MetricsLine
from unisono.train.record.notices import LoneUpdates, Notices
from unisono.train.record.result_file import ResultWriter, worker_name
from unisono.train.record.step_timeline import StepTimeline, TorchProfile
from unisono.train.record.trace import SampleLog, Trace
from unisono.train.recovery.boundary import Boundary, Verification
from unisono.train.recovery.compared_steps import JudgedAudits
from unisono.train.recovery.integrity import Integrity
from unisono.train.recovery.known_states import KnownStates, StateCopies
from unisono.train.recovery.recovery import Recovery, Snapshots
from unisono.train.state.checkpoints import FirstWeights, RunCheckpoints
from unisono.train.state.ending import Ending, LeaveRequest, Requests
from unisono.train.state.policy_state import PolicyState
from unisono.train.state.registry import UPDATE, Attribute
from unisono.train.state.trained import Trained
from unisono.train.state.unnamed import UnnamedStates
from unisono.train.step.current import CurrentSteps
from unisono.train.step.listeners import Listener, Listeners
from unisono.train.step.run_base import RunBase
from unisono.train.step.synchronisation import RequestFields, Synchronisation, TimeFields, Timer
from unisono.train.step_body import StepBody
from unisono.train.step_loop import StepLoop
from unisono.train.strategies.exact_steps import ExactSteps
from unisono.train.strategies.local_rounds import begin_local_rounds
from unisono.train.strategies.local_training import LocalTraining


@dataclass(frozen=True, eq=False)
class RunListeners:
    """The listeners of a run that other objects use."""

    metrics: MetricsLine
    timer: Timer
    callbacks: Callbacks
    results: ResultWriter
    log_follower: LogFollower
    watch: LoopWatch


@dataclass(frozen=True, eq=False)
class Computing:
    """The objects of a run that compute steps, and keep their state right."""

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
    """All objects of a run, for the run itself and for fault injection; scripts leave them alone."""

    job: Job
    device: torch.device
    policy_runner: PolicyRunner
    loop: StepLoop
    first_weights: FirstWeights
    evaluator: Evaluator


@dataclass(frozen=True)
class Opened:
    """The objects that were opened for a run, and are closed with it. ``spans`` is None if they are not kept."""

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
    """Make all objects of a run, each with what it needs."""
    membership, checkpoints = opened.membership, opened.checkpoints
    if not membership.joins and membership.workers.rank == 0:
        checkpoints.begin_writing()
    run, listening = _base(config, opened)
    computing = _computing(run, listening, opened.collectives)
    policy_runner = PolicyRunner(run, listening.metrics, computing.collectives)
    loop = _loop(run, listening, computing, policy_runner)
    run.ending.also(loop.leave)
    first_weights = FirstWeights(run.trained, checkpoints, opened.folder, opened.fingerprint, config)
    rest = {"job": config.job, "device": config.device, "evaluator": Evaluator(run, computing.collectives)}
    parts: dict[str, Any] = {**vars(run), **vars(listening), **vars(computing), **rest}
    return Inside(**parts, policy_runner=policy_runner, loop=loop, first_weights=first_weights)


def _base(config: RunConfig, opened: Opened) -> tuple[RunBase, RunListeners]:
    folder, membership, ending = opened.folder, opened.membership, Ending(opened.closing, opened.leave)
    description = {"job": asdict(config.job), "fingerprint": opened.fingerprint}
    trained = Trained(description, opened.policy_state)
    look_s = config.settings.special.log_every_s
    follower = LogFollower(folder, membership, description["job"], config.recording.loggers, look_s)
    results = ResultWriter(folder, trained, membership, config)
    states = UnnamedStates(trained.registry, lambda: membership.is_main, folder.journal, strict=config.settings.strict)
    watch = LoopWatch(states, trained.registry)
    listening = RunListeners(MetricsLine(folder, trained, membership), Timer(), Callbacks(), results, follower, watch)
    watching, lone_updates = [*_watching(config, opened), Notices(folder, membership)], LoneUpdates(membership)
    listeners = Listeners(
        [listening.metrics, *watching, results, listening.callbacks, listening.timer, lone_updates, watch, follower]
    )
    ending.also(listeners.close)
    requests = Requests(trained.registry)
    checkpoints, leave, spans = opened.checkpoints, opened.leave, opened.spans
    run = RunBase(config, membership, folder, checkpoints, leave, spans, trained, ending, requests, listeners, states)
    return run, listening


def _watching(config: RunConfig, opened: Opened) -> list[Listener]:
    """The listeners that write down what can be checked or looked at later."""
    recording, listeners = config.recording, list[Listener]()
    rank = -1 if opened.membership.joins else opened.membership.workers.process
    worker = worker_name(config, opened.membership)
    if config.settings.special.samples:
        listeners.append(SampleLog(opened.folder.path, worker))
    if opened.spans is not None:
        host = config.connection.environment.host
        listeners.append(StepTimeline(opened.folder.path, worker, host, opened.spans, opened.membership))
    if recording.profile is not None:
        listeners.append(TorchProfile(opened.folder.path, worker, recording.profile))
    if recording.trace is not None:
        listeners.append(Trace.open(recording.trace, rank))
    return listeners


def _computing(run: RunBase, listening: RunListeners, calls: CollectiveCalls) -> Computing:
    config, trained = run.config, run.trained
    requests, times, copies = RequestFields(run), TimeFields(run, listening.timer), StateCopies(trained)
    integrity = Integrity(trained, copies, config.verify_every, audits=config.execution.audit > 0)
    known_states = Attribute(integrity, "known", KnownStates)
    trained.registry.add("known", known_states, within=(), when=UPDATE, checkpoint=False)
    audits = JudgedAudits(run, integrity)
    exact = ExactSteps(run, integrity, audits, requests, times, newest_loss=lambda: listening.metrics.newest_loss)
    begin = partial(begin_local_rounds, spans=run.spans)
    steps = CurrentSteps(run, exact, LocalTraining(config, trained, run.membership, run.listeners, begin))
    run.ending.also(steps.drop)
    snapshots = Snapshots(run, steps)
    recovery = Recovery(run, steps, integrity, snapshots, _again(config.connection.launcher, run.folder.path))
    collectives = calls.changing(recovery)
    synchronisation = Synchronisation(run, collectives, steps, requests, times)
    verification = Verification(run, collectives, steps, integrity, copies, audits, snapshots)
    return Computing(integrity, exact, steps, snapshots, recovery, collectives, synchronisation, verification)


def _again(launcher: str, run_dir: Path) -> str:
    """The advice on how to go on with a job that has left."""
    if launcher == "unisono":  # the launcher says the rest, since it knows its command line
        return "start the job again to go on"
    if launcher != "single":
        return f"start the job again with UNISONO_RUN_DIR={run_dir} in its environment to go on"
    if not hasattr(sys.modules["__main__"], "__file__"):  # in a notebook's kernel
        return f"unisono.init(run_dir={str(run_dir)!r}) goes on"
    return f"to go on: {resume_command(run_dir)}"


def _loop(run: RunBase, listening: RunListeners, made: Computing, policy_runner: PolicyRunner) -> StepLoop:
    collectives, steps = made.collectives, made.steps
    between = Boundary(run, collectives, steps, made.integrity, made.verification, made.recovery, made.snapshots)
    body = StepBody(
        run,
        collectives,
        steps,
        made.synchronisation,
        made.snapshots,
        policy_runner,
        listening.metrics,
        listening.timer,
    )
    data_sets = LoopDataSets(run.config, run.trained.policy_state, collectives, listening.watch)
    return StepLoop(body, between, data_sets)
