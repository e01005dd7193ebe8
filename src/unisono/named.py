"""Objects that are given by name: our own, extensions of other packages (entry points), or ``module:Class``."""

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
"""The group of entry points for each kind of extension."""

US = "unisono"
"""The name of our own package, of which the lab is a part."""

NAME = r"[^\W_][\w.-]*"
"""The form of an extension's name. Colons, commas and blanks have other meanings on the command line."""


@dataclass(frozen=True, slots=True)
class Extension:
    """An object that packages offer under one name.

    Attributes:
        kind: its kind, one of :data:`GROUPS`.
        name: its name.
        objects: the object, ``module:name``, in each package that offers it, by the name of the package.
    """

    kind: str
    name: str
    objects: Mapping[str, str]

    def load(self) -> Any:
        """Import the object.

        Raises:
            JobError: it cannot be imported, or two packages offer different objects under this name.
        """
        if len(set(self.objects.values())) > 1:
            packages = " and ".join(self.objects)
            raise JobError(f"the packages {packages} both bring a {self.kind} {self.name}: uninstall one of them")
        [text] = {*self.objects.values()}
        return imported(text, f"the {self.kind} {self.name}")


def extensions(kind: str) -> dict[str, Extension]:
    """The extensions of a kind, by name. Other packages cannot replace those of our own package.

    Args:
        kind: one of :data:`GROUPS`.

    Raises:
        JobError: the entry points of a package cannot be read; names it.
    """
    from importlib import metadata  # most processes never need it, and it takes a tenth of a second

    try:
        points = metadata.entry_points(group=GROUPS[kind])
    except Exception as error:  # noqa: BLE001  (in a file of another package)
        damaged = dict.fromkeys(package.name for package in metadata.distributions() if not _is_readable(package))
        raise JobError(f"the entry points of {', '.join(damaged)} cannot be read: {why_of(error)}") from None
    by_name: dict[str, dict[str, str]] = {}
    for point in points:
        if re.fullmatch(NAME, point.name):
            package = "" if point.dist is None else point.dist.name
            by_name.setdefault(point.name, {}).setdefault(package, point.value.partition("[")[0].strip())
    return {
        name: Extension(kind, name, {US: objects[US]} if US in objects else objects)
        for name, objects in sorted(by_name.items())
    }


def _is_readable(package: "Distribution") -> bool:
    try:
        _ = package.entry_points
        return True
    except Exception:  # noqa: BLE001  (whatever is wrong with it)
        return False


def require_named(names: Iterable[str], ours: Collection[str], kind: str, where: str) -> None:
    """Refuse names that are unknown. Texts such as ``module:Class`` are not imported: another host may have the module.

    Args:
        names: our own names, names of extensions, or texts such as ``module:Class``.
        ours: our own names.
        kind: one of :data:`GROUPS`.
        where: the variable or option with the names, for errors.

    Raises:
        JobError: a name is unknown; lists the known names.
    """
    if wrong := [name for name in names if name not in ours and ":" not in name and name not in extensions(kind)]:
        listed = ", ".join([*ours, *(name for name in extensions(kind) if name not in ours)])
        raise JobError(f"{where}: there is no {kind} {short(wrong[0])}: choose of {listed}, or write module:Class")


def load_named(name: str, ours: Mapping[str, Any], kind: str, where: str) -> Any:
    """Load the object of a name, with the arguments of :func:`require_named`.

    Raises:
        JobError: the name is unknown, or the object cannot be imported.
    """
    require_named((name,), ours, kind, where)
    if name in ours:
        return ours[name]
    return imported(name, where) if ":" in name else extensions(kind)[name].load()
