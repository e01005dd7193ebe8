"""Training from a cell of a notebook: ``unisono.notebook.run(function, workers=(1, 4))``."""

from __future__ import annotations

import ast
import builtins
import html
import inspect
import json
import os
import re
import symtable
import sys
import textwrap
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from unisono.checkpoint.folder import RunFolder, new_run_folder, write_json
from unisono.errors import PREEMPTED, JobError, LaunchError, Unreadable
from unisono.jsonl import read_lines
from unisono.launch.command_process import CommandProcess
from unisono.launch.elastic.elastic_settings import ElasticSettings, Range
from unisono.launch.outcome import RUNS, last_lines
from unisono.launch.settings import LaunchSettings, Script
from unisono.received import open_file, parse_json, read_object, short
from unisono.settings.reading import settings_by_path

__all__ = ["NotebookEnd", "run"]


# The script that a notebook's function becomes: its source, or an import of it, and a call.

BUILTINS = frozenset(dir(builtins)) | {"__name__", "__file__", "__builtins__"}

LATER = "from __future__ import annotations\n"
"""With it annotations are not evaluated, so the names in them need not be defined in the script."""

TEMPLATE = '''"""Written by unisono.notebook.run, which trains with it."""

{later}
import sys

sys.path.insert(0, {folder!r})

{body}

if __name__ == "__main__":
    from unisono.launch.notebook import call

    call({name}, {arguments!r})
'''


def script_of(function: Callable[..., Any], arguments: Mapping[str, Any], folder: Path) -> str:
    """The text of a script that calls a function.

    A function of a module is imported. Of one that a notebook defines, the script has the source: nothing of the
    notebook's memory reaches the workers except the arguments, as JSON. Modules are imported from ``folder``, and from
    the installed packages.

    Raises:
        JobError: the source of the function is not known or uses what only the notebook has, or an argument is no JSON;
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
        require_self_contained(body, function)
    return TEMPLATE.format(later=LATER, folder=str(folder), body=body, name=name, arguments=text)


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
"""The magic commands above the code of a cell: ``%%time``, say."""


def source_in(cells: Sequence[str], function: Callable[..., Any]) -> str | None:
    """The source of a function, found in the cells that were executed, the newest last; None if no cell has it.

    A function that is defined below a magic command such as ``%%time`` has no source that ``inspect`` could find.
    """
    for cell in reversed(cells):
        try:
            tree, code = ast.parse(cell), compile(cell, "cell", "exec", dont_inherit=True)
        except (SyntaxError, ValueError):
            continue
        if function.__code__ in code.co_consts:
            definition = [node for node in tree.body if getattr(node, "name", "") == function.__name__][-1]
            first = min(node.lineno for node in (definition, *getattr(definition, "decorator_list", ())))
            return "\n".join(cell.splitlines()[first - 1 : definition.end_lineno])
    return None


def _cells() -> list[str]:
    """The executed cells of the notebook that this process runs, as plain Python; none outside of a notebook."""
    shell = None if "IPython" not in sys.modules else sys.modules["IPython"].get_ipython()
    if shell is None:
        return []
    return [shell.transform_cell(MAGIC.sub("", cell)) for cell in shell.history_manager.input_hist_raw]


def require_self_contained(source: str, function: Callable[..., Any]) -> None:
    """Refuse a function that uses names which only the notebook defines.

    Raises:
        JobError: lists the names, and says what to do about each.
    """
    name = _name_of(function)
    try:
        free = free_names(source)
    except SyntaxError as error:
        raise JobError(f"{name} is no plain Python ({error}): leave lines that begin with % or ! out of it") from None
    values: Mapping[str, Any] = getattr(function, "__globals__", {})
    if free:
        listed = "; ".join(_advice(missing, values.get(missing)) for missing in sorted(free))
        raise JobError(
            f"{name} uses what the notebook has and its workers have not, since they run its source alone: {listed}"
        )


def free_names(source: str) -> set[str]:
    """The names that a source uses, and that neither the source nor Python defines.

    Raises:
        SyntaxError: it is no Python.
    """
    top = symtable.symtable(LATER + source, "cell", "exec")
    defined = {
        symbol.get_name()
        for symbol in top.get_symbols()
        if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
    }
    defined |= {name for table in _tables(top) for name in _assigned_globals(table)}
    return {name for table in _tables(top) for name in _used_globals(table)} - defined - BUILTINS


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)


def _used_globals(table: symtable.SymbolTable) -> Iterator[str]:
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (symbol.is_global() or table.get_type() == "module"):
            yield symbol.get_name()


def _assigned_globals(table: symtable.SymbolTable) -> Iterator[str]:
    """The names that a function declares ``global`` and assigns."""
    return (symbol.get_name() for symbol in table.get_symbols() if symbol.is_declared_global() and symbol.is_assigned())


def _advice(name: str, value: Any) -> str:
    if isinstance(value, ModuleType):
        as_name = "" if value.__name__ == name else f" as {name}"
        return f"{name} (write import {value.__name__}{as_name} inside of the function)"
    if isinstance(value, type | FunctionType):
        return f"{name} (define it inside of the function, or import it there from a module)"
    return f"{name} (make it an argument, and give it in arguments={{…}})"


def require_call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that do not fit the function's parameters, before anything is started.

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
            is_json = parse_json(json.dumps(value)) == value
        except (TypeError, ValueError, Unreadable):
            is_json = False
        if not is_json:
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


# A job that a cell of a notebook starts, shows, and waits for.

LINES = 12
"""The number of last lines of the workers' output that a cell shows."""

