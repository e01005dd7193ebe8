"""Places in a script that could make its runs differ: found in its syntax tree, without running it.

A hint is no proof. Most of these places are harmless; which of them are shown depends on what was measured.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

MOST_FILES = 50


class Topic(StrEnum):
    """The subject of a place in a script."""

    RANK = "asks which worker this is"
    WORLD = "asks how many workers there are"
    EARLY = "stands before unisono.init, which seeds"
    RANDOM = "draws random numbers"
    GENERATOR = "makes a random generator of its own"
    UNSEEDED = "is random, and no seed changes that"
    TIME = "reads the time"
    ORDER = "has an order that may be another one in every process"
    RELAXED = "allows operations that are not deterministic"
    NATIVE = "leaves the order of additions to the backend"


@dataclass(frozen=True, slots=True)
class Hint:
    """A place in a file.

    Attributes:
        line: the number of the line, from 1.
        topic: the subject that the line has to do with.
        code: the text of the line, without its indentation.
    """

    path: str
    line: int
    topic: Topic
    code: str


ATTRIBUTES = {"rank": Topic.RANK, "world_size": Topic.WORLD, "is_main": Topic.RANK, "local_rank": Topic.RANK}

CALLS: Mapping[str, Topic] = {
    name: topic
    for topic, names in {
        Topic.RANK: "os.getpid socket.gethostname platform.node torch.distributed.get_rank torch.cuda.current_device",
        Topic.WORLD: "torch.distributed.get_world_size",
        Topic.UNSEEDED: "os.urandom random.SystemRandom secrets uuid torch.seed",
        Topic.GENERATOR: "torch.Generator random.Random numpy.random.default_rng numpy.random.Generator "
        "numpy.random.RandomState",
        Topic.RANDOM: "random numpy.random torch.rand torch.rand_like torch.randn torch.randn_like torch.randint "
        "torch.randperm torch.normal torch.bernoulli torch.multinomial torch.utils.data.random_split "
        "sklearn.model_selection.train_test_split",
        Topic.TIME: "time datetime.datetime.now datetime.datetime.utcnow datetime.date.today",
        Topic.ORDER: "os.listdir os.scandir os.walk glob",
    }.items()
    for name in names.split()
}
"""Calls by full name; an entry stands for everything below it too, and the longest one decides."""

HARMLESS = {"random.seed", "numpy.random.seed", "time.sleep"}
"""Calls that the entries above cover, and that make no run differ."""

LISTING_METHODS = {"iterdir", "glob", "rglob"}

VARIABLES: Mapping[object, Topic] = {
    **dict.fromkeys(("RANK", "LOCAL_RANK", "UNISONO_RANK", "UNISONO_LOCAL_RANK", "SLURM_PROCID"), Topic.RANK),
    **dict.fromkeys(("WORLD_SIZE", "UNISONO_WORLD_SIZE", "SLURM_NTASKS"), Topic.WORLD),
}
"""Variables of the environment, by name."""

SETTINGS: Mapping[tuple[object, object], Topic] = {
    ("deterministic", False): Topic.RELAXED,
    ("reduction", "native"): Topic.NATIVE,
}

BUILDERS = ("torch.nn", "torchvision.models", "transformers")
"""Packages whose classes and functions draw a model's first weights."""

NO_BUILDERS = ("torch.nn.functional", "torch.nn.utils")

Aliases = Mapping[str, str]


def find_hints(source: str, path: str) -> list[Hint]:
    """The places in a source, from top to bottom; none in one that is no Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    lines = source.splitlines()
    aliases = _aliases(tree)
    places = {*_places(tree, aliases), *_before_init(tree, aliases)}
    early = {line for line, topic in places if topic is Topic.EARLY}
    return [
        Hint(path, line, topic, lines[line - 1].strip())
        for line, topic in sorted(places, key=lambda place: (place[0], list(Topic).index(place[1])))
        if not (line in early and topic is Topic.RANDOM)
    ]


def read_hints(script: Path) -> list[Hint]:
    """The hints of a script, and of the modules beside it that it imports. A file that cannot be read has none."""
    hints: list[Hint] = []
    queue, seen = [script], {script.resolve()}
    while queue and len(seen) <= MOST_FILES:
        path = queue.pop(0)
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, ValueError):
            continue
        hints += find_hints(source, str(path))
        new = [beside for beside in imported_beside(source, script.parent) if beside.resolve() not in seen]
        queue += new
        seen |= {beside.resolve() for beside in new}
    return hints


def imported_beside(source: str, folder: Path) -> list[Path]:
    """The files in ``folder`` that a source imports."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    names = dict.fromkeys(_imported(tree))
    files = [folder.joinpath(*name.split(".")) for name in names]
    paths = [path for file in files for path in (file.with_suffix(".py"), file / "__init__.py")]
    return [path for path in paths if path.is_file()]


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield module
                yield from (f"{module}.{alias.name}" for alias in names if alias.name != "*")


