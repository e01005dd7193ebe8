"""The rules of the house, each a function from the sources of a package to its breaches.

The layers are those of the design, top row first. Imports go down, and rooms of one row know each other only
through a room above. An import counts wherever it stands: at the top, inside a function, under
``TYPE_CHECKING``, or as a name given to ``import_module``.
"""

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

ROWS: tuple[tuple[str, ...], ...] = (
    ("cli",),
    ("launch",),
    ("integrations",),
    ("train",),
    ("adapt", "sync", "checkpoint", "data", "reduce", "membership", "loggers"),
    ("plan",),
    ("job",),
    ("settings",),
    ("word_sums", "changes"),
    ("jsonl", "arguments", "named", "words", "reachable"),
    ("device",),
    ("received", "host", "spans", "telemetry"),
    ("errors", "failpoints", "hooks"),
)
LAB = "unisono_lab"
LAB_ROWS: tuple[tuple[str, ...], ...] = (
    ("commands",),
    ("report",),
    ("study", "simulation"),
    ("recorded", "page", "strategies", "second_order"),
    ("faults", "journal_events"),
)
DEPTHS = {
    name: {room: depth for depth, row in enumerate(rows) for room in row}
    for name, rows in (("unisono", ROWS), (LAB, LAB_ROWS))
}
# Rooms inside of a room, top row first. A module that lies beside them and is not listed stands above them all.
SUB_ROWS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "train": (
        ("strategies", "record"),
        ("loop",),
        ("recovery",),
        ("step",),
        ("state",),
        ("group",),
        ("model",),
        ("config",),
    ),
    "launch": (
        ("ray", "k8s_manifests"),
        ("notebook", "verify_runs", "doctor", "ray_actors", "k8s_job"),
        ("trial", "ray_request", "slurm_job"),
        ("elastic",),
        ("local", "command_process", "hints"),
        ("host_workers", "comparison"),
        ("fork_server",),
        ("worker_start",),
        ("worker",),
        ("outcome",),
        ("failure", "worker_output"),
        ("terminal",),
        ("command", "hostfile", "cloud_notices"),
        ("settings", "engine"),
        ("tuning", "pins"),
    ),
}
SUB_DEPTHS = {
    room: {inner: depth for depth, row in enumerate(rows) for inner in row} for room, rows in SUB_ROWS.items()
}
DOOR = "the door"  # __init__.py and __main__.py: what comes in through it may go to any room
PURE = ("plan", "membership.state")  # decide, and touch nothing
WORLD = frozenset({"torch", "socket", "time", "datetime", "os", "random", "secrets", "uuid", "subprocess", "threading"})
PICKLES = frozenset({"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"})
PICKLING_COLLECTIVES = frozenset(
    f"{verb}_object{ending}"
    for verb in ("all_gather", "gather", "broadcast", "scatter", "send", "recv")
    for ending in ("", "_list")
)
LONGEST_FUNCTION = 60
RUN = "unisono.train.run"
LONGEST_RUN, MOST_IMPORTS_OF_RUN = 350, 25
FRAGMENT = re.compile(
    r"(?:as|by|for|how|likewise|of|over|that|to|told|when|where|which|who|whose|with)\b", re.IGNORECASE
)
"""How a description begins that cannot be read without the name before it."""
KINDS_OF_DEVICES = frozenset({"cuda", "xpu", "mps", "hpu", "mtia", "privateuseone", "fakegpu"})
NAMELESS = frozenset({"util", "utils", "helper", "helpers", "misc"})


