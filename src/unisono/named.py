"""What is given by name: a thing of ours, one that another package brings as an entry point, or ``module:Class``."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unisono.errors import JobError
from unisono.received import imported, short, why_of

if TYPE_CHECKING:
    from importlib.metadata import Distribution

GROUPS = {
    "command": "unisono.commands",
    "engine": "unisono.engines",
    "launch option": "unisono.launch_options",
    "logger": "unisono.loggers",
    "measurement": "unisono.measurements",
    "policy": "unisono.policies",
    "strategy": "unisono.strategies",
}
"""The groups of entry points in which packages bring things of each kind."""

US = "unisono"
"""The name of our own package, of which the lab is a part."""

NAME = r"[^\W_][\w.-]*"
"""A name that can be typed: what has colons, commas or blanks would be read otherwise."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """A thing that packages bring under one name.

    Attributes:
        kind: its kind, one of :data:`GROUPS`.
        name: its name.
        places: the place in each package that brings it, ``module:name``, by the name of the package.
    """

    kind: str
    name: str
    places: Mapping[str, str]

    def load(self) -> Any:
        """Import it.

        Raises:
            JobError: it cannot be imported, or two packages bring one of this name.
        """
        if len(set(self.places.values())) > 1:
            packages = " and ".join(self.places)
            raise JobError(f"the packages {packages} both bring a {self.kind} {self.name}: uninstall one of them")
        [place] = {*self.places.values()}
        return imported(place, f"the {self.kind} {self.name}")


def plugins(kind: str) -> dict[str, Plugin]:
    """The things of a kind that packages bring, by name. A name of our own package is never another one's.

    Args:
        kind: one of :data:`GROUPS`.

    Raises:
        JobError: the entry points of a package cannot be read; names it.
    """
    from importlib import metadata  # most processes need it never, and it takes a tenth of a second

    try:
        points = metadata.entry_points(group=GROUPS[kind])
    except Exception as error:  # noqa: BLE001  (in a file that somebody else has written)
        torn = dict.fromkeys(package.name for package in metadata.distributions() if not _is_readable(package))
        raise JobError(f"the entry points of {', '.join(torn)} cannot be read: {why_of(error)}") from None
    places: dict[str, dict[str, str]] = {}
    for point in points:
        if re.fullmatch(NAME, point.name):
            package = "" if point.dist is None else point.dist.name
            places.setdefault(point.name, {}).setdefault(package, point.value.partition("[")[0].strip())
    return {
        name: Plugin(kind, name, {US: theirs[US]} if US in theirs else theirs)
        for name, theirs in sorted(places.items())
    }


def _is_readable(package: "Distribution") -> bool:
    try:
        _ = package.entry_points
        return True
    except Exception:  # noqa: BLE001  (whatever is wrong with it)
        return False


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
    if wrong := [name for name in names if name not in ours and ":" not in name and name not in plugins(kind)]:
        listed = ", ".join([*ours, *(name for name in plugins(kind) if name not in ours)])
        raise JobError(f"{where}: there is no {kind} {short(wrong[0])}: choose of {listed}, or write module:Class")


def load_named(name: str, ours: Mapping[str, Any], kind: str, where: str) -> Any:
    """The thing of a name, with the arguments and errors of :func:`require_named`.

    Raises:
        JobError: there is no such name, or it cannot be imported.
    """
    require_named((name,), ours, kind, where)
    if name in ours:
        return ours[name]
    return imported(name, where) if ":" in name else plugins(kind)[name].load()
