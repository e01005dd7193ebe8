"""From a function of a notebook to a script that workers can run; and what a cell shows."""

import ast
import inspect
import json
import math
from pathlib import Path
from typing import Any

import pytest

import unisono
from unisono.errors import JobError
from unisono.launch.notebook import (
    LINES,
    MAGIC,
    Board,
    Tail,
    figures_of,
    free_names,
    line_of,
    require_self_contained,
    script_of,
    source_in,
)

pytestmark = pytest.mark.unit

FOLDER = Path("/notebooks")


def train(epochs: int, lr: float = 0.1) -> int:
    """A function of a module."""
    return epochs


def of_a_cell(source: str, **names: Any) -> Any:
    """A function as a notebook has it: its module is ``__main__``, and names are those of other cells."""
    scope: dict[str, Any] = {"__name__": "__main__", **names}
    exec(source, scope)  # noqa: S102 (as a notebook does)
    return scope["train"]


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("def train(a):\n    import torch\n    return torch.ones(len(a))", set()),
        ("def train(a):\n    return torch.ones(a)", {"torch"}),
        ("def train(a: torch.Tensor) -> Unknown:\n    return a", set()),
        ("def train(a=LR):\n    return a", {"LR"}),
        ("@decorated\ndef train():\n    pass", {"decorated"}),
        ("def train():\n    def inner():\n        return data, here\n    here = 1\n    return inner", {"data"}),
        ("def train():\n    class Net(nn.Module):\n        size = width\n    return Net", {"nn", "width"}),
        ("def train():\n    return [x for x in range(3) if x in known]", {"known"}),
        ("def train():\n    global count\n    count = 1\n    return count", set()),
        ("def train(n):\n    return train(n - 1) if n else print(__name__)", set()),
        (
            "def train():\n    try:\n        return 1\n    except ValueError as error:\n        raise Ours from error",
            {"Ours"},
        ),
        ("def train():\n    return (lambda y: y + offset)(1)", {"offset"}),
    ],
)
def test_the_names_that_a_function_lacks_are_found(source: str, missing: set[str]) -> None:
    assert free_names(source) == missing


def test_a_function_below_a_cells_magic_is_found_in_what_was_executed() -> None:
    older = "def train():\n    return 1"
    newer = "import math\n\n@staticmethod\ndef train():\n    return 2\n\nprint(3)"
    assert MAGIC.sub("", "%%capture out\n  %%time\ndef train(): 1") == "def train(): 1"
    for cell, source in ((older, older), (newer, newer[13:-10])):
        cells = [older, "%matplotlib inline", newer, "def train():\n    return 3"]
        scope: dict[str, Any] = {}
        exec(compile(cell, "<timed exec>", "exec"), scope)  # noqa: S102 (as %%time does)
        function = getattr(scope["train"], "__func__", scope["train"])
        assert source_in(cells, function) == source
    assert source_in([older, newer], of_a_cell("def train():\n    return 4")) is None


def test_each_missing_name_comes_with_how_to_have_it() -> None:
    source = "def train():\n    return m.pi + rate + helper() + json.loads('1')"
    function = of_a_cell(source, m=math, rate=0.1, helper=train, json=json)

    with pytest.raises(JobError) as refused:
        require_self_contained(source, function)

    words = str(refused.value)
    assert "m (write import math as m inside of the function)" in words
    assert "json (write import json inside of the function)" in words
    assert "rate (make it an argument, and give it in arguments={…})" in words
    assert "helper (define it inside of the function, or import it there from a module)" in words


def test_lines_that_only_a_notebook_knows_are_refused() -> None:
    with pytest.raises(JobError, match="% or !"):
        require_self_contained("def train():\n    %time 1", train)


def test_a_function_of_a_module_is_imported() -> None:
    text = script_of(train, {"epochs": 3}, FOLDER)

    assert f"from {train.__module__} import train" in text
    assert "sys.path.insert(0, '/notebooks')" in text
    compile(text, "cell.py", "exec")


def test_arguments_reach_the_script_as_they_are() -> None:
    given = {"epochs": [1, {"a": 'it\'s "quoted" \\ {braces} \n'}], "lr": 1e-9}

    calls = [one for one in ast.walk(ast.parse(script_of(train, given, FOLDER))) if isinstance(one, ast.Call)]

    (text,) = [one.args[1] for one in calls if isinstance(one.func, ast.Name) and one.func.id == "call"]
    assert json.loads(ast.literal_eval(text)) == given


@pytest.mark.parametrize(
    "value", [{1, 2}, object(), (1, 2), {1: 2}, b"x", math.nan], ids=lambda value: type(value).__name__
)
def test_what_is_no_json_is_refused_since_nothing_is_pickled(value: Any) -> None:
    with pytest.raises(JobError, match="the argument epochs=.*Nothing is pickled"):
        script_of(train, {"epochs": value}, FOLDER)


@pytest.mark.parametrize("arguments", [{}, {"epochs": 1, "more": 2}])
def test_arguments_that_do_not_fit_are_refused_before_anything_starts(arguments: dict[str, Any]) -> None:
    with pytest.raises(JobError, match="train cannot be called with arguments="):
        script_of(train, arguments, FOLDER)


@pytest.mark.parametrize(
    "function", [lambda: 1, len, Path("x").exists, "train", 3, int], ids=lambda value: type(value).__name__
)
def test_what_has_no_name_or_source_of_its_own_is_refused(function: Any) -> None:
    with pytest.raises(JobError, match="needs a function with a name"):
        script_of(function, {}, FOLDER)


def test_a_function_whose_source_nobody_knows_is_refused() -> None:
    with pytest.raises(JobError, match="put it into a module"):
        script_of(of_a_cell("def train(): pass"), {}, FOLDER)


def test_wrong_settings_are_refused_before_anything_starts(tmp_path: Path) -> None:
    for workers in (0, (3, 1)):
        with pytest.raises(JobError, match="--workers"):
            unisono.notebook.run(train, {"epochs": 1}, workers=workers, run_dir=tmp_path)
    assert not (tmp_path / "cell.log").exists()
    assert "Nothing is pickled" in (inspect.getdoc(unisono.notebook.run) or "")


# -- what a cell shows


def test_a_tail_gives_each_whole_line_once_and_begins_again_where_a_file_is_cut(tmp_path: Path) -> None:
    file, tail = tmp_path / "file", Tail(tmp_path / "file")
    assert tail.read_lines() == []
    file.write_bytes(b"one\ntw")
    assert tail.read_lines() == [b"one"]
    file.write_bytes(b"one\ntwo\n")
    assert tail.read_lines() == [b"two"]
    file.write_bytes(b"new\n")
    assert tail.read_lines() == [b"new"]


def test_the_newest_figures_are_shown_and_what_is_no_number_is_not() -> None:
    lines = [
        b'{"step": 1, "loss": 2.0}',
        b'{"step": 2, "loss": 1.25, "epoch": null, "world_size": "many"}',
        b"{",
        b"[]",
    ]
    assert line_of(figures_of(lines)) == "step 2, loss 1.25"
    assert line_of(figures_of([b"{"])) == ""


def test_what_workers_print_is_text_in_a_cell_and_only_its_end_is_kept() -> None:
    board = Board()
    board.lines.extend([f"line {number}" for number in range(30)] + ["<script>alert(1)</script>"])
    shown = board._repr_mimebundle_()

    assert "<script>" not in shown["text/html"]
    assert "&lt;script&gt;" in shown["text/html"]
    assert len(shown["text/plain"].splitlines()) == LINES + 1