def _aliases(tree: ast.Module) -> Aliases:
    """The full name of each imported name: ``numpy`` for ``np``, ``torch.nn`` for ``nn``."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    root = alias.name.partition(".")[0]
                    aliases[alias.asname or root] = alias.name if alias.asname else root
            case ast.ImportFrom(module=str(module), names=names, level=0):
                aliases.update({alias.asname or alias.name: f"{module}.{alias.name}" for alias in names})
    return aliases


def _full_name(node: ast.expr, aliases: Aliases) -> str:
    match node:
        case ast.Name(id=name):
            return aliases.get(name, "")
        case ast.Attribute(value=value, attr=attribute):
            outer = _full_name(value, aliases)
            return f"{outer}.{attribute}" if outer else ""
    return ""


def _places(tree: ast.Module, aliases: Aliases) -> Iterator[tuple[int, Topic]]:
    order_free = _inside_sorted(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            topic = _topic_of_call(node, aliases)
            if topic is not None and not (topic is Topic.ORDER and node in order_free):
                yield node.lineno, topic
            yield from _settings({keyword.arg: keyword.value for keyword in node.keywords})
        elif isinstance(node, ast.Dict):  # a group of settings
            keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
            yield from _settings(dict(zip(keys, node.values, strict=True)))
        elif isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
            yield node.lineno, ATTRIBUTES[node.attr]
        elif isinstance(node, ast.Constant) and node.value in VARIABLES:
            yield node.lineno, VARIABLES[node.value]
        elif isinstance(node, ast.For | ast.comprehension) and _is_set(node.iter):
            yield node.iter.lineno, Topic.ORDER


def _topic_of_call(call: ast.Call, aliases: Aliases) -> Topic | None:
    name = _full_name(call.func, aliases)
    while name and name not in HARMLESS:
        if name in CALLS:
            return CALLS[name]
        name = name.rpartition(".")[0]
    match call.func:
        case ast.Attribute(attr=method) if method in LISTING_METHODS:
            return Topic.ORDER
        case ast.Name(id="list" | "tuple" | "enumerate") if call.args and _is_set(call.args[0]):
            return Topic.ORDER
    return None


def _settings(values: Mapping[object, ast.expr]) -> Iterator[tuple[int, Topic]]:
    for name, value in values.items():
        if isinstance(value, ast.Constant) and (topic := SETTINGS.get((name, value.value))):
            yield value.lineno, topic


def _is_set(node: ast.expr) -> bool:
    match node:
        case ast.Set() | ast.SetComp() | ast.Call(func=ast.Name(id="set" | "frozenset")):
            return True
    return False


def _inside_sorted(tree: ast.Module) -> set[ast.AST]:
    """All that is inside a call whose result does not depend on the order of its argument."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    outer = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in {"sorted", "len", "set"}]
    return {inner for call in outer for inner in ast.walk(call)}


def _before_init(tree: ast.Module, aliases: Aliases) -> Iterator[tuple[int, Topic]]:
    """Calls that draw first weights or random numbers, and run before ``unisono.init`` does."""
    scope, line = _init(tree, aliases)
    if scope is None:
        return
    models = {node.name for node in tree.body if isinstance(node, ast.ClassDef) and _is_model(node, aliases)}
    bodies = [tree.body] if scope is tree else [tree.body, scope.body]
    for body in bodies:
        for call in _running_calls(body):
            outside = body is tree.body and scope is not tree
            if (outside or call.lineno < line) and _draws(call, aliases, models):
                yield call.lineno, Topic.EARLY


def _init(tree: ast.Module, aliases: Aliases) -> tuple[ast.Module | ast.FunctionDef | None, int]:
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    scopes: list[ast.Module | ast.FunctionDef] = [tree, *functions]
    for scope in scopes:
        for call in _running_calls(scope.body):
            if _full_name(call.func, aliases) in {"unisono.init", "unisono.Trainer"}:
                return scope, call.lineno
    return None, 0


def _running_calls(body: list[ast.stmt]) -> Iterator[ast.Call]:
    """The calls that a body makes when it runs: not those inside functions and classes that it defines."""
    queue: list[ast.AST] = list(body)
    while queue:
        node = queue.pop(0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(node, ast.Call):
            yield node
        queue += ast.iter_child_nodes(node)


def _is_model(node: ast.ClassDef, aliases: Aliases) -> bool:
    return any(_full_name(base, aliases).startswith("torch.nn.") for base in node.bases)


def _draws(call: ast.Call, aliases: Aliases, models: set[str]) -> bool:
    if isinstance(call.func, ast.Name) and call.func.id in models:
        return True
    if _topic_of_call(call, aliases) in {Topic.RANDOM, Topic.UNSEEDED}:
        return True
    name = _full_name(call.func, aliases)
    return name.startswith(tuple(f"{builder}." for builder in BUILDERS)) and not name.startswith(NO_BUILDERS)