LONGEST = 2**20
"""The most bytes of a file that are read at a time."""

FIGURES: Mapping[str, str] = {
    "step": "step {}",
    "epoch": "epoch {}",
    "loss": "loss {:.4g}",
    "batch_size": "batch {}",
    "samples_per_s": "{:.4g} samples/s",
    "world_size": "workers {}",
}
"""Fields of ``metrics.jsonl``, and how they are shown."""


class Tail:
    """Reads the lines that are appended to a file, which need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._rest = path, 0, b""

    def read_lines(self) -> list[bytes]:
        """The complete lines since the last call. A file that has become shorter is read from its beginning."""
        try:
            with open_file(self._path) as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset, self._rest = 0, b""
                file.seek(self._offset)
                data = file.read(LONGEST)
        except (OSError, Unreadable):
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines


def figures_of(lines: Sequence[bytes]) -> Mapping[str, Any]:
    """The newest line of a step among lines of ``metrics.jsonl``; empty if there is none."""
    for line in reversed(lines):
        with suppress(Unreadable):
            figures = parse_json(line)
            if isinstance(figures, dict) and "loss" in figures:
                return figures
    return {}


def line_of(figures: Mapping[str, Any]) -> str:
    """Figures of a step for people: ``step 12, epoch 0, loss 0.51``. Values that are no numbers are left out."""
    parts = []
    for name, form in FIGURES.items():
        value = figures.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            parts.append(form.format(value))
    return ", ".join(parts)


class PlainDisplay:
    """Prints lines as they come: on a terminal, or where shown text cannot be replaced."""

    def show(self, figures: str, lines: Sequence[str]) -> None:
        """Print new lines. It leaves out the figures, since the script's own lines have them."""
        for line in lines:
            sys.stdout.write(f"{line}\n")


