"""The commands. Nothing here loads torch; a command that needs it loads it when it is called."""

import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from unisono.errors import USAGE, JobError, UnisonoError


def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            help="Show what this policy would have decided in the run: noise-scale, or module:Class; repeat for "
            "more. It sees what the run measured, which does not react to its decisions: only batch size and "
            "learning rate follow them.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw a chart, too: .png, .svg or .pdf. Needs matplotlib: pip install matplotlib."
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Print a row for each decision and each event, even where many are alike.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print lines of JSON, for programs.")] = False,
) -> None:
    """Show what was decided in a run, when and why; or what a policy would have done in it."""
    from unisono.cli.replay_report import report

    report(run, policy or (), plot, everything=everything, as_json=as_json)


# ``unisono doctor``: everything that a bug report needs.


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Look at this machine: versions, devices, limits, and whether workers can talk to each other.

    Exit code 1 if nothing can be trained here; other problems are listed with what to do.
    """
    from unisono.launch.doctor.doctor import examine

    diagnosis = examine()
    typer.echo(json.dumps(diagnosis.as_json(), indent=1) if as_json else diagnosis.as_text())
    raise typer.Exit(1 if diagnosis.stops else 0)


# ``unisono keys``: for hosts that no coordinator hands keys to.


def keys(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A new file, which only you can read.")],
) -> None:
    """Make keys with which workers of several hosts speak TLS, under torchrun or srun.

    Copy the file to each host (scp -p), and set UNISONO_DATA_KEYS to its path. A job of unisono run needs none.
    """
    from unisono.reduce.data_network import write_keys

    write_keys(file)
    typer.echo(f"{file} is made: copy it to each host with scp -p, and set UNISONO_DATA_KEYS to its path there")


SCRIPT: Any = {"context_settings": {"allow_interspersed_args": False}, "no_args_is_help": True}
"""What stands after the script is the script's, -n and --help too."""


def _run(app: typer.Typer) -> None:
    from unisono.cli.run import run

    app.command("run", **SCRIPT)(run)


def _join(app: typer.Typer) -> None:
    from unisono.cli.join import join
    from unisono.cli.options import RemoteCommand

    app.command("join", cls=RemoteCommand, **SCRIPT)(join)


def _of_running_jobs(app: typer.Typer) -> None:
    from unisono.cli.options import RemoteCommand
    from unisono.cli.status import checkpoint, leave, replace, resize, status, stop

    for command in (status, resize, leave, replace, checkpoint, stop):
        app.command(command.__name__, cls=RemoteCommand)(command)


def _page(app: typer.Typer) -> None:
    from unisono.cli.page import page

    app.command("page")(page)


def _doctor(app: typer.Typer) -> None:
    app.command("doctor")(doctor)


def _keys(app: typer.Typer) -> None:
    app.command("keys", no_args_is_help=True)(keys)


def _replay(app: typer.Typer) -> None:
    app.command("replay", no_args_is_help=True)(replay)


def _timeline(app: typer.Typer) -> None:
    from unisono.cli.timeline import timeline

    app.command("timeline", no_args_is_help=True)(timeline)


def _chaos(app: typer.Typer) -> None:
    from unisono.cli.chaos import chaos

    app.command("chaos")(chaos)


def _studies(app: typer.Typer) -> None:
    from unisono.cli.batch_size import batch_size
    from unisono.cli.study import StudyCommand, study

    app.command("batch-size", cls=StudyCommand, no_args_is_help=True)(batch_size)
    app.command("study", cls=StudyCommand, no_args_is_help=True)(study)


def _simulate(app: typer.Typer) -> None:
    from unisono.cli.simulate import simulate

    app.command("simulate", no_args_is_help=True)(simulate)


def _slurm(app: typer.Typer) -> None:
    from unisono.cli.slurm import slurm

    app.command("slurm", no_args_is_help=True)(slurm)


def _k8s(app: typer.Typer) -> None:
    from unisono.cli.k8s import k8s

    app.command("k8s", no_args_is_help=True)(k8s)


def _verify(app: typer.Typer) -> None:
    from unisono.cli.verify import verify

    app.command("verify", **SCRIPT)(verify)


def _curvature(app: typer.Typer) -> None:
    from unisono.cli.curvature import curvature

    app.command("curvature", **SCRIPT)(curvature)


COMMANDS = {
    "run": _run,
    "join": _join,
    **dict.fromkeys(("status", "resize", "leave", "replace", "checkpoint", "stop"), _of_running_jobs),
    "page": _page,
    "doctor": _doctor,
    "keys": _keys,
    "replay": _replay,
    "timeline": _timeline,
    "chaos": _chaos,
    **dict.fromkeys(("batch-size", "study"), _studies),
    "simulate": _simulate,
    "slurm": _slurm,
    "k8s": _k8s,
    "verify": _verify,
    "curvature": _curvature,
}
"""What loads each command, in the order of the help."""


def application(words: Sequence[str] = ()) -> typer.Typer:
    """The command line.

    Args:
        words: its arguments. If they begin with a command, only that is loaded; otherwise all are.
    """
    app = typer.Typer(
        name="unisono",
        help="Exact data-parallel training on PyTorch: the same weights, bit for bit, on any number of workers.",
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    app.callback()(options)
    wanted = [COMMANDS[words[0]]] if words and words[0] in COMMANDS else dict.fromkeys(COMMANDS.values())
    for add in wanted:
        add(app)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"unisono {sys.modules['unisono'].__version__}")
        raise typer.Exit


def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options that stand before a command."""


def _ready_streams() -> None:
    """Output works even if it was closed (``>&-``), or if a worker writes what this terminal cannot show."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115 (for the life of the process)
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def main() -> None:
    """The console entry: an error is one line on stderr; exit code 2 if the person who typed can mend it."""
    _ready_streams()
    try:
        application(sys.argv[1:])()
    except UnisonoError as error:
        typer.echo(f"unisono: error: {error}", err=True)
        sys.exit(USAGE if isinstance(error, JobError) else 1)
    except OSError as error:
        if error.filename is None:
            raise
        typer.echo(f"unisono: error: {error}", err=True)  # it names the file, and says what is wrong with it
        sys.exit(1)
