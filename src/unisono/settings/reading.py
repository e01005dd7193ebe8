"""From what a script, the command line and the environment say to settings, and back to variables and words."""

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar, get_args, get_origin

from unisono.arguments import require_kind, require_known
from unisono.errors import JobError
from unisono.received import short
from unisono.settings.rows import NamedRow, groups_of, settings_of
from unisono.settings.table import Settings
from unisono.settings.variables import Variables

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

GONE = {"shard_optimizer": "every worker makes the whole update: leave it out"}
"""Arguments of :func:`unisono.init` that there were once, and their variables, each with what to do now."""


def require_none_gone(said: Container[str]) -> None:
    """Refuse arguments, or variables, that there are no more.

    Raises:
        JobError: there is one; names it, and says what to do.
    """
    for argument, now in GONE.items():
        for name in (argument, f"UNISONO_{argument.upper()}"):
            if name in said:
                raise JobError(f"{name} is gone: {now}")


def require_names_of_today(said: Mapping[str, Any]) -> None:
    """Refuse arguments that there are no more, or that stand in a group now.

    Raises:
        JobError: there is one; names it, and says what to say instead.
    """
    require_none_gone(said)
    moved = {setting.name: path for path, setting in TABLE.items() if path.partition(".")[0] in OF_SCRIPTS} | RENAMED
    for name in said:
        if name in moved and name not in TABLE:
            group, _, own = moved[name].partition(".")
            raise JobError(
                f"{name}={short(said[name])}: it stands in a group now. Say {group}={{{own!r}: {short(said[name])}}}, "
                f"or {group}=unisono.{GROUPS[group].__name__}({own}={short(said[name])})"
            )


def with_groups(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which says of arguments that it has no more where they are now, and of others which is meant."""

    @wraps(function)
    def called(*args: P.args, **said: P.kwargs) -> R:
        require_names_of_today(said)
        require_known(function, said)
        return function(*args, **said)

    return called


def settings_from(said: Mapping[str, Any], environ: Mapping[str, str], kinds: Mapping[str, Any]) -> Settings:
    """The settings of a run: what the script says goes before the environment, the environment before the default.

    Args:
        said: arguments of :func:`unisono.init` by name; None, and an empty sequence, say nothing.
        environ: the variables of the environment.
        kinds: the types, by path, of settings of which the table says that they may be anything.

    Raises:
        JobError: one is unknown, of another type or out of range; names it.
    """
    variables = Variables(environ)
    own = {name: value for name, value in said.items() if name not in GROUPS and not _is_silent(value)}
    groups: dict[str, Any] = {
        name: kind(**_with_variables(kind, _given(name, kind, said.get(name)), variables))
        for name, kind in GROUPS.items()
    }
    settings = Settings(**_with_variables(Settings, own, variables), **groups)
    for path, value in said_in(settings).items():
        require_kind(path, value, kinds.get(path, Any))
    return settings


def with_defaults(said: Mapping[str, Any], defaults: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """What is said, and of further defaults those of which neither it nor a variable says anything.

    Args:
        said: arguments of :func:`unisono.init` by name.
        defaults: the defaults by path.
        environ: the variables of the environment.
    """
    result = dict(said)
    for path, value in defaults.items():
        group, _, name = path.rpartition(".")
        if environ.get(TABLE[path].row.variable):
            continue
        if group:
            result[group] = {name: value, **_given(group, GROUPS[group], said.get(group))}
        else:
            result.setdefault(name, value)
    return result


def _is_silent(value: Any) -> bool:
    """Whether a value says nothing: None, and an empty tuple."""
    return value is None or (isinstance(value, tuple) and not value)


def _given(name: str, kind: type[Any], value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if isinstance(value, kind):
        return dict(value.values)
    if isinstance(value, Mapping) and all(isinstance(each, str) for each in value):
        return dict(kind(**value).values)
    raise JobError(f"{name}={short(value)}: needs a unisono.{kind.__name__} or a dict, or None")


def _with_variables(kind: Any, said: dict[str, Any], variables: Variables) -> dict[str, Any]:
    """What is said, and of the rest what variables say; names come from both."""
    values = dict(said)
    for setting in settings_of(kind):
        if setting.row.variable not in variables:
            continue
        value = _read(setting, variables)  # also of one that says nothing new: a person has mistyped it
        if setting.plain is tuple:
            values[setting.name] = (*said.get(setting.name, ()), *value)
        elif setting.name not in said:
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
    """Settings that a command line says.

    Args:
        values: the values by path; None, and an empty sequence, say nothing.

    Raises:
        JobError: one is of another type or out of range; names its option.
    """
    said = {path: value for path, value in values.items() if not _is_silent(value)}
    for path, value in said.items():
        TABLE[path].require_in_range(f"{TABLE[path].row.option or path} {text_of(value)}", value)
    own = {path: value for path, value in said.items() if "." not in path}
    groups: dict[str, Any] = {
        name: kind(**{path.partition(".")[2]: value for path, value in said.items() if path.startswith(f"{name}.")})
        for name, kind in GROUPS.items()
    }
    return Settings(**own, **groups)


def said_in(settings: Settings) -> dict[str, Any]:
    """What is said in settings, by path; the inverse of :func:`settings_by_path`."""
    values = {name: value for name, value in settings.values.items() if name not in GROUPS}
    for name in GROUPS:
        values |= {f"{name}.{own}": value for own, value in getattr(settings, name).values.items()}
    return {path: values[path] for path in TABLE if path in values}


def variables_of(settings: Settings) -> dict[str, str]:
    """What is said in settings to workers, as variables of the environment."""
    said = {TABLE[path].row.variable: value for path, value in said_in(settings).items() if path not in OF_LAUNCH}
    return {variable: text_of(value) for variable, value in said.items() if variable}


def words_of(settings: Settings, without: Collection[str] = ()) -> list[str]:
    """What is said in settings, as options of the command line.

    Args:
        settings: the settings.
        without: the paths, or groups, that are left out.
    """
    words = []
    for path, value in said_in(settings).items():
        option = TABLE[path].row.option
        if option and path not in without and path.partition(".")[0] not in without:
            on, _, off = option.partition("/")
            words += [on if value else off] if TABLE[path].plain is bool else [on, text_of(value)]
    return words


def text_of(value: Any) -> str:
    """A value as options and variables have it."""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float):
        return f"{value:g}"
    return ",".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)
