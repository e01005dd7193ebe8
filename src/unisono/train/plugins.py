"""What is added to a run from outside of its script: functions that are named in the environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from unisono.errors import JobError

if TYPE_CHECKING:
    from unisono.train.run import Run

Plugin = Callable[["Run"], Any]
"""Called with the run when it has begun: before the script gets it."""


def load_plugins(names: Sequence[str]) -> list[Plugin]:
    """Import plugins.

    Args:
        names: ``module:function`` each.

    Raises:
        JobError: one cannot be imported; names it and says why.
    """
    return [_load(name) for name in names]


def _load(name: str) -> Plugin:
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise JobError(f"the plugin {name!r} in UNISONO_PLUGINS: write module:function")
    try:
        found = getattr(import_module(module), function)
    except (ImportError, TypeError, ValueError) as error:  # the latter two of names such as ".a"
        raise JobError(f"the plugin {name} in UNISONO_PLUGINS cannot be imported: {error}") from error
    except AttributeError as error:
        raise JobError(f"the plugin {name} in UNISONO_PLUGINS: {module} has no {function}") from error
    if not callable(found):
        raise JobError(f"the plugin {name} in UNISONO_PLUGINS is no function")
    plugin: Plugin = found
    return plugin
