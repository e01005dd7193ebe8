"""Settings from a script, the command line and the environment, and back to variables and options."""

import math
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar, get_args, get_origin

from unisono.arguments import require_parameters, require_type
from unisono.errors import JobError
from unisono.received import LONGEST_SHOWN, decimal_number, short, whole_number
from unisono.settings.groups import NamedRow, groups_of, settings_of
from unisono.settings.table import OF_LAUNCHERS, Settings

MOST = 10**18 - 1
"""The limit of a count without a smaller one: 64 bits hold it, and no job takes so many steps."""

LAST_PORT = 2**16 - 1


class Variables:
    """Variables of the environment, with errors that name them. An empty variable counts as not set."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._set = {name: value for name, value in environ.items() if value}

    def get(self, name: str) -> str | None:
        """The value of a variable; None if it is not set."""
        return self._set.get(name)

    def __contains__(self, name: object) -> bool:
        return name in self._set

    def describe(self, *names: str) -> str:
        """Describe those of these variables that are set, with their values, for a message."""
        words = [f"{name}={self._set[name][:LONGEST_SHOWN]}" for name in names if name in self._set]
        return f"{' and '.join(words)} {'are' if len(words) > 1 else 'is'}"

    def text(self, name: str, because: str) -> str:
        """The value of a variable that must be set, for the reason in ``because``."""
        if name not in self._set:
            raise JobError(f"{name} is not set in the environment, but {because}")
        return self._set[name]

    def count(self, name: str, because: str, least: int = 0, most: int = MOST) -> int:
        """A variable that must be a whole number from ``least`` to ``most``."""
        number = whole_number(self.text(name, because))
        if number is None or not least <= number <= most:
            limit = "" if most == MOST else f" and at most {most}"
            raise self.refusal(name, f"needs a whole number of at least {least}{limit}")
        return number

    def number(
        self, name: str, least: float = -math.inf, most: float = math.inf, *, whole: bool = False
    ) -> float | None:
        """A number from ``least`` to ``most``; None if the variable is not set."""
        if (value := self.get(name)) is None:
            return None
        number = whole_number(value) if whole else decimal_number(value)
        if number is None or not least <= number <= most:
            limits = "" if math.inf in (-least, most) else f" of at least {least:g} and at most {most:g}"
            raise self.refusal(name, f"needs a {'whole ' if whole else ''}number{limits}")
        return number

    def switch(self, name: str) -> bool | None:
        """Whether a switch is on; None if the variable is not set."""
        if (value := self.get(name)) is None:
            return None
        if value not in ("0", "1"):
            raise self.refusal(name, "use 0 or 1")
        return value == "1"

    def refusal(self, name: str, requirement: str) -> JobError:
        """The error that names a variable, its value and the requirement."""
        return JobError(f"{name}={short(self._set[name])} in the environment: {requirement}")

    def port(self, name: str, because: str) -> int:
        """A variable that must be a TCP port."""
        return self.count(name, because, least=1, most=LAST_PORT)

    def rank(self, name: str, size_name: str, because: str) -> tuple[int, int]:
        """A rank, and the number of workers."""
        size = self.count(size_name, because, least=1)
        rank = self.count(name, because)
        if rank >= size:
            raise JobError(
                f"{name}={rank} and {size_name}={size} in the environment contradict each other: "
                f"the ranks of {size} workers are 0 to {size - 1}"
            )
        return rank, size


# Settings from a script, the command line and the environment, and back.

P = ParamSpec("P")
R = TypeVar("R")

GROUPS = groups_of(Settings)
TABLE: Mapping[str, NamedRow] = {
    setting.path: setting for kind in (Settings, *GROUPS.values()) for setting in settings_of(kind)
}
"""All settings, by their paths."""

OF_SCRIPTS = [name for name in GROUPS if name not in ("launch", "special")]
"""The groups that are arguments of :func:`unisono.init`."""

OF_LAUNCH = [path for path in TABLE if path.startswith("launch.")]
"""The settings that workers need not know."""

RENAMED = {"checkpoint_every": "checkpoints.every", "failure_timeout_s": "faults.timeout_s"}
"""Arguments of :func:`unisono.init` that have another name in their group."""

REMOVED = {"shard_optimizer": "every worker makes the whole update: leave it out"}
"""Removed arguments of :func:`unisono.init`, and their variables, each with advice."""


def require_none_removed(names: Container[str]) -> None:
    """Refuse arguments, or variables, that were removed.

    Raises:
        JobError: there is such a name; the message says what to do.
    """
    for argument, advice in REMOVED.items():
        for name in (argument, f"UNISONO_{argument.upper()}"):
            if name in names:
                raise JobError(f"{name} was removed: {advice}")


def require_current_names(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that were removed, or that were moved into a group.

    Raises:
        JobError: there is such an argument; the message says what to write instead.
    """
    require_none_removed(arguments)
    moved = {setting.name: path for path, setting in TABLE.items() if path.partition(".")[0] in OF_SCRIPTS} | RENAMED
    for name in arguments:
        if name in moved and name not in TABLE:
            (group, _, own), value = moved[name].partition("."), short(arguments[name])
            raise JobError(
                f"{name}={value}: the setting is in a group now. Write {group}={{{own!r}: {value}}}, "
                f"or {group}=unisono.{GROUPS[group].__name__}({own}={value})"
            )