class Board:
    """The text that a cell shows: the last lines, and the figures below them."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=LINES)
        self.figures = "starting"

    def _repr_mimebundle_(self, **about: Any) -> dict[str, str]:
        text = "\n".join([*self.lines, self.figures])
        return {"text/plain": text, "text/html": f"<pre>{html.escape(text)}</pre>"}


class CellDisplay(PlainDisplay):
    """Shows lines and figures in one place of the cell's output, which it replaces with IPython's ``display``."""

    def __init__(self, display: Callable[..., Any]) -> None:
        self._board = Board()
        self._handle = display(self._board, display_id=True)

    def show(self, figures: str, lines: Sequence[str]) -> None:
        """Add lines, and replace the text that the cell shows."""
        self._board.lines.extend(lines)
        self._board.figures = figures or self._board.figures
        self._handle.update(self._board)


def display_here() -> PlainDisplay:
    """The display of the cell that runs now; a plain one outside of a notebook."""
    with suppress(ImportError):
        from IPython import get_ipython
        from IPython.display import display

        if getattr(get_ipython(), "kernel", None) is not None:
            return CellDisplay(display)
    return PlainDisplay()


SCRIPT, OUTPUT, RETURNED = "cell.py", "cell.log", "returned.json"
"""Files in the run folder: the workers' script, what they print, and what the function returned."""

LOOK_S = 0.2
"""Seconds between two looks at the job."""

CHECKPOINT_EVERY = 100
"""Steps between checkpoints by default: the weights of a cell's job are in its last checkpoint."""

ENDS_S = 15.0
"""Seconds besides ``grace_s`` after which a job that was interrupted is killed."""