@dataclass(frozen=True)
class Source:
    """One module: where it lies, its dotted name, and its syntax."""

    path: Path
    module: str
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        """Whether it is a folder's ``__init__.py``."""
        return self.path.name == "__init__.py"

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Every piece of its syntax."""
        return tuple(ast.walk(self.tree))

    @property
    def room(self) -> str:
        """The part of the house it belongs to."""
        return room_of(self.module)


def room_of(module: str) -> str:
    """The part of the house that a module, given by its full name, belongs to."""
    inside = module.split(".")[1:]
    return inside[0] if inside and inside[0] != "__main__" else DOOR


def inner_room_of(module: str) -> str:
    """The room inside of a room that a module belongs to, or its own name; empty for the room itself."""
    return ".".join(module.split(".")[2:3])


@dataclass(frozen=True)
class Import:
    """One import of one module, by its full name."""

    line: int
    target: str


@dataclass(frozen=True, order=True)
class Breach:
    """One place that breaks one rule."""

    path: Path
    line: int
    rule: str
    words: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.words}"


@dataclass(frozen=True)
class House:
    """All modules of a package, by name."""

    name: str
    sources: Mapping[str, Source]

    @classmethod
    def read(cls, folder: Path) -> "House":
        """Read every module below the folder of a package."""
        sources = (_read(folder, path) for path in sorted(folder.rglob("*.py")))
        return cls(folder.name, {source.module: source for source in sources})

    def __iter__(self) -> Iterator[Source]:
        return iter(self.sources.values())

    def imports(self, source: Source) -> Iterator[Import]:
        """Every import of a module, whether of this package or not."""
        for node in source.nodes:
            for name in _names(node, source):
                yield Import(getattr(node, "lineno", 1), self._module_of(name))

    def _module_of(self, name: str) -> str:
        # `from unisono.plan import tree` may name a module or something inside one: the longest that exists.
        if name.partition(".")[0] != self.name or name in self.sources:
            return name
        outer = name.rpartition(".")[0]
        return name if outer == self.name and room_of(name) in DEPTHS[self.name] else self._module_of(outer)


def _read(folder: Path, path: Path) -> Source:
    parts = (folder.name, *path.relative_to(folder).with_suffix("").parts)
    module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return Source(path, module, ast.parse(path.read_text(encoding="utf-8"), filename=str(path)))


def _names(node: ast.AST, source: Source) -> list[str]:
    """The full names that a piece of syntax imports."""
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=module, names=names, level=level):
            start = ".".join(part for part in (_start(source, level), module) if part)
            return [f"{start}.{alias.name}" for alias in names]
        case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]) if _last_name(function) in {
            "import_module",
            "__import__",
        }:
            return [name]
    return []


def _start(source: Source, level: int) -> str:
    if level == 0:
        return ""
    parts = source.module.split(".")
    return ".".join(parts[: len(parts) - level + source.is_package])


def _last_name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


# --- the layers


def layers(house: House) -> Iterator[Breach]:
    """Imports go down, never up, never sideways."""
    depths = DEPTHS[house.name]
    for source in house:
        if source.room not in {DOOR, *depths}:
            yield Breach(source.path, 1, "layers", f"'{source.room}' is in no row of the house")
        for found in house.imports(source):
            inside = found.target.partition(".")[0] == house.name
            if inside and (reason := _forbidden(depths, source.room, room_of(found.target))):
                yield Breach(source.path, found.line, "layers", f"imports {found.target}: {reason}")


def _forbidden(depths: Mapping[str, int], room: str, other: str) -> str:
    """Why one room may not import another; empty when it may."""
    if other == DOOR and room != DOOR:
        return "the door is for users; rooms import the module itself"
    if room not in depths or other not in depths or room == other or depths[room] < depths[other]:
        return ""
    if depths[room] == depths[other]:
        return f"{room} and {other} are rooms of one row and know each other only through a room above"
    return f"{other} is above {room}; imports go down"


def core_alone(house: House) -> Iterator[Breach]:
    """The core knows nothing of what stands on it."""
    for source in house:
        for found in house.imports(source):
            if house.name != LAB and found.target.partition(".")[0] == LAB:
                words = f"imports {found.target}: the core does not know the lab"
                yield Breach(source.path, found.line, "core", words)


def sub_layers(house: House) -> Iterator[Breach]:
    """Inside of a room imports go down, too."""
    for source in house:
        depths, inner = SUB_DEPTHS.get(source.room) if house.name != LAB else None, inner_room_of(source.module)
        if depths is None or not inner:
            continue
        if inner not in depths and (source.is_package or source.module.count(".") > 2):
            yield Breach(source.path, 1, "sub-layers", f"'{inner}' is in no row of {source.room}")
        for found in house.imports(source):
            other = inner_room_of(found.target)
            if room_of(found.target) != source.room or not found.target.startswith(f"{house.name}."):
                continue
            if other != inner and (reason := _forbidden_inside(depths, inner, other)):
                yield Breach(source.path, found.line, "sub-layers", f"imports {found.target}: {reason}")


def _forbidden_inside(depths: Mapping[str, int], inner: str, other: str) -> str:
    """Why one room inside of a room may not import another; empty when it may."""
    depth, deeper = depths.get(inner, -1), depths.get(other, -1)
    if depth == deeper and depth >= 0:
        return f"{inner} and {other} stand in one row and know each other only through a room above"
    return f"{other or 'the room itself'} is above {inner}; imports go down" if depth > deeper else ""


def cycles(house: House) -> Iterator[Breach]:
    """No module imports itself, not by any way round."""
    graph = {
        source.module: {found.target for found in house.imports(source)} & house.sources.keys() for source in house
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        way = list(reversed(error.args[1]))
        first = house.sources[way[0]]
        line = min(found.line for found in house.imports(first) if found.target == way[1])
        yield Breach(first.path, line, "cycle", " imports ".join(way))


def purity(house: House) -> Iterator[Breach]:
    """What only decides touches no torch, socket, clock, environment or chance."""
    for source in house:
        inside = source.module.removeprefix(f"{house.name}.")
        if not any(inside == pure or inside.startswith(f"{pure}.") for pure in PURE):
            continue
        for found in house.imports(source):
            if (touched := found.target.partition(".")[0]) in WORLD:
                yield Breach(source.path, found.line, "purity", f"{inside} is pure and may not import {touched}")


def lazy_door(house: House) -> Iterator[Breach]:
    """Importing the package loads no room: only errors and the standard library."""
    door = house.sources[house.name]
    cheap = {*sys.stdlib_module_names, f"{house.name}.errors"}
    for node in _at_import_time(door.tree.body):
        for name in _names(node, door):
            target = house._module_of(name)
            if target not in cheap and target.partition(".")[0] not in cheap:
                yield Breach(door.path, getattr(node, "lineno", 1), "door", f"loads {target} when it is imported")


def _at_import_time(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The syntax that runs on import: not the insides of functions, not what only type checkers see."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and _last_name(node.test) == "TYPE_CHECKING":
            yield from _at_import_time(node.orelse)
            continue
        yield node
        yield from _at_import_time(ast.iter_child_nodes(node))


# --- what may not be written


def long_functions(house: House) -> Iterator[Breach]:
    """A function fits on a screen; what its docstring takes is not counted."""
    for source, node in _walk(house):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            length = node.end_lineno - node.lineno + 1 - _docstring_lines(node)
            if length > LONGEST_FUNCTION:
                words = f"{node.name} has {length} lines; the limit is {LONGEST_FUNCTION}"
                yield Breach(source.path, node.lineno, "long function", words)


def _docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = node.body[0]
    if ast.get_docstring(node) is None or first.end_lineno is None:
        return 0
    return first.end_lineno - first.lineno + 1


def no_pickle(house: House) -> Iterator[Breach]:
    """No pickle, on disk or on the wire: whoever can write one can run code."""
    for source in house:
        for found in house.imports(source):
            if found.target.partition(".")[0] in PICKLES:
                yield Breach(source.path, found.line, "pickle", f"imports {found.target}")
            if found.target in {"torch.load", "torch.save"}:
                yield Breach(source.path, found.line, "pickle", f"{found.target} pickles; use safetensors")
    for source, node in _walk(house):
        if isinstance(node, ast.Call) and (words := _pickles(node)):
            yield Breach(source.path, node.lineno, "pickle", words)


def _pickles(call: ast.Call) -> str:
    match call.func:
        case ast.Attribute(value=ast.Name(id="torch"), attr="load" | "save" as name):
            return f"torch.{name} pickles; use safetensors"
        case ast.Attribute(attr=name) | ast.Name(id=name) if name in PICKLING_COLLECTIVES:
            return f"{name} pickles what it sends"
    if _has_true(call, "allow_pickle"):
        return "allow_pickle=True"
    return ""


def no_shell(house: House) -> Iterator[Breach]:
    """Programs are started from a list of arguments, never through a shell."""
    for source, node in _walk(house):
        if not isinstance(node, ast.Call):
            continue
        if _has_true(node, "shell"):
            yield Breach(source.path, node.lineno, "shell", "shell=True; give a list of arguments")
        match node.func:
            case ast.Attribute(value=ast.Name(id="os"), attr="system" | "popen" as name):
                yield Breach(source.path, node.lineno, "shell", f"os.{name} runs a shell")


def _has_true(call: ast.Call, name: str) -> bool:
    """Whether a keyword is given and is anything but the constant False."""
    return any(
        keyword.arg == name and not (isinstance(keyword.value, ast.Constant) and not keyword.value.value)
        for keyword in call.keywords
    )


def no_code_from_text(house: House) -> Iterator[Breach]:
    """Nothing turns text into code."""
    for source, node in _walk(house):
        match node:
            case ast.Call(func=ast.Name(id="eval" | "exec" as name), lineno=line):
                yield Breach(source.path, line, "code from text", f"calls {name}")


def json_in_one_place(house: House) -> Iterator[Breach]:
    """JSON that arrives is parsed where its limits are: nothing but our own error comes of it."""
    for source, node in _walk(house):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="json"), attr="load" | "loads" as name)):
                if source.module != "unisono.received":
                    words = f"json.{name}: use parse_json, parse_object or read_object of unisono.received"
                    yield Breach(source.path, node.lineno, "json", words)


def kinds_of_devices(house: House) -> Iterator[Breach]:
    """One module knows what kinds of accelerators there are: all others ask it."""
    for source, node in _walk(house):
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr=kind) if kind in KINDS_OF_DEVICES:
                words = f"torch.{kind}"
            case ast.Constant(value=str(text)) if text.partition(":")[0] in KINDS_OF_DEVICES:
                words = f"{text!r}"
            case _:
                continue
        if source.module != "unisono.device":
            yield Breach(source.path, node.lineno, "devices", f"{words}: ask unisono.device")


def naming(house: House) -> Iterator[Breach]:
    """A module is called by its noun, and nothing is a manager."""
    for source in house:
        if source.module.rpartition(".")[2] in NAMELESS:
            yield Breach(source.path, 1, "names", "say what is in it: one noun per file")
    for source, node in _walk(house):
        if isinstance(node, ast.ClassDef) and node.name.endswith("Manager"):
            yield Breach(source.path, node.lineno, "names", f"{node.name}: say what it does, not that it manages")


def one_meaning(house: House) -> Iterator[Breach]:
    """A public class name has one meaning: it is defined in one file."""
    first: dict[str, Source] = {}
    for source, node in _walk(house):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            other = first.setdefault(node.name, source)
            if other is not source:
                words = f"{node.name} is a class of {other.module}, too: a name has one meaning"
                yield Breach(source.path, node.lineno, "one meaning", words)


def described_by_nouns(house: House) -> Iterator[Breach]:
    """An argument or an attribute is described by a noun: "the job to train", not "that is trained"."""
    for source, node in _walk(house):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for line, name, words in _descriptions(node):
            if FRAGMENT.match(words):
                yield Breach(source.path, line, "nouns", f"{name}: {words!r} begins in the middle of a sentence")


def _descriptions(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[int, str, str]]:
    """The line, name and text of everything under ``Args:`` and ``Attributes:``."""
    found = re.split(r"^ *(?:Args|Attributes):$", ast.get_docstring(node, clean=False) or "", flags=re.MULTILINE)
    line = node.body[0].lineno
    for before, section in pairwise(found):
        line += before.count("\n")
        entries = section.partition("\n\n")[0]
        margin = re.match(r"\n( *)", entries)
        if margin is not None:
            for entry in re.finditer(rf"^{margin[1]}(\w+): (.*)$", entries, re.MULTILINE):
                yield line + entries[: entry.start()].count("\n"), entry[1], entry[2]


def small_run(house: House) -> Iterator[Breach]:
    """A run has the public verbs; those that do the work are made in ``train/assembly.py``."""
    for source in house:
        if source.module != RUN:
            continue
        lines = len(source.path.read_text(encoding="utf-8").splitlines())
        imports = sum(isinstance(node, ast.Import | ast.ImportFrom) for node in source.tree.body)
        for what, count, limit in (("lines", lines, LONGEST_RUN), ("imports", imports, MOST_IMPORTS_OF_RUN)):
            if count > limit:
                words = f"{count} {what}; the limit is {limit}: put what is not a public verb elsewhere"
                yield Breach(source.path, 1, "run", words)


def made_whole(house: House) -> Iterator[Breach]:
    """Whoever is called back is given to a constructor, or to a call; nobody puts it into another object later."""
    elsewhere = _methods_alone(house)
    for source in house:
        for owner in ast.walk(source.tree):
            if not isinstance(owner, ast.ClassDef):
                continue
            methods = {
                node.name for node in owner.body if isinstance(node, ast.FunctionDef) and not node.decorator_list
            }
            for node in ast.walk(owner):
                if isinstance(node, ast.Assign) and any(map(_is_another_ones, node.targets)):
                    values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
                    if any(_is_callable(value, methods, elsewhere) for value in values):
                        words = f"{ast.unparse(node.targets[0])} is filled later: give it to the constructor"
                        yield Breach(source.path, node.lineno, "made whole", words)


def _is_another_ones(target: ast.expr) -> bool:
    if isinstance(target, ast.Tuple):
        return any(map(_is_another_ones, target.elts))
    return isinstance(target, ast.Attribute) and not (isinstance(target.value, ast.Name) and target.value.id == "self")


def _methods_alone(house: House) -> set[str]:
    """Names of methods that are no names of fields as well."""
    methods, fields = set[str](), set[str]()
    for _, node in _walk(house):
        if isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, ast.FunctionDef):
                    (fields if each.decorator_list else methods).add(each.name)
                elif isinstance(each, ast.AnnAssign):
                    fields.add(_last_name(each.target))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            fields.add(node.attr)
    return methods - fields


def _is_callable(value: ast.expr, methods: set[str], elsewhere: set[str]) -> bool:
    if isinstance(value, ast.Call):
        return _last_name(value.func) == "partial"
    if isinstance(value, ast.Attribute) and value.attr in elsewhere:
        return True
    own = isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name) and value.value.id == "self"
    return isinstance(value, ast.Lambda) or (own and _last_name(value) in methods)


def _walk(house: House) -> Iterator[tuple[Source, ast.AST]]:
    for source in house:
        for node in source.nodes:
            yield source, node


RULES: tuple[Callable[[House], Iterator[Breach]], ...] = (
    layers,
    core_alone,
    sub_layers,
    cycles,
    purity,
    lazy_door,
    long_functions,
    no_pickle,
    no_shell,
    no_code_from_text,
    json_in_one_place,
    kinds_of_devices,
    naming,
    one_meaning,
    described_by_nouns,
    small_run,
    made_whole,
)