def with_groups(function: Callable[P, R]) -> Callable[P, R]:
    """The function, with errors that say where moved arguments are now, and which name an unknown one resembles."""

    @wraps(function)
    def called(*args: P.args, **arguments: P.kwargs) -> R:
        require_current_names(arguments)
        require_parameters(function, arguments)
        return function(*args, **arguments)

    return called


def settings_from(arguments: Mapping[str, Any], environ: Mapping[str, str], kinds: Mapping[str, Any]) -> Settings:
    """The settings of a run: the script takes precedence over the environment, and the environment over the default.

    Args:
        arguments: arguments of :func:`unisono.init` by name; None and an empty sequence count as not given.
        environ: the variables of the environment.
        kinds: the types, by path, of settings whose type is ``Any`` in the table.

    Raises:
        JobError: a setting is unknown, of another type or out of range; the message names it.
    """
    variables = Variables(environ)
    own = {name: value for name, value in arguments.items() if name not in GROUPS and not _is_unset(value)}
    groups: dict[str, Any] = {
        name: kind(**_with_variables(kind, _given(name, kind, arguments.get(name)), variables))
        for name, kind in GROUPS.items()
    }
    settings = Settings(**_with_variables(Settings, own, variables), **groups)
    for path, value in specified_in(settings).items():
        require_type(path, value, kinds.get(path, Any))
    return settings


def with_defaults(
    arguments: Mapping[str, Any], defaults: Mapping[str, Any], environ: Mapping[str, str]
) -> dict[str, Any]:
    """The arguments, with further defaults for settings that neither an argument nor a variable sets.

    Args:
        arguments: arguments of :func:`unisono.init` by name.
        defaults: the defaults by path.
        environ: the variables of the environment.
    """
    result = dict(arguments)
    for path, value in defaults.items():
        group, _, name = path.rpartition(".")
        if environ.get(TABLE[path].row.variable):
            continue
        if group:
            result[group] = {name: value, **_given(group, GROUPS[group], arguments.get(group))}
        else:
            result.setdefault(name, value)
    return result


def _is_unset(value: Any) -> bool:
    """Whether a value counts as not given: None, or an empty tuple."""
    return value is None or (isinstance(value, tuple) and not value)