@dataclass(frozen=True)
class NotebookEnd:
    """The end of a job that a cell has started.

    Attributes:
        exit_code: 0 for a training that is complete, 75 for one that has left with a checkpoint.
        run_dir: the run folder.
        result: what ``result.json`` says.
        returned: the value that the function returned on the main worker.
    """

    exit_code: int
    run_dir: Path
    result: dict[str, Any] = field(repr=False)
    returned: Any = None

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl``: one per step."""
        return read_lines(self.run_dir / "metrics.jsonl")

    def load(self, model: Any) -> Any:
        """Put the trained weights into a model that is built as in the function; see :func:`unisono.load`."""
        from unisono.train.state.checkpoints import load  # loads torch

        return load(model, self.run_dir)


def run(
    function: Callable[..., Any],
    arguments: Mapping[str, Any] | None = None,
    *,
    workers: int | tuple[int, int] = 1,
    run_dir: str | Path | None = None,
    checkpoint_every: int | None = CHECKPOINT_EVERY,
    policies: Sequence[str] = (),
    strategy: str | None = None,
    timeline: bool = False,
    grace_s: float = 30.0,
    variables: Mapping[str, str] | None = None,
) -> NotebookEnd:
    """Train what a function says on workers of this host, show how it goes in the cell, and wait for the end.

    The function does what a script would: it imports what it needs, calls ``unisono.init``, and ends with
    ``run.finish``. A function that a notebook defines reaches the workers by its source alone, one of a module by an
    import. Nothing is pickled: what it needs of the notebook, it gets as an argument.

    An interrupt has the workers leave with a checkpoint, and is raised again when they have; a second one kills them.

    Args:
        function: the function.
        arguments: the function's arguments by name: JSON values.
        workers: the number of workers, or the smallest and the largest.
        run_dir: the run folder; by default a new one below ``runs``. One with checkpoints is gone on from.
        checkpoint_every: steps between checkpoints, unless the function sets them; None for none.
        policies: policies by name, besides the function's own.
        strategy: the strategy by which workers synchronise, unless the function sets it.
        timeline: whether to write down what each worker does when, for ``unisono timeline``.
        grace_s: the seconds that workers get to leave after an interrupt.
        variables: environment variables for the job's processes.

    Returns:
        the end of the job: ``exit_code``, ``run_dir``, ``result``, ``returned``, ``metrics``, and ``load(model)``.

    Raises:
        JobError: the function cannot be sent to workers, or an argument is wrong; says what to do.
        LaunchError: the job has failed; quotes the last lines.
        KeyboardInterrupt: the cell was interrupted; the job has ended.
    """
    sizes = Range(workers, workers) if isinstance(workers, int) else Range(*workers)
    text = script_of(function, arguments or {}, Path.cwd())
    folder = (Path(run_dir) if run_dir is not None else new_run_folder(RUNS, function.__name__)).absolute()
    launch = LaunchSettings(
        Script(str(folder / SCRIPT)),
        workers=sizes.largest,
        run_dir=folder,
        options=settings_by_path(
            {
                "checkpoints.every": checkpoint_every,
                "policies": tuple(policies),
                "strategy": strategy,
                "records.timeline": timeline or None,
                "launch.grace_s": grace_s,
            }
        ),
        extra_environment=dict(variables or {}),
    )
    _prepare(folder, text)
    settings = ElasticSettings(launch, sizes)
    settings.check()
    return _Job(settings, folder, display_here()).run()


def _prepare(folder: Path, text: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SCRIPT).write_text(text, encoding="utf-8")
        (folder / RETURNED).unlink(missing_ok=True)
    except OSError as error:
        raise JobError(f"the run folder {folder} cannot be used: {error}; name another with run_dir=") from error


class _Job:
    """The job of one call of :func:`run`."""

    def __init__(self, settings: ElasticSettings, folder: Path, display: PlainDisplay) -> None:
        self._settings, self._folder, self._display = settings, folder, display
        self._output, self._metrics = Tail(folder / OUTPUT), Tail(folder / "metrics.jsonl")

    def run(self) -> NotebookEnd:
        launch = self._settings.launch
        words = ["run", "-n", str(self._settings.workers), "--run-dir", str(self._folder), *self._settings.words()]
        with (self._folder / OUTPUT).open("wb") as output:
            process = CommandProcess(words, launch.extra_environment, str(Path.cwd()), output)
        try:
            code = self._until_it_ends(process)
        finally:
            process.close()
        return self._end(code)

    def _until_it_ends(self, process: CommandProcess) -> int:
        try:
            return self._follow(process)
        except KeyboardInterrupt:
            self._display.show("interrupted: the workers leave with a checkpoint (once more kills them)", [])
            process.leave()
            self._follow(process, time.monotonic() + self._settings.launch.options.launch.grace_s + ENDS_S)
            self._display.show(f"left; run_dir={str(self._folder)!r} goes on from the checkpoint", [])
            raise

    def _follow(self, process: CommandProcess, deadline: float = float("inf")) -> int:
        """Show the job's output until it has ended, or the deadline; its exit code, or 1 if it has not ended."""
        while (code := process.wait(LOOK_S)) is None and time.monotonic() < deadline:
            self._show()
        self._show()
        return 1 if code is None else code

    def _show(self) -> None:
        lines = [line.decode(errors="replace") for line in self._output.read_lines()]
        figures = line_of(figures_of(self._metrics.read_lines()))
        if lines or figures:
            self._display.show(figures, lines)

    def _end(self, code: int) -> NotebookEnd:
        result = RunFolder(self._folder).read_result() or {}
        if code not in (0, PREEMPTED):
            tail = "\n".join(last_lines(self._folder / OUTPUT))
            raise LaunchError(f"the job has failed (exit code {code}, run folder {self._folder}):\n{tail}")
        return NotebookEnd(code, self._folder, result, self._returned_value())

    def _returned_value(self) -> Any:
        try:
            return read_object(self._folder / RETURNED).get("value")
        except FileNotFoundError:
            return None
        except (OSError, Unreadable) as error:
            raise LaunchError(f"{self._folder / RETURNED} cannot be read: {error}") from error


def call(function: Callable[..., Any], arguments: str) -> None:
    """Call the function in a worker, with arguments as JSON; the value that the main worker's call returns is kept.

    Raises:
        JobError: that value is no JSON.
    """
    from unisono.train.start import HOST_PROCESS  # loads torch, which the notebook does without

    value = function(**parse_json(arguments))
    run = HOST_PROCESS.get().newest
    if run is None or not run.is_main:
        return
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        raise JobError(
            f"{function.__name__} returned {short(value)}, which is no JSON and cannot be handed back: return numbers, "
            f"text, lists and dicts of them; weights are in the run folder's checkpoints"
        ) from None
    write_json(Path(run.dir) / RETURNED, {"value": value})
