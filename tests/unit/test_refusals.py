"""The table of what guests are refused: each row is used, with the words that stand in its braces."""

import ast
from collections.abc import Iterator
from pathlib import Path
from string import Formatter

import pytest

from unisono.integrations.refused import refusals, refused

pytestmark = pytest.mark.unit

GUESTS = Path(refused.__code__.co_filename).parent


def said() -> Iterator[tuple[str, frozenset[str]]]:
    """What the sources of guests ask the table for: the name of a refusal, and those of its words."""
    for path in GUESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "refused":
                yield ast.literal_eval(node.args[0]), frozenset(str(each.arg) for each in node.keywords)


def test_each_place_that_refuses_says_the_words_of_its_row_and_no_row_is_left_over() -> None:
    rows = {f"{guest}.{name}": text for guest, table in refusals().items() for name, text in table.items()}
    named = {name: frozenset(one for _, one, _, _ in Formatter().parse(text) if one) for name, text in rows.items()}
    assert dict(said()) == named


def test_words_stand_where_the_table_has_braces() -> None:
    assert refused("lightning.clock", interval=3).startswith("val_check_interval=3 s goes by a clock")
    assert "checkpoints={'every': …}" in refused("keras.backup-and-restore")
