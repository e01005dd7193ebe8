"""What tests replace of our own objects and modules: next to nothing, since what varies comes in through arguments."""

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path

OURS = ("unisono", "unisono_lab", "benchmarks")

REASONS: Mapping[str, Mapping[str, str]] = {
    "unit/test_cli.py": {"cli.application": "an error of any command, without a command that has it"},
    "unit/test_study_commands.py": {"unisono_lab.report.report.report": "the folder counts; a report takes seconds"},
    "unit/test_study_report.py": {"unisono_lab.report.report.drawn": "plots take longer than all that is tested"},
    "unit/test_tally.py": {"Tally._part": "a mutant: without what it computes nobody finds the flipped bit"},
    "unit/test_verify_options.py": {"command.start": "what a command has understood, without the runs that it starts"},
}
"""Why tests may replace something of ours, by file and by name. The list may become shorter."""


def replaced(tests: Path) -> dict[str, set[str]]:
    """What tests replace of ours with ``setattr``, by file; what a test has made itself counts, too."""
    found: dict[str, set[str]] = {}
    for path in sorted(tests.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if ".setattr(" not in text:
            continue
        tree = ast.parse(text, str(path))
        imported = _imported(tree)
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "setattr":
                name, package = _target(call.args, imported)
                if package in ("", *OURS) or (tests / f"{package}.py").exists():
                    found.setdefault(str(path.relative_to(tests)), set()).add(name)
    return found


def _imported(tree: ast.Module) -> dict[str, str]:
    """The module that each name comes from."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {one.asname or one.name.partition(".")[0]: one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {one.asname or one.name: node.module or "" for one in node.names}
    return names


def _target(args: Sequence[ast.expr], imported: Mapping[str, str]) -> tuple[str, str]:
    """The name that is replaced, and its package; an empty one if the owner is of the test's own making."""
    match args:
        case [ast.Constant(value=str(name)), *_]:
            return name, name.partition(".")[0]
        case [owner, name, *_]:
            root = owner
            while isinstance(root, ast.Attribute):
                root = root.value
            module = imported.get(root.id, "") if isinstance(root, ast.Name) else ""
            word = ast.unparse(name).strip("'")
            return f"{ast.unparse(owner)}.{word}", module.partition(".")[0]
    return ast.unparse(args[0]), ""
