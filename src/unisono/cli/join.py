"""``unisono join``: more room for workers of a job that is under way."""

from pathlib import Path
from typing import Annotated

import typer

from unisono.cli.options import Grace, Module, Threads, Tuned, WarmStart
from unisono.launch.address import address_of
from unisono.launch.elastic import ElasticSettings, Range
from unisono.launch.report import report
from unisono.launch.script import Script
from unisono.launch.settings import GRACE_S, LaunchSettings
from unisono.launch.terminal import Terminal
from unisono.launch.tuning import Tuning


def join(
    script: Annotated[str, typer.Argument(help="The script of the job.", metavar="SCRIPT")],
    args: Annotated[
        list[str] | None, typer.Argument(help="Its arguments, as unisono run got them.", metavar="ARGS")
    ] = None,
    run_dir: Annotated[
        Path, typer.Option(help="The job's run folder: where its coordinator and its token are found.")
    ] = ...,  # type: ignore[assignment]
    workers: Annotated[int, typer.Option("-n", "--workers", min=1, help="How many workers there is room for.")] = 1,
    module: Module = False,
    threads: Threads = None,
    grace_s: Grace = GRACE_S,
    tuned: Tuned = True,
    certificate: Annotated[Path | None, typer.Option(help="To trust, if the coordinator's is its own.")] = None,
    warm_start: WarmStart = True,
) -> None:
    """Offer room for N more workers to an elastic job: unisono join --run-dir runs/a -n 2 train.py --its-own flags."""
    launch = LaunchSettings(
        script=Script(script, tuple(args or ()), is_module=module),
        workers=workers,
        run_dir=run_dir,
        threads=threads,
        grace_s=grace_s,
        tuning=Tuning.of_this_process(wanted=tuned),
    )
    settings = ElasticSettings(launch, Range(1, workers), warm_start=warm_start)
    settings.check()
    raise typer.Exit(start(settings, run_dir, certificate))


def start(settings: ElasticSettings, run_dir: Path, certificate: Path | None) -> int:
    """Run workers for a job until it is over, or this is asked to leave.

    Returns:
        the exit code.

    Raises:
        JobError: no job runs in this folder.
        LaunchError: its coordinator does not answer, or does not want this agent.
    """
    from unisono.checkpoint.folder import RunFolder
    from unisono.launch.agent import Joined, run_agent
    from unisono.membership.token import token_file

    joined = Joined(address_of(run_dir, certificate), token_file(run_dir))
    folder = RunFolder(run_dir)
    terminal = Terminal.of_this_process()
    terminal.say(f"room for {settings.launch.workers} more, run folder {folder.path}")
    outcome = run_agent(settings, folder, terminal, joined)
    terminal.conclude(report(outcome, folder))
    return outcome.exit_code
