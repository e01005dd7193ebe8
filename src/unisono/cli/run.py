"""``unisono run``: start the workers of a job on this host."""

from pathlib import Path
from typing import Annotated

import typer

from unisono.cli.options import Module, Shards, Threads, Tuned
from unisono.launch.command import dry_run
from unisono.launch.local import launch
from unisono.launch.report import report
from unisono.launch.result import RUNS, open_folder
from unisono.launch.script import Script
from unisono.launch.settings import GRACE_S, LaunchSettings
from unisono.launch.terminal import Terminal
from unisono.launch.tuning import Tuning


def run(
    script: Annotated[str, typer.Argument(help="The script to train with; a module's name with -m.", metavar="SCRIPT")],
    args: Annotated[
        list[str] | None, typer.Argument(help="Everything after the script belongs to the script.", metavar="ARGS")
    ] = None,
    workers: Annotated[int, typer.Option("-n", "--workers", help="How many workers to start.")] = 1,
    module: Module = False,
    run_dir: Annotated[
        Path | None,
        typer.Option(envvar="UNISONO_RUN_DIR", help="Run folder; one with checkpoints of this job is resumed."),
    ] = None,
    shards: Shards = None,
    threads: Threads = None,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(envvar="UNISONO_CHECKPOINT_EVERY", help="Steps between checkpoints, unless the script sets them."),
    ] = None,
    grace_s: Annotated[float, typer.Option(help="Seconds to leave in after the first Ctrl-C or SIGTERM.")] = GRACE_S,
    allow_job_change: Annotated[
        bool,
        typer.Option("--allow-job-change", envvar="UNISONO_ALLOW_JOB_CHANGE", help="Resume although settings differ."),
    ] = False,
    tuned: Tuned = True,
    dry: Annotated[bool, typer.Option("--dry-run", help="Print what each worker would be started with.")] = False,
) -> None:
    """Start N workers that train together: unisono run -n 4 train.py --its-own flags."""
    settings = LaunchSettings(
        script=Script(script, tuple(args or ()), is_module=module),
        workers=workers,
        run_dir=run_dir,
        shards=shards,
        threads=threads,
        checkpoint_every=checkpoint_every,
        allow_job_change=allow_job_change,
        grace_s=grace_s,
        tuning=Tuning.of_this_process(wanted=tuned),
    )
    settings.check()
    if dry:
        typer.echo(dry_run(settings, run_dir or RUNS / f"TIME-{settings.script.stem}"))
        return
    raise typer.Exit(start(settings))


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
    outcome = launch(settings, folder, terminal)
    terminal.conclude(report(outcome, folder))
    return outcome.exit_code
