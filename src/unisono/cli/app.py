"""The commands. They load torch, where they need it, only when they are called."""

import errno
import io
import json
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from unisono.cli.display import HelpfulCommand, call
from unisono.errors import USAGE, JobError, UnisonoError
from unisono.named import Extension, extensions
from unisono.received import imported, why_of

COMPLETE = "_UNISONO_COMPLETE"
"""The variable that is set while a shell asks for completions."""


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Find out whether workers can train on this machine.

    Prints versions, devices and limits, and tries whether workers can talk to each other. Exit code 1 if nothing can be
    trained here; other problems are listed with what to do.
    """
    from unisono.launch.doctor import examine

    diagnosis = examine()
    typer.echo(json.dumps(diagnosis.as_json(), indent=1) if as_json else diagnosis.as_text())
    raise typer.Exit(1 if diagnosis.stops else 0)


def keys(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A new file, which only you can read.")],
) -> None:
    """Make keys for TLS between workers of several hosts.

    They are for torchrun and srun; a job of unisono run needs none. Copy the file to each host (scp -p), and set
    UNISONO_DATA_KEYS to its path.
    """
    from unisono.reduce.data_network import write_keys

    write_keys(file)
    typer.echo(f"{file} is made: copy it to each host with scp -p, and set UNISONO_DATA_KEYS to its path there")


COMMANDS = {
    "run": "unisono.cli.run_command:app",
    **dict.fromkeys(("join", "status", "resize", "leave", "replace", "checkpoint", "stop"), "unisono.cli.jobs:app"),
    "doctor": "unisono.cli.app:doctor",
    "keys": "unisono.cli.app:keys",
    "slurm": "unisono.cli.clusters:slurm",
    "k8s": "unisono.cli.clusters:k8s",
    "verify": "unisono.cli.verify_command:app",
}
"""The place of each of our own commands, in the order of the help. Extensions add others."""


def application(words: Sequence[str] = ()) -> typer.Typer:
    """The command line.

    Args:
        words: its arguments. If they begin with a command, only this command is loaded; otherwise all are.
    """
    app = typer.Typer(
        name="unisono",
        help="Exact data-parallel training on PyTorch: the same weights, bit for bit, on any number of workers.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    app.callback()(options)
    if words and words[0] in COMMANDS:
        _add_own(app, words[0])
        return app
    try:
        others = {name: command for name, command in extensions("command").items() if name not in COMMANDS}
    except JobError as error:
        _warn(error)
        others = {}
    if words and words[0] in others:
        _add(app, others[words[0]])
        return app
    for name in COMMANDS:
        _add_own(app, name)
    for command in others.values():
        try:
            _add(app, command)
        except JobError as error:  # an extension cannot be loaded: the others are shown in the help
            _warn(error)
    return app


def _warn(error: JobError) -> None:
    if COMPLETE not in os.environ:  # a shell would show the warning among the completions
        typer.echo(f"unisono: {error}", err=True)


def _add_own(app: typer.Typer, name: str) -> None:
    command = imported(COMMANDS[name], f"the command {name}")
    if isinstance(command, typer.Typer):
        app.registered_commands += [info for info in command.registered_commands if info.callback.__name__ == name]  # type: ignore[union-attr]
    else:
        app.command(name, cls=HelpfulCommand)(command)


def _add(app: typer.Typer, extension: Extension) -> None:
    """Add the command of an extension: a function, or a typer.Typer with one command, or with several subcommands.

    Raises:
        JobError: it cannot be loaded, or is no command.
    """
    trial = typer.Typer(rich_markup_mode=None)  # so that a command which typer refuses does not spoil the application
    trial.callback()(lambda: None)
    with redirect_stdout(sys.stderr):  # what a module prints when it is imported is not the command's output
        command = extension.load()
    try:
        if not isinstance(command, typer.Typer):
            trial.command(extension.name, cls=HelpfulCommand)(command)
        elif len(command.registered_commands) == 1 and not command.registered_groups:
            [only] = command.registered_commands
            only.name = extension.name
            trial.registered_commands.append(only)
        elif command.registered_commands or command.registered_groups:
            trial.add_typer(command, name=extension.name)
        else:
            raise JobError(f"the command {extension.name} is a typer.Typer without commands")
        typer.main.get_command(trial)
    except JobError:
        raise
    except Exception as error:  # noqa: BLE001  (an object of another package may raise anything)
        raise JobError(
            f"the command {extension.name} is neither a function nor a typer.Typer: {why_of(error)}"
        ) from None
    app.registered_commands += trial.registered_commands
    app.registered_groups += trial.registered_groups


def _print_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"unisono {sys.modules['unisono'].__version__}")
        raise typer.Exit


def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options that stand before a command."""


def _ready_streams() -> None:
    """Make output work even if it was closed (``>&-``), or if this terminal cannot show what a worker writes."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115 (for the life of the process)
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def main() -> None:
    """The console entry. An error is one line on stderr; the exit code is 2 if the person who typed can mend it."""
    _ready_streams()
    try:
        words = sys.argv[1:]
        if COMPLETE in os.environ:  # the words in the shell's line, so that only their command is loaded
            words = (os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")).split()[1:]
        sys.exit(call(application(words), sys.argv[1:]))
    except UnisonoError as error:
        typer.echo(f"unisono: error: {error}", err=True)
        sys.exit(USAGE if isinstance(error, JobError) else 1)
    except OSError as error:
        if error.filename is None and error.errno != errno.ENOSPC:
            raise
        typer.echo(f"unisono: error: {error}", err=True)  # the text names the file, and what is wrong with it
        sys.exit(1)
