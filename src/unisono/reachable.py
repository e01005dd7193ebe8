"""The plain state that can be reached from an object: attributes, and variables of functions, each with a path."""

from __future__ import annotations

import builtins
import dis
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from itertools import islice
from pathlib import PurePath
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from unisono.host.tracebacks import is_of_script

MOST_OBJECTS = 5000
"""The most objects that are looked at; those that are nearest come first."""

MOST_ITEMS = 32
"""Items at each end of a list, and in a mapping, whose objects are looked at."""

DEEPEST = 4
"""Lists and mappings in each other."""

ABSENT = object()
"""In the place of a value that is not there."""

FRAMEWORKS = frozenset(
    {
        "accelerate",
        "datasets",
        "keras",
        "lightning",
        "lightning_fabric",
        "lightning_utilities",
        "pytorch_lightning",
        "tokenizers",
        "torch",
        "torchmetrics",
        "transformers",
        "unisono",
        "unisono_lab",
    }
)
"""Packages that change attributes of scripts' objects by themselves. What they keep in their own objects is theirs."""

CLOSED = frozenset(
    {
        "_thread",
        "asyncio",
        "concurrent",
        "contextvars",
        "ctypes",
        "io",
        "logging",
        "matplotlib",
        "mlflow",
        "multiprocessing",
        "queue",
        "ray",
        "rich",
        "selectors",
        "socket",
        "subprocess",
        "tensorboard",
        "tensorboardX",
        "tensorflow",
        "threading",
        "tqdm",
        "typing",
        "wandb",
        "weakref",
    }
)
"""Packages whose objects are not looked into: clocks, log files, threads, connections."""

OPENED = ("torch.nn", "torch.utils.data", "torch.distributions")
"""Modules of torch whose objects are looked into."""


@dataclass(frozen=True, slots=True)
class Place:
    """A place that holds a value: an attribute of an object or a class, a variable of a function, or a global one.

    Attributes:
        path: the name for people, such as ``model.layers.0.last``.
        holder: the mapping, the cell or the object that holds the value.
        key: its name there.
        owner: the name of the class of the object; empty for variables.
        is_script: whether the owner is defined in the script's own code.
    """

    path: str
    holder: Any
    key: str
    owner: str
    is_script: bool

    @property
    def value(self) -> Any:
        """The value that is there now; :data:`ABSENT` if there is none."""
        if isinstance(self.holder, CellType):
            try:
                return self.holder.cell_contents
            except ValueError:
                return ABSENT
        return self.holder.get(self.key, ABSENT) if isinstance(self.holder, dict) else _slot(self.holder, self.key)

    def put(self, value: Any) -> None:
        """Put another value there, or :data:`ABSENT` to remove it."""
        if isinstance(self.holder, CellType):
            if value is ABSENT:
                del self.holder.cell_contents
            else:
                self.holder.cell_contents = value
        elif isinstance(self.holder, dict):
            if value is ABSENT:
                self.holder.pop(self.key, None)
            else:
                self.holder[self.key] = value
        elif value is ABSENT:
            if _slot(self.holder, self.key) is not ABSENT:
                delattr(self.holder, self.key)
        elif isinstance(self.holder, type):
            setattr(self.holder, self.key, value)
        else:
            object.__setattr__(self.holder, self.key, value)  # also where the class is frozen


def _slot(holder: Any, key: str) -> Any:
    return vars(holder).get(key, ABSENT) if isinstance(holder, type) else getattr(holder, key, ABSENT)


def places_in(roots: Mapping[str, Any], is_known: Callable[[Any], bool] = lambda thing: False) -> Iterator[Place]:
    """The places that can be reached from some objects, nearest first.

    Args:
        roots: the objects by name.
        is_known: whether an object has its state somewhere else: it is not looked into.
    """
    holder = dict(roots)
    seen = {id(holder)}
    waiting: deque[tuple[str, Any]] = deque()

    def take_in(path: str, value: Any) -> None:
        for inner, thing in _objects(path, value, 0):
            if id(thing) not in seen and not is_known(thing):
                seen.add(id(thing))
                waiting.append((inner, thing))

    for name, root in holder.items():
        yield Place(name, holder, name, "", is_script=True)
        take_in(name, root)
    for _ in range(MOST_OBJECTS):
        if not waiting:
            return
        path, thing = waiting.popleft()
        for place in _places(path, thing):
            value = place.value
            if value is not ABSENT and not is_known(value):
                yield place
                take_in(place.path, value)
        for inner, held in _held(path, thing):
            take_in(inner, held)


