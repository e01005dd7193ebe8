"""Tables of the command line: where nobody looks at a terminal, nothing is cut."""

import io

import pytest
from rich.console import Console
from rich.table import Table

from unisono.cli.display import show_table, width_of

pytestmark = pytest.mark.unit


def wide() -> tuple[Table, list[str]]:
    figures = [f"{number}.{number:08}" for number in range(40)]
    table = Table()
    for number in range(40):
        table.add_column(f"column {number}", no_wrap=True)
    table.add_row(*figures)
    return table, figures


def printed(*, is_terminal: bool) -> tuple[str, Console]:
    output = io.StringIO()
    console = Console(file=output, force_terminal=is_terminal, width=80, color_system=None)
    show_table(wide()[0], console)
    return output.getvalue(), console


def test_a_table_in_a_file_is_as_wide_as_its_figures() -> None:
    text, console = printed(is_terminal=False)
    assert "…" not in text
    assert all(figure in text for figure in wide()[1])
    assert console.width == 80  # what comes after it is as before


def test_a_table_on_a_terminal_is_no_wider_than_that() -> None:
    text, console = printed(is_terminal=True)
    assert max(map(len, text.splitlines())) <= 80 < width_of(wide()[0], console)
