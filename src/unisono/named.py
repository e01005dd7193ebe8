"""What is given by name: a thing of ours, one that another package brings as an entry point, or ``module:Class``."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from unisono.errors import JobError
from unisono.received import imported, short

GROUPS = {
    "command": "unisono.commands",
    "launch option": "unisono.launch_options",
    "logger": "unisono.loggers",
    "policy": "unisono.policies",
    "strategy": "unisono.strategies",
}
"""The groups of entry points in which packages bring things of each kind."""


def brought(kind: str) -> dict[str, str]:
    """The things of a kind that packages bring, by name: each as ``module:name``.

    Args:
        kind: one of :data:`GROUPS`.

    Raises:
        JobError: two packages bring one of the same name.
    """
    from importlib.metadata import entry_points  # most processes need it never, and it takes a tenth of a second

    result: dict[str, str] = {}
    for point in sorted(entry_points(group=GROUPS[kind])):
        other = result.setdefault(point.name, point.value)
        if other != point.value:
            raise JobError(f"{other} and {point.value} are both the {kind} {point.name}: uninstall one of them")
    return result


def require_named(names: Iterable[str], ours: Collection[str], kind: str, where: str) -> None:
    """Refuse names that no host can know; whether modules and packages are there, each finds out by itself.

    Args:
        names: names of ours, of what packages bring, or texts such as ``module:Class``.
        ours: the names that we give.
        kind: one of :data:`GROUPS`.
        where: the variable or option that they stand in, for errors.

    Raises:
        JobError: there is no such name; says which there are.
    """
    if wrong := [name for name in names if name not in ours and ":" not in name and name not in brought(kind)]:
        listed = ", ".join([*ours, *(name for name in brought(kind) if name not in ours)])
        raise JobError(f"{where}: there is no {kind} {short(wrong[0])}: choose of {listed}, or write module:Class")


def thing_named(name: str, ours: Mapping[str, Any], kind: str, where: str) -> Any:
    """The thing of a name, with the arguments and errors of :func:`require_named`.

    Raises:
        JobError: there is no such name, or it cannot be imported.
    """
    require_named((name,), ours, kind, where)
    return ours[name] if name in ours else imported(name if ":" in name else brought(kind)[name], where)
