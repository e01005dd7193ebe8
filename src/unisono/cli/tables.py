"""Tables on a terminal, and in what is read without one."""

from rich.console import Console
from rich.table import Table

ENDLESS = 10_000


def width_of(table: Table, out: Console) -> int:
    """How wide a table is when nothing in it is cut or wrapped."""
    return out.measure(table, options=out.options.update(width=ENDLESS)).maximum


def show_table(table: Table, out: Console) -> None:
    """Print a table. In a file or a pipe it is as wide as it needs to be: there no figure is cut."""
    before = out.width
    if not out.is_terminal:
        out.width = max(before, width_of(table, out))
    out.print(table)
    out.width = before
