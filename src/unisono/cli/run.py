"""``unisono run``: start the workers of a job on this host."""

import os
from pathlib import Path

import typer

from unisono.cli.options import (
    AllowJobChange,
    AuditShare,
    CheckpointEvery,
    DryRun,
    FailureTimeout,
    FaultScript,
    Grace,
    Here,
    ListenAt,
    MaxRestarts,
    Module,
    PolicyNames,
    RestartOnError,
    RunDir,
    ScriptArguments,
    ScriptName,
    Shards,
    StrategyName,
    Threads,
    TlsCert,
    TlsKey,
    Tuned,
    WarmStart,
    WorkerRange,
)
from unisono.host.cgroup import usable_cores
from unisono.launch.command import dry_run, elastic_dry_run
from unisono.launch.elastic.elastic import FAILURE_TIMEOUT_S, MAX_RESTARTS, ElasticSettings, Range
from unisono.launch.elastic.entrance import Entrance
from unisono.launch.ending.outcome import Outcome
from unisono.launch.ending.result import RUNS, open_folder, report
from unisono.launch.local import launch
from unisono.launch.settings import GRACE_S, LaunchSettings, Script
from unisono.launch.terminal.terminal import Terminal
from unisono.launch.tuning import Tuning


def run(
    script: ScriptName,
    args: ScriptArguments = None,
    workers: WorkerRange = "1",
    module: Module = False,
    run_dir: RunDir = None,
    shards: Shards = None,
    threads: Threads = None,
    checkpoint_every: CheckpointEvery = None,
    grace_s: Grace = GRACE_S,
    allow_job_change: AllowJobChange = False,
    tuned: Tuned = True,
    max_restarts: MaxRestarts = None,
    restart_on_error: RestartOnError = False,
    failure_timeout_s: FailureTimeout = FAILURE_TIMEOUT_S,
    warm_start: WarmStart = True,
    coordinator: ListenAt = None,
    here: Here = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    faults: FaultScript = None,
    policy: PolicyNames = None,
    strategy: StrategyName = None,
    audit: AuditShare = None,
    dry: DryRun = False,
) -> None:
    """Start workers that train together: unisono run -n 4 train.py --its-own flags.

    With a range (-n 2:8) or --max-restarts the job is elastic: workers may come and go while it trains. With
    --coordinator, from other hosts, too.
    """
    wanted = Range.read(workers)
    fitting = wanted.within(usable_cores() // (threads or 1))
    room = here if here is not None or coordinator is None else fitting
    settings = LaunchSettings(
        script=Script(script, tuple(args or ()), is_module=module),
        workers=wanted.largest if room is None else min(room, wanted.largest),
        run_dir=run_dir,
        shards=shards,
        threads=threads,
        checkpoint_every=checkpoint_every,
        allow_job_change=allow_job_change,
        grace_s=grace_s,
        tuning=Tuning.of_this_process(wanted=tuned),
        warm_start=warm_start,
        policies=tuple(policy or ()),
        strategy=strategy,
        audit=audit,
        extra_environment={} if faults is None else _fault_injection(faults),
    )
    elastic = ElasticSettings(
        settings,
        wanted,
        begin_with=None if room is not None or fitting == wanted.largest else fitting,
        max_restarts=MAX_RESTARTS if max_restarts is None else max_restarts,
        restart_on_error=restart_on_error,
        failure_timeout_s=failure_timeout_s,
        entrance=Entrance.read(coordinator, tls_cert, tls_key),
    )
    elastic.check()
    is_elastic = not wanted.is_fixed or max_restarts is not None or room is not None
    if dry:
        typer.echo(_shown(settings, is_elastic=is_elastic))
        return
    raise typer.Exit(start_elastic(elastic) if is_elastic else start(settings))


def _shown(settings: LaunchSettings, *, is_elastic: bool) -> str:
    show = elastic_dry_run if is_elastic else dry_run
    return show(settings, settings.run_dir or RUNS / f"TIME-{settings.script.stem}")


def _fault_injection(script: Path) -> dict[str, str]:
    """The environment variables by which workers inject the faults of a plan."""
    from unisono.testing.faults import Faults
    from unisono.testing.injector import PLUGIN, SCRIPT

    Faults.read(script)
    others = os.environ.get("UNISONO_PLUGINS")
    plugins = f"{others},{PLUGIN}" if others else PLUGIN
    return {"UNISONO_PLUGINS": plugins, SCRIPT: os.path.abspath(script)}  # noqa: PTH100 (as for the run folder)


def start(settings: LaunchSettings) -> int:
    """Run a job to its end and say how it ended.

    Returns:
        the exit code.

    Raises:
        JobError: the run folder cannot be used.
        LaunchError: a worker could not be started.
    """
    folder = open_folder(settings.run_dir, settings.script.stem)
    terminal = Terminal.of_this_process()
    terminal.say(f"{settings.workers} worker{'s' if settings.workers > 1 else ''}, run folder {folder.path}")
    outcome: Outcome = launch(settings, folder, terminal)
    terminal.conclude(report(outcome, folder))
    return outcome.exit_code


def start_elastic(settings: ElasticSettings) -> int:
    """Run an elastic job to its end and say how it ended.

    Returns:
        the exit code.

    Raises:
        JobError: the run folder cannot be used.
        LaunchError: the coordinator cannot be started, or cannot be kept running.
    """
    from unisono.launch.elastic.agent import run_agent  # it loads what only elastic jobs need

    folder = open_folder(settings.launch.run_dir, settings.launch.script.stem)
    terminal = Terminal.of_this_process()
    begin = "" if settings.begin_with is None else f", {settings.begin_with} to begin with"
    if settings.launch.workers < settings.workers.largest:
        begin = f", {settings.launch.workers} of them here"
    terminal.say(f"{settings.workers} workers{begin}, run folder {folder.path}")
    outcome = run_agent(settings, folder, terminal)
    terminal.conclude(report(outcome, folder))
    return outcome.exit_code
