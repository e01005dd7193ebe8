"""A row of the table of settings, and the classes whose fields are rows."""

import ast
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache, wraps
from inspect import getsource
from itertools import pairwise
from types import NoneType, UnionType
from typing import Any, ClassVar, TypeVar, Union, dataclass_transform, get_args, get_origin

from unisono.arguments import require_parameters, require_type
from unisono.errors import JobError
from unisono.received import short

SHOWN = 2**53
"""The limits from this size on, which messages name only if a value lies beyond."""


@dataclass(frozen=True, slots=True)
class Row:
    """The properties of a setting, besides its name, type and default. The annotation of the field holds them.

    Attributes:
        variable: the variable of the environment; empty if there is none.
        option: the option of the command line, ``--pin/--no-pin`` for a switch; empty if there is none.
        panel: the group in the command line's help; empty for the first one.
        metavar: the form of the option's value, if the type does not show it.
        plain: the type of the value of option and variable, if a script may pass values of other types, too.
        least: the smallest number that is allowed.
        most: the largest number that is allowed.
        page: the section of the guide that describes the setting.
    """

    variable: str = ""
    option: str = ""
    panel: str = ""
    metavar: str | None = None
    plain: Any = None
    least: float | None = None
    most: float | None = None
    page: str = ""


@dataclass(frozen=True, slots=True)
class NamedRow:
    """A setting of the table.

    Attributes:
        path: the group and the name, ``checkpoints.every``; for a setting without a group its name alone.
        kind: the type that a script may give.
        default: the default.
        row: the other properties of the setting.
        of: the class of which the setting is a field.
    """

    path: str
    kind: Any
    default: Any
    row: Row
    of: type[Any]

    @property
    def name(self) -> str:
        """The name in its group."""
        return self.path.rpartition(".")[2]

    @property
    def plain(self) -> Any:
        """The type of the value of its option and its variable: one type, a ``Literal``, or ``tuple`` for names."""
        if self.row.plain is not None:
            return self.row.plain
        return next(kind for kind in _alternatives(self.kind) if kind is not NoneType)

    @property
    def text(self) -> str:
        """The meaning: the sentences below the field in the source; empty if there is no source."""
        below = [meanings(kind.__module__).get((kind.__name__, self.name), "") for kind in self.of.__mro__]
        return next(filter(None, below), "")

    def checked(self, value: Any) -> Any:
        """Check a value; returns it as it is kept: any number for a decimal setting becomes a float, which JSON has.

        Raises:
            JobError: the value is of another type, or out of range; the message names the setting and the range.
        """
        require_type(self.path, value, self.kind)
        self.require_in_range(f"{self.path}={short(value)}", value)
        return float(value) if self.plain is float and value is not None else value

    def require_in_range(self, words: str, value: Any) -> None:
        """Refuse a number that is too small or too large.

        Args:
            words: the setting and its value as the user wrote them, for the message.
            value: the value.

        Raises:
            JobError: the number is too small or too large; the message says what is allowed.
        """
        least, most = self.row.least, self.row.most
        if not isinstance(value, int | float) or (least is None and most is None):
            return
        if (least is None or value >= least) and (most is None or value <= most):
            return
        bounds = {which: limit for which, limit in {"least": least, "most": most}.items() if limit is not None}
        passed = least if most is None or value < most else most
        limits = [
            f"at {which} {limit if isinstance(limit, int) else f'{limit:.15g}'}"
            for which, limit in bounds.items()
            if abs(limit) < SHOWN or limit is passed
        ]
        kind = "a whole number" if self.plain is int else "a number"
        raise JobError(f"{words}: needs {kind} of {' and '.join(limits)}")


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


class Group:
    """Settings that belong together. It knows which of them were specified, and which have their default.

    Attributes:
        specified: the names of the settings that were specified.
        prefix: the text before a name in messages.
    """

    specified: frozenset[str]
    prefix: ClassVar[str] = ""

    @property
    def values(self) -> dict[str, Any]:
        """The specified settings, by name."""
        return {name: getattr(self, name) for name in sorted(self.specified)}


G = TypeVar("G")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def group(prefix: str) -> Callable[[type[G]], type[G]]:
    """Make a class of fields, which are rows, a frozen value that refuses unknown names, other types and ranges.

    Args:
        prefix: the text before a name in messages.
    """

    def decorated(cls: type[G]) -> type[G]:
        made: Any = dataclass(frozen=True, kw_only=True)(cls)
        made.prefix, begun = prefix, made.__init__

        @wraps(begun)
        def begin(self: Any, **settings: Any) -> None:
            require_parameters(made, settings, prefix)
            for setting in settings_of(made):
                if setting.name in settings:
                    settings[setting.name] = setting.checked(settings[setting.name])
            begun(self, **settings)
            object.__setattr__(self, "specified", frozenset(settings))

        made.__init__ = begin
        return made  # type: ignore[no-any-return]

    return decorated


@cache
def settings_of(kind: Any) -> tuple[NamedRow, ...]:
    """The settings of a group that are not in a group of their own."""
    return tuple(
        NamedRow(f"{kind.prefix}{field.name}", get_args(field.type)[0], field.default, row, kind)
        for field in fields(kind)
        for row in getattr(field.type, "__metadata__", ())
    )


@cache
def meanings(module: str) -> dict[tuple[str, str], str]:
    """The sentences below the fields of a module's classes, by class and field; empty if there is no source."""
    texts: dict[tuple[str, str], str] = {}
    with suppress(OSError, TypeError):
        classes = [node for node in ast.parse(getsource(sys.modules[module])).body if isinstance(node, ast.ClassDef)]
        for made in classes:
            for pair in pairwise(made.body):
                match pair:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str() as text)):
                        texts[made.name, name] = " ".join(text.split())
    return texts


def groups_of(kind: type[Any]) -> dict[str, Any]:
    """The groups in a group, by name."""
    return {
        field.name: field.type
        for field in fields(kind)
        if isinstance(field.type, type) and issubclass(field.type, Group)
    }
