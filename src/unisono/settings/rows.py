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

from unisono.arguments import require_kind, require_known
from unisono.errors import JobError
from unisono.received import short

SHOWN = 2**53
"""Limits from which on nobody thinks of them."""


@dataclass(frozen=True, slots=True)
class Row:
    """What is said of a setting, beside its name, type and default. It stands in the annotation, the meaning below it.

    Attributes:
        variable: the variable of the environment; empty if there is none.
        option: the option of the command line, ``--pin/--no-pin`` for a switch; empty if there is none.
        panel: the group in the command line's help; empty for the first one.
        metavar: the form of the option's value, where the type does not say it.
        plain: the type of the value of option and variable, where a script may give more than text says.
        least: the smallest number that is allowed.
        most: the largest number that is allowed.
        page: the place in the guide that has more.
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
        row: what else is said of it.
        of: the class that has it.
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
        """The meaning: the sentences below the field in the source; empty where no source is at hand."""
        below = [meanings(each.__module__).get((each.__name__, self.name), "") for each in self.of.__mro__]
        return next(filter(None, below), "")

    def checked(self, value: Any) -> Any:
        """A value as it is kept: any number for a decimal one is a float, which JSON has.

        Raises:
            JobError: it is one; names the setting, and says what is allowed.
        """
        require_kind(self.path, value, self.kind)
        self.require_in_range(f"{self.path}={short(value)}", value)
        return float(value) if self.plain is float and value is not None else value

    def require_in_range(self, words: str, value: Any) -> None:
        """Refuse a number that is too small or too large.

        Args:
            words: the setting and its value, as the person has said them.
            value: the value.

        Raises:
            JobError: it is; says what is allowed.
        """
        least, most = self.row.least, self.row.most
        if not isinstance(value, int | float) or (least is None and most is None):
            return
        if (least is None or value >= least) and (most is None or value <= most):
            return
        said = {which: limit for which, limit in {"least": least, "most": most}.items() if limit is not None}
        limits = [f"at {which} {limit:.15g}" for which, limit in said.items() if abs(limit) < SHOWN] or ["64 bits"]
        kind = "a whole number" if self.plain is int else "a number"
        raise JobError(f"{words}: needs {kind} of {' and '.join(limits)}")


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


class Group:
    """Settings that belong together. What was said of them is known, so that nobody takes a default for it.

    Attributes:
        said: the names of the settings that were said.
        prefix: the words before a name in messages.
    """

    said: frozenset[str]
    prefix: ClassVar[str] = ""

    @property
    def values(self) -> dict[str, Any]:
        """What was said, by name."""
        return {name: getattr(self, name) for name in sorted(self.said)}


G = TypeVar("G")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def group(prefix: str) -> Callable[[type[G]], type[G]]:
    """Make a class of fields, which are rows, a frozen value that refuses unknown names, other types and ranges.

    Args:
        prefix: what stands before a name in messages.
    """

    def decorated(cls: type[G]) -> type[G]:
        made: Any = dataclass(frozen=True, kw_only=True)(cls)
        made.prefix, begun = prefix, made.__init__

        @wraps(begun)
        def begin(self: Any, **said: Any) -> None:
            require_known(made, said, prefix)
            for setting in settings_of(made):
                if setting.name in said:
                    said[setting.name] = setting.checked(said[setting.name])
            begun(self, **said)
            object.__setattr__(self, "said", frozenset(said))

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
    """The sentences below the fields of a module's classes, by class and field; none where no source is at hand."""
    found: dict[tuple[str, str], str] = {}
    with suppress(OSError, TypeError):
        classes = [each for each in ast.parse(getsource(sys.modules[module])).body if isinstance(each, ast.ClassDef)]
        for made in classes:
            for pair in pairwise(made.body):
                match pair:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str() as text)):
                        found[made.name, name] = " ".join(text.split())
    return found


def groups_of(kind: type[Any]) -> dict[str, Any]:
    """The groups in a group, by name."""
    return {
        field.name: field.type
        for field in fields(kind)
        if isinstance(field.type, type) and issubclass(field.type, Group)
    }