def items_of(value: Any) -> Iterable[tuple[str, Any]]:
    """The items of a list, tuple, set or mapping that are looked at, each with its part of the path."""
    if isinstance(value, dict):
        try:
            return [(f"[{_name(key)}]", item) for key, item in islice(value.items(), 2 * MOST_ITEMS)]
        except RuntimeError:  # another thread changes it
            return []
    count = len(value)
    if isinstance(value, set | frozenset):
        return [("", item) for item in islice(value, 2 * MOST_ITEMS)]
    places = range(count) if count <= 2 * MOST_ITEMS else [*range(MOST_ITEMS), *range(count - MOST_ITEMS, count)]
    return [(f"[{place}]", value[place]) for place in places]


def _name(key: Any) -> str:
    return f"{key!r:.40}" if isinstance(key, str | bytes | int | float | None) else type(key).__name__


CONTAINERS = (list, tuple, dict, set, frozenset, deque)


def _objects(path: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """The objects in a value that may have places: itself, or what its lists and mappings hold."""
    if type(value) in _PLAIN:  # most are
        return
    if isinstance(value, CONTAINERS):
        if depth < DEEPEST:
            for part, item in items_of(value):
                if not isinstance(item, _LEAVES):
                    yield from _objects(path + part, item, depth + 1)
        if type(value).__module__ == "builtins":
            return
    if isinstance(value, _LEAVES) or _is_closed(_class_of(value)):
        return
    yield path, value


_PLAIN = frozenset((type(None), bool, int, float, str))

_LEAVES = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    bytearray,
    Enum,
    PurePath,
    range,
    slice,
    torch.Tensor,
    torch.dtype,
    torch.device,
    torch.Generator,
    ModuleType,
    type,
)


def _class_of(thing: Any) -> Any:
    """Its class, of which mypy does not know that it can be hashed."""
    return type(thing)


@cache
def _is_closed(kind: type) -> bool:
    """Whether objects of a class are not looked into."""
    module = kind.__module__ or ""
    package = module.partition(".")[0]
    if package in CLOSED or kind.__module__ in ("numpy", "numpy.random._generator", "numpy.random.mtrand"):
        return True
    if issubclass(kind, nn.Module):  # whose parts may be the script's
        return False
    return not module.startswith(OPENED) if package == "torch" else package in FRAMEWORKS


def _held(path: str, thing: Any) -> Iterator[tuple[str, Any]]:
    """Objects that belong to another one, but lie in no place of it that a script could change by a plain write."""
    match thing:
        case partial():
            yield path, thing.func
            yield from ((path, argument) for argument in (*thing.args, *thing.keywords.values()))
        case MethodType():
            yield path, thing.__self__
            yield path, thing.__func__
        case FunctionType():
            yield from _functions_of(path, thing)
        case nn.Module():
            yield from ((f"{path}.{name}", child) for name, child in thing._modules.items() if child is not None)
            for hooks in (thing._forward_hooks, thing._forward_pre_hooks, thing._backward_hooks):
                yield from ((f"{path}.hook", hook) for hook in hooks.values())
    for base in type(thing).__mro__:
        if is_script_class(base):
            for method in vars(base).values():
                function = getattr(method, "fget", None) or getattr(method, "__func__", method)
                if isinstance(function, FunctionType):
                    yield from _functions_of(path, function)


