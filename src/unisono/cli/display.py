"""The output of commands: their help, their errors in one line, and tables."""

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:  # most commands show none of them
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

ARGUMENTS, OPTIONS = "Arguments", "Options"
"""The groups of parameters that belong to no other group."""

ALL = "--help-all"
MOST = 25
"""The most options that a help shows at once; with more it shows the first group, and names the others."""


class HelpfulCommand(TyperCommand):
    """A command that shows its options in groups: those of the first one by ``--help``, all by ``--help-all``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Show all options if ``--help-all`` is the first word."""
        if args[:1] == [ALL]:
            ctx.meta[ALL] = True
            typer.echo(self.get_help(ctx))
            ctx.exit()
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write each group under its name; without rich's frames, in which long names are cut."""
        groups: dict[str, list[tuple[str, str]]] = {ARGUMENTS: [], OPTIONS: []}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                is_argument = parameter.param_type_name == "argument"
                name = ARGUMENTS if is_argument else getattr(parameter, "rich_help_panel", None) or OPTIONS
                groups.setdefault(name, []).append(record)
        count = sum(map(len, groups.values())) - len(groups[ARGUMENTS])
        is_long = ALL not in ctx.meta and count > MOST
        hidden = [name for name in groups if is_long and name not in (ARGUMENTS, OPTIONS)]
        for name, records in groups.items():
            if records and name not in hidden:
                with formatter.section(name):
                    formatter.write_dl(records)
        if hidden:
            others = ", ".join(f"{name} ({len(groups[name])})" for name in hidden)
            formatter.write_paragraph()
            formatter.write_text(f"{ctx.command_path} {ALL} shows the others: {others}.")


def call(app: typer.Typer, words: Sequence[str]) -> int:
    """Call a command. An error in its words is one line on stderr.

    Returns:
        the exit code.
    """
    try:
        result = app(list(words), prog_name="unisono", standalone_mode=False)
    except Exception as error:  # the class of such errors differs between versions of Typer
        if not hasattr(error, "format_message"):
            raise
        message, context = error.format_message(), getattr(error, "ctx", None)
        if "\n" in message:  # without a command, the message is the help
            typer.echo(message, err=True)
        else:
            hint = "" if context is None else f" ({context.command_path} --help shows what there is)"
            typer.echo(f"unisono: error: {message}{hint}", err=True)
        return int(getattr(error, "exit_code", 2))
    return result if isinstance(result, int) else 0


# Tables on a terminal, in a file or in a pipe.

ENDLESS = 10_000


def bare_table(head: Sequence[str], rows: "Iterable[Sequence[str | Text]]", left: Collection[int] = (0,)) -> "Table":
    """A table without lines.

    Args:
        head: the head of each column.
        rows: the rows.
        left: the indexes of the columns of words, which are aligned on the left; figures are on the right.
    """
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for place, name in enumerate(head):
        table.add_column(name, justify="left" if place in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def width_of(table: "Table", out: "Console") -> int:
    """The width of a table in which nothing is cut or wrapped."""
    return out.measure(table, options=out.options.update(width=ENDLESS)).maximum


def show_table(table: "Table", out: "Console") -> None:
    """Print a table. In a file or a pipe it is as wide as it needs to be, so that no figure is cut."""
    before = out.width
    if not out.is_terminal:
        out.width = max(before, width_of(table, out))
    out.print(table)
    out.width = before
