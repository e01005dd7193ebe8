"""The guide has a table of the options of each command, and the tables are true.

The first cell of a table's header says whose options they are: "option of `unisono run`". It may name several commands.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from unisono.cli.app import COMMANDS, application
from unisono.named import extensions

pytestmark = pytest.mark.unit

ALL = [*COMMANDS, *extensions("command")]
ROOT = Path(__file__).parents[2]
TABLE = re.compile(r"^\| options? of ([^|]+)\|.*\n\|[-|]+\|\n((?:\|.*\n)+)", re.MULTILINE)


def spellings_of(command: str) -> list[set[str]]:
    """The spellings of each option that a command's help shows, but for --help itself."""
    group: Any = typer.main.get_command(application([command]))
    options = [one for one in group.commands[command].params if one.param_type_name == "option" and not one.hidden]
    return [spelt for one in options if "--help" not in (spelt := {*one.opts, *one.secondary_opts})]


def tables_in(text: str) -> Iterator[tuple[str, str]]:
    """A command and an option, for each option that a table of a page has of each command in its header."""
    for header, rows in TABLE.findall(text):
        for command in re.findall(r"`unisono ([a-z0-9-]+)", header):
            for row in rows.splitlines():
                yield from ((command, option) for option in re.findall(r"`(--?[a-zA-Z][a-z-]*)", row.split(" | ")[0]))


def in_the_guide() -> list[tuple[str, str]]:
    """The options of all tables of the guide."""
    return [found for page in (ROOT / "docs" / "guide").glob("*.md") for found in tables_in(page.read_text())]


@pytest.mark.parametrize("command", ALL)
def test_the_guide_has_every_option_of_a_command_in_a_table(command: str) -> None:
    listed = {option for whose, option in in_the_guide() if whose == command}
    assert [spelt for spelt in spellings_of(command) if not spelt & listed] == []


@pytest.mark.parametrize("command", ALL)
def test_a_table_of_the_guide_has_no_option_that_the_command_does_not_know(command: str) -> None:
    known = set[str]().union(*spellings_of(command))
    assert [option for whose, option in in_the_guide() if whose == command and option not in known] == []


def test_a_table_is_read_row_by_row_for_each_command_in_its_header() -> None:
    header = "| option of `unisono stop` and `unisono leave` | meaning |\n|---|---|\n"
    page = f"{header}| `--a FILE`, `-b` | `--c` |\n| `--d` | |\n"
    options = ["--a", "-b", "--d"]
    assert list(tables_in(page)) == [(command, option) for command in ("stop", "leave") for option in options]
