"""The tables of what is refused: each row is used, with the words that stand in its braces."""

import ast
from collections.abc import Iterator
from pathlib import Path
from string import Formatter
from typing import Any, TypeGuard

import pytest

import unisono
from unisono.data.refusals import Refusals
from unisono.data.refusals import refused as of_data
from unisono.integrations.kit import refused as of_guests

pytestmark = pytest.mark.unit


def said(room: str) -> Iterator[tuple[str, frozenset[str]]]:
    """What the sources of a room ask its table for: the name of a refusal, and those of its words."""
    for path in Path(str(unisono.__file__)).with_name(room).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "refused":
                if isinstance(node.args[0], ast.Constant):
                    yield str(node.args[0].value), frozenset(str(each.arg) for each in node.keywords)
            elif isinstance(node, ast.Dict):  # of conditions
                yield from ((each.value, frozenset()) for each in node.keys if _is_name(each))


def _is_name(key: ast.expr | None) -> TypeGuard[Any]:
    return isinstance(key, ast.Constant) and str(key.value).startswith("accelerate.")


@pytest.mark.parametrize(("room", "refusals"), [("data", of_data), ("integrations", of_guests)])
def test_each_place_that_refuses_says_the_words_of_its_row_and_no_row_is_left_over(
    room: str, refusals: Refusals
) -> None:
    rows = {f"{what}.{why}": text for what, table in refusals.rows.items() for why, text in table.items()}
    named = {name: frozenset(one for _, one, _, _ in Formatter().parse(text) if one) for name, text in rows.items()}
    assert dict(said(room)) == named


def test_words_stand_where_the_table_has_braces() -> None:
    assert of_guests("lightning.weights-in-float16", precision="16-true").startswith("precision='16-true' has weights")
    assert "checkpoints={'every': …}" in of_guests("keras.backup-and-restore")