def _functions_of(path: str, function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The script's functions that a function names."""
    for name in _globals_of(function.__code__):
        value = function.__globals__.get(name)
        if isinstance(value, FunctionType) and is_of_script(value.__code__.co_filename):
            yield path, value


def _places(path: str, thing: Any) -> Iterator[Place]:
    """The places of one object or function."""
    if isinstance(thing, MethodType):
        return
    if isinstance(thing, partial):
        yield from (Place(f"{path}.{key}", thing.keywords, key, "", is_script=True) for key in thing.keywords)
        arguments = {str(number): argument for number, argument in enumerate(thing.args)}
        yield from (Place(f"{path}.{key}", arguments, key, "", is_script=True) for key in arguments)
        return
    if isinstance(thing, FunctionType):
        yield from _variables(thing)
        return
    kind = _class_of(thing)
    owner, is_script = kind.__name__, is_script_class(kind)
    attributes = getattr(thing, "__dict__", None)
    skipped = stored_by_frameworks(kind)
    if isinstance(attributes, dict):
        for name in list(attributes):
            if name not in skipped and not name.startswith("__"):
                yield Place(f"{path}.{name}", attributes, name, owner, is_script)
    if isinstance(thing, nn.Module):
        yield from (Place(f"{path}.{name}", thing._buffers, name, owner, is_script) for name in list(thing._buffers))
    for name in getattr(thing, "_defaults", ()) if kind.__module__.startswith("torchmetrics.") else ():
        yield Place(f"{path}.{name}", attributes, name, owner, is_script)
    for name in _slots_of(kind):
        yield Place(f"{path}.{name}", thing, name, owner, is_script)
    for base in kind.__mro__:
        if not is_script_class(base):
            continue
        for name, value in list(vars(base).items()):
            if not name.startswith("__") and (not isinstance(attributes, dict) or name not in attributes):
                if isinstance(value, FunctionType):
                    yield from _global_places(value)
                elif not (hasattr(value, "__get__") or isinstance(value, type)):
                    yield Place(f"{path}.{name}", base, name, owner, is_script)
        for name in ("__call__", "__getitem__", "__iter__"):
            if isinstance(method := vars(base).get(name), FunctionType):
                yield from _global_places(method)


def _variables(function: FunctionType) -> Iterator[Place]:
    """The variables that a function keeps from one call to the next."""
    name = function.__name__.strip("<>")
    is_script = is_of_script(function.__code__.co_filename)
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield Place(f"{name}.{variable}", cell, "", "", is_script)
    if not is_script:
        return
    arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = dict(zip(arguments[::-1], (function.__defaults__ or ())[::-1], strict=False))
    for kept in (defaults, function.__kwdefaults__ or {}, vars(function)):
        yield from (Place(f"{name}.{key}", kept, key, "", is_script) for key in list(kept))
    yield from _global_places(function)


def _global_places(function: FunctionType) -> Iterator[Place]:
    """The global variables that a function of the script names."""
    if not is_of_script(function.__code__.co_filename):
        return
    values = function.__globals__
    module = values.get("__name__")
    prefix = "" if module == "__main__" else f"{module}."
    for name in _globals_of(function.__code__):
        value = values.get(name, ABSENT)
        if isinstance(value, ModuleType):
            if isinstance(file := getattr(value, "__file__", None), str) and is_of_script(file):
                for key, part in list(vars(value).items()):
                    if isinstance(part, (bool, int, float, *CONTAINERS)) and not key.startswith("__"):
                        yield Place(f"{name}.{key}", vars(value), key, "", is_script=True)
        elif isinstance(value, type):
            if is_script_class(value):
                for key, part in list(vars(value).items()):
                    if not (key.startswith("__") or hasattr(part, "__get__") or isinstance(part, type)):
                        yield Place(f"{name}.{key}", value, key, name, is_script=True)
        elif value is not ABSENT and not isinstance(value, FunctionType):
            yield Place(f"{prefix}{name}", values, name, "", is_script=True)


@cache
def _globals_of(code: CodeType) -> tuple[str, ...]:
    """The names of global variables that a function uses, and functions in it."""
    names = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME")
        and not hasattr(builtins, instruction.argval)
    }
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names.update(_globals_of(constant))
    return tuple(sorted(names))


@cache
def is_script_class(kind: type) -> bool:
    """Whether the script's own code defines a class."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind.__module__ == "__main__" or (isinstance(file, str) and is_of_script(file))


@cache
def stored_by_frameworks(kind: type) -> frozenset[str]:
    """The attributes of a class's objects that frameworks below it store, which are theirs."""
    names = set(_MODULE) if issubclass(kind, nn.Module) else set[str]()
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] in FRAMEWORKS and not base.__module__.startswith(OPENED):
            for value in vars(base).values():
                function = getattr(value, "fset", None) or getattr(value, "__wrapped__", None) or value
                if isinstance(function := getattr(function, "__func__", function), FunctionType):
                    names.update(_stores(function.__code__))
    return frozenset(names)


_MODULE = frozenset(vars(nn.Module()))


@cache
def _stores(code: CodeType) -> frozenset[str]:
    names = {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR"}
    return frozenset(names.union(*(_stores(inner) for inner in code.co_consts if isinstance(inner, CodeType))))


@cache
def _slots_of(kind: type) -> tuple[str, ...]:
    slots: Iterable[str] = ()
    for base in kind.__mro__:
        own = base.__dict__.get("__slots__", ())
        slots = [*slots, *((own,) if isinstance(own, str) else own)]
    return tuple(name for name in slots if not name.startswith("__"))
