"""The help of commands, and their errors in one line."""

from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand

FIRST = "Options"
"""The group of options that belong to no other one."""

ALL = "--help-all"
MOST = 25
"""Options that a help shows at once; with more it shows the first group, and names the others."""


class HelpfulCommand(TyperCommand):
    """A command that shows its options in groups: those of the first one by ``--help``, all by ``--help-all``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Show all options, if this is what is asked for first."""
        if args[:1] == [ALL]:
            ctx.meta[ALL] = True
            typer.echo(self.get_help(ctx))
            ctx.exit()
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """The groups, each under its name; without rich's frames, in which long names are cut."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], FIRST: []}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                is_argument = parameter.param_type_name == "argument"
                name = "Arguments" if is_argument else getattr(parameter, "rich_help_panel", None) or FIRST
                groups.setdefault(name, []).append(record)
        count = sum(map(len, groups.values())) - len(groups["Arguments"])
        hidden = (
            [] if ALL in ctx.meta or count <= MOST else [name for name in groups if name not in ("Arguments", FIRST)]
        )
        for name, records in groups.items():
            if records and name not in hidden:
                with formatter.section(name):
                    formatter.write_dl(records)
        if hidden:
            others = ", ".join(f"{name} ({len(groups[name])})" for name in hidden)
            formatter.write_paragraph()
            formatter.write_text(f"{ctx.command_path} {ALL} shows the others: {others}.")


def call(app: typer.Typer, words: Sequence[str]) -> int:
    """Call a command; what is wrong with its words is one line on stderr.

    Returns:
        the exit code.
    """
    try:
        result = app(list(words), prog_name="unisono", standalone_mode=False)
    except Exception as error:  # the class of such errors differs between versions of Typer
        if not hasattr(error, "format_message"):
            raise
        message, context = error.format_message(), getattr(error, "ctx", None)
        if "\n" in message:  # the help, where no command is named
            typer.echo(message, err=True)
        else:
            shows = "" if context is None else f" ({context.command_path} --help shows what there is)"
            typer.echo(f"unisono: error: {message}{shows}", err=True)
        return int(getattr(error, "exit_code", 2))
    return result if isinstance(result, int) else 0