def _given(name: str, kind: type[Any], value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if isinstance(value, kind):
        return dict(value.values)
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return dict(kind(**value).values)
    raise JobError(f"{name}={short(value)}: needs a unisono.{kind.__name__} or a dict, or None")


def _with_variables(kind: Any, arguments: dict[str, Any], variables: Variables) -> dict[str, Any]:
    """The arguments, and the rest from variables; sequences of names are joined."""
    values = dict(arguments)
    for setting in settings_of(kind):
        if setting.row.variable not in variables:
            continue
        value = _read(setting, variables)  # even if the argument takes precedence: the value may be mistyped
        if setting.plain is tuple:
            values[setting.name] = (*arguments.get(setting.name, ()), *value)
        elif setting.name not in arguments:
            values[setting.name] = value
    return values


def _read(setting: NamedRow, variables: Variables) -> Any:
    """The value of a variable that is set."""
    name, kind = setting.row.variable, setting.plain
    text = variables.get(name) or ""
    if kind is tuple:
        return names_in(text)
    if kind is bool:
        return variables.switch(name)
    if kind in (int, float):
        value = variables.number(name, whole=kind is int)
        setting.require_in_range(f"{name}={short(text)} in the environment", value)
        return value
    if get_origin(kind) is Literal and text not in get_args(kind):
        raise variables.refusal(name, f"use {', '.join(get_args(kind))}")
    return text


def names_in(text: str) -> tuple[str, ...]:
    """The names in a text, with commas between them."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def settings_by_path(values: Mapping[str, Any]) -> Settings:
    """The settings of a command line.

    Args:
        values: the values by path; None and an empty sequence count as not given.

    Raises:
        JobError: a value is of another type or out of range; the message names its option.
    """
    values = {path: value for path, value in values.items() if not _is_unset(value)}
    for path, value in values.items():
        TABLE[path].require_in_range(f"{TABLE[path].row.option or path} {text_of(value)}", value)
    own = {path: value for path, value in values.items() if "." not in path}
    groups: dict[str, Any] = {
        name: kind(**{path.partition(".")[2]: value for path, value in values.items() if path.startswith(f"{name}.")})
        for name, kind in GROUPS.items()
    }
    return Settings(**own, **groups)


def specified_in(settings: Settings) -> dict[str, Any]:
    """The specified settings, by path; the inverse of :func:`settings_by_path`."""
    values = {name: value for name, value in settings.values.items() if name not in GROUPS}
    for name in GROUPS:
        values |= {f"{name}.{own}": value for own, value in getattr(settings, name).values.items()}
    return {path: values[path] for path in TABLE if path in values}


def variables_of(settings: Settings) -> dict[str, str]:
    """The specified settings as variables of the environment, for workers."""
    rows = [(TABLE[path].row, value) for path, value in specified_in(settings).items() if path not in OF_LAUNCH]
    return {row.variable: text_of(value) for row, value in rows if row.variable}


def words_of(settings: Settings, without: Collection[str] = ()) -> list[str]:
    """The specified settings as options of the command line.

    Args:
        settings: the settings.
        without: the paths, or groups, that are left out.
    """
    words = []
    for path, value in specified_in(settings).items():
        option = TABLE[path].row.option
        if option and path not in without and path.partition(".")[0] not in without:
            on, _, off = option.partition("/")
            words += [on if value else off] if TABLE[path].plain is bool else [on, text_of(value)]
    return words


def text_of(value: Any) -> str:
    """A value as the text of an option or a variable."""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float):
        return f"{value:g}"
    return ",".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)


# The variables of Unisono, and the nearest name for an unknown one.

OURS = "UNISONO_"
KNOWN = frozenset({setting.row.variable for setting in TABLE.values() if setting.row.variable} | OF_LAUNCHERS.keys())


def unknown_variables(names: Iterable[str]) -> Iterator[str]:
    """A sentence for each variable that begins with ``UNISONO_`` and is unknown.

    Args:
        names: the names of all variables of the environment.
    """
    for name in sorted(name for name in names if name.startswith(OURS) and name not in KNOWN):
        near = get_close_matches(name.removeprefix(OURS), [known.removeprefix(OURS) for known in KNOWN], 1, cutoff=0.7)
        meant = f": did you mean {OURS}{near[0]}?" if near else "; docs/guide/settings.md lists all variables"
        yield f"{name} is set in the environment, but Unisono has no such variable{meant}"
