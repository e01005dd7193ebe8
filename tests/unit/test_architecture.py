"""docs/architecture.md names rooms, files and functions that there are, and counts the files of its ways rightly."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from house_rules import LAB, LAB_ROWS, ROWS, SUB_ROWS

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "src" / "unisono", ROOT / "src", ROOT)
PLACE = re.compile(r"`((?:\w+/)*\w+(?:\.\w+)*\.(?:py|j2|md))(?::([\w.]+))?`")
ROOM = re.compile(r"^\| `([\w/]+)` \|.*\| ([^|]+) \|$", re.MULTILINE)
CHANGE = re.compile(r"^\| (?!to change|--)([^|]+) \| ([^|]+) \|$", re.MULTILINE)
MOST_FILES = {"The way of a gradient": 14, "The way of an event": 23}
FEWEST_CHANGES = 20


@pytest.fixture(scope="module")
def page() -> str:
    return (ROOT / "docs" / "architecture.md").read_text()


def section(page: str, title: str) -> str:
    """What stands under a heading."""
    _, found, text = page.partition(f"\n## {title}\n")
    assert found, f"the page has no section {title!r}"
    return text.partition("\n## ")[0]


def missing(text: str) -> list[str]:
    """The files that are named in a text and are not there, and the functions that are not in theirs."""
    found = []
    for path, name in PLACE.findall(text):
        file = next((folder / path for folder in FOLDERS if (folder / path).is_file()), None)
        if file is None:
            found.append(path)
        elif name and name not in set(defined(file)):
            found.append(f"{path}:{name}")
    return found


def defined(file: Path) -> Iterator[str]:
    """The functions and classes of a file, and the methods as ``Class.method``."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.ClassDef):
            methods = (each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
            yield from (f"{node.name}.{each.name}" for each in methods)


def places_of_steps(text: str) -> list[str]:
    """The files that the numbered lines of a text name."""
    return [path for line in text.splitlines() if re.match(r"\d+\. ", line) for path, _ in PLACE.findall(line)]


def below(rows: tuple[tuple[str, ...], ...], last: str) -> dict[str, str]:
    """What each room may import, in the page's words; those of the last row have words of their own."""
    found: dict[str, str] = {}
    for number, row in enumerate(rows):
        following = ", ".join(f"`{room}`" for room in rows[number + 1]) if number + 1 < len(rows) else last
        words = f"{following} and below" if number + 2 < len(rows) else following
        found |= dict.fromkeys(row, words)
    return found


def test_every_file_and_function_that_the_page_names_is_there(page: str) -> None:
    assert missing(page) == []


def test_every_room_says_where_to_begin_and_what_it_may_import() -> None:
    rooms = [path for path in (ROOT / "src").rglob("__init__.py") if "It may import" in path.read_text()]
    assert len(rooms) >= 25
    for room in rooms:
        for name in re.findall(r"\b[\w/]+\.(?:py|toml)\b", room.read_text()):
            assert (room.parent / name).is_file(), f"{room} names {name}"


def test_the_files_of_the_changes_that_are_walked_through_are_there() -> None:
    walked = section((ROOT / "CONTRIBUTING.md").read_text(), "Five changes, step by step")

    assert PLACE.search(walked)
    assert missing(walked) == []


def test_a_file_or_a_function_that_is_gone_is_found() -> None:
    steps = "`train/step/step.py:Step.run` `train/step/step.py:Step.walk` `train/step/stride.py:Stride` `plan/tree.py`"

    assert missing(steps) == ["train/step/step.py:Step.walk", "train/step/stride.py"]


@pytest.mark.parametrize(("title", "most"), MOST_FILES.items())
def test_a_way_passes_as_many_files_as_the_page_says_and_no_more_than_it_should(
    page: str, title: str, most: int
) -> None:
    text = section(page, title)
    files = set(places_of_steps(text))

    assert re.findall(r"\*\*(\d+) files\*\*", text) == [str(len(files))]
    assert len(files) <= most


@pytest.mark.parametrize("title", MOST_FILES)
def test_the_steps_of_a_way_are_numbered_in_order_and_each_names_a_function(page: str, title: str) -> None:
    steps = re.findall(r"^(\d+)\. (.*)$", section(page, title), re.MULTILINE)

    assert [int(number) for number, _ in steps] == list(range(1, len(steps) + 1))
    assert [words for _, words in steps if not (found := PLACE.search(words)) or not found[2]] == []


def test_every_room_stands_on_the_page_with_what_it_may_import(page: str) -> None:
    rooms = below(ROWS, "nothing of ours")
    for room, rows in SUB_ROWS.items():
        rooms |= {f"{room}/{inner}": words for inner, words in below(rows, "none").items()}
    rooms |= {f"{LAB}/{room}": words for room, words in below(LAB_ROWS, "none").items()}

    assert ROOM.findall(section(page, "Rooms")) == list(rooms.items())


def test_whoever_wants_to_change_something_is_told_what_to_open(page: str) -> None:
    changes = CHANGE.findall(section(page, "To change something"))

    assert len(changes) >= FEWEST_CHANGES
    assert [what for what, where in changes if not PLACE.search(where)] == []
