"""Tables on a terminal, and in what is read without one."""

from collections.abc import Collection, Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

ENDLESS = 10_000


def bare_table(head: Sequence[str], rows: Iterable[Sequence[str | Text]], left: Collection[int] = (0,)) -> Table:
    """A table without lines.

    Args:
        head: the head of each column.
        rows: the rows.
        left: the places of the columns of words; figures stand at the right.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for place, name in enumerate(head):
        table.add_column(name, justify="left" if place in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


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
