"""The script that trains what a function of a notebook says: its source, or an import of it, and a call."""

from __future__ import annotations

import ast
import builtins
import inspect
import json
import re
import symtable
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from unisono.errors import JobError, Unreadable
from unisono.received import parse_json, short

ALREADY_THERE = frozenset(dir(builtins)) | {"__name__", "__file__", "__builtins__"}

LATER = "from __future__ import annotations\n"
"""Annotations are then not looked up, so what they name need not be there."""

SCRIPT = '''"""Written by unisono.notebook.run, which trains with it."""

{later}
import sys

sys.path.insert(0, {folder!r})

{body}

if __name__ == "__main__":
    from unisono.launch.notebook.returned import call

    call({name}, {arguments!r})
'''


def script_of(function: Callable[..., Any], arguments: Mapping[str, Any], folder: Path) -> str:
    """The text of a script that calls a function.

    A function of a module is imported. One that a notebook defines is there by its source alone: nothing of the
    notebook's memory reaches the workers, but for the arguments, as JSON.

    Args:
        function: the function.
        arguments: its arguments by name: JSON values.
        folder: the folder in which the workers look for modules, besides those that are installed.

    Raises:
        JobError: it is none that could be written down, needs what only the notebook has, or an argument is no JSON;
            says which, and what to do.
    """
    name = _name_of(function)
    require_call(function, arguments)
    text = _json_of(arguments)
    module = function.__module__
    if module != "__main__":
        body = f"from {module} import {name}"
    else:
        body = source_of(function)
        require_all_there(body, function)
    return SCRIPT.format(later=LATER, folder=str(folder), body=body, name=name, arguments=text)


def source_of(function: Callable[..., Any]) -> str:
    """The source of a function that a notebook or a script defines.

    Raises:
        JobError: it is not known.
    """
    try:
        return textwrap.dedent(inspect.getsource(function)).rstrip()
    except (OSError, TypeError) as error:
        if (source := source_in(_cells(), function)) is not None:
            return source
        raise JobError(f"the source of {_name_of(function)} is not known ({error}): put it into a module") from None


MAGIC = re.compile(r"\A(?:\s*%%[^\n]*(?:\n|\Z))+")
"""What stands above the code of a cell: ``%%time``, say."""


def source_in(cells: Sequence[str], function: Callable[..., Any]) -> str | None:
    """The source of a function that was defined below ``%%time`` or the like, which leaves no trace of where it stands.

    Args:
        cells: what was executed so far, the newest last, without what stands above the code.
        function: the function.

    Returns:
        the definition in the newest cell whose code is the function's; None if there is none.
    """
    for cell in reversed(cells):
        try:
            tree, code = ast.parse(cell), compile(cell, "cell", "exec", dont_inherit=True)
        except (SyntaxError, ValueError):
            continue
        if function.__code__ in code.co_consts:
            defined = [node for node in tree.body if getattr(node, "name", "") == function.__name__]
            first = min(node.lineno for node in (defined[-1], *getattr(defined[-1], "decorator_list", ())))
            return "\n".join(cell.splitlines()[first - 1 : defined[-1].end_lineno])
    return None


def _cells() -> list[str]:
    """The cells of the notebook that this is, as plain Python; none elsewhere."""
    shell = None if "IPython" not in sys.modules else sys.modules["IPython"].get_ipython()
    if shell is None:
        return []
    return [shell.transform_cell(MAGIC.sub("", cell)) for cell in shell.history_manager.input_hist_raw]


def require_all_there(source: str, function: Callable[..., Any]) -> None:
    """Refuse a function that uses what only the notebook has.

    Raises:
        JobError: names it, and says how each can be had.
    """
    name = _name_of(function)
    try:
        free = free_names(source)
    except SyntaxError as error:
        raise JobError(f"{name} is no plain Python ({error}): leave lines that begin with % or ! out of it") from None
    known: Mapping[str, Any] = getattr(function, "__globals__", {})
    if free:
        listed = "; ".join(_cure(each, known.get(each)) for each in sorted(free))
        raise JobError(
            f"{name} uses what the notebook has and its workers have not, since they run its source alone: {listed}"
        )


def free_names(source: str) -> set[str]:
    """The names that a piece of source looks up and nobody has defined: neither it nor Python.

    Raises:
        SyntaxError: it is no Python.
    """
    top = symtable.symtable(LATER + source, "cell", "exec")
    own = {one.get_name() for one in top.get_symbols() if one.is_assigned() or one.is_imported() or one.is_namespace()}
    own |= {name for table in _tables(top) for name in _declared(table)}
    return {name for table in _tables(top) for name in _looked_up(table)} - own - ALREADY_THERE


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)


def _looked_up(table: symtable.SymbolTable) -> Iterator[str]:
    for one in table.get_symbols():
        if one.is_referenced() and (one.is_global() or table.get_type() == "module"):
            yield one.get_name()


def _declared(table: symtable.SymbolTable) -> Iterator[str]:
    """What a function says ``global`` of, and sets."""
    return (one.get_name() for one in table.get_symbols() if one.is_declared_global() and one.is_assigned())


def _cure(name: str, value: Any) -> str:
    if isinstance(value, ModuleType):
        as_name = "" if value.__name__ == name else f" as {name}"
        return f"{name} (write import {value.__name__}{as_name} inside of the function)"
    if isinstance(value, type | FunctionType):
        return f"{name} (define it inside of the function, or import it there from a module)"
    return f"{name} (make it an argument, and give it in arguments={{…}})"


def require_call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that the function does not take, before anything is started.

    Raises:
        JobError: says which.
    """
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise JobError(
            f"{_name_of(function)} cannot be called with arguments={short(dict(arguments))}: {error}"
        ) from None


def _json_of(arguments: Mapping[str, Any]) -> str:
    for name, value in arguments.items():
        try:
            same = parse_json(json.dumps(value)) == value
        except (TypeError, ValueError, Unreadable):
            same = False
        if not same:
            raise JobError(
                f"the argument {name}={short(value)} cannot reach the workers as it is: arguments are JSON, which has "
                f"numbers, text, True, False, None, lists, and dicts with text for keys. Nothing is pickled"
            )
    return json.dumps(dict(arguments))


def _name_of(function: Callable[..., Any]) -> str:
    name = getattr(function, "__qualname__", "")
    if not inspect.isfunction(function) or not name.isidentifier():
        raise JobError(
            f"unisono.notebook.run({short(function)}): needs a function with a name, defined in a cell or in a module"
        )
    return name
