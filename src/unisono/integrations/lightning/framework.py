"""Lightning, under the name by which the script imports it: ``lightning.pytorch`` or ``pytorch_lightning``."""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from unisono.integrations.packages import require

_NAMES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
"""Packages by what they are installed as: two copies of one code, whose classes are not each other's."""


def _package() -> str:
    """The one that the script uses; if that cannot be told, the one that is installed."""
    used = [one for one, name in _NAMES.items() if name in sys.modules]
    there = used or [one for one in _NAMES if find_spec(one) is not None] or list(_NAMES)
    require("lightning", [there[0].replace("_", "-")])
    return there[0]


package = _package()
pl: Any = import_module(_NAMES[package])


def part(name: str) -> Any:
    """A module of Lightning by its name below ``lightning.pytorch``."""
    return import_module(f"{_NAMES[package]}.{name}")


def fabric(name: str) -> Any:
    """A module of Fabric, on which this Lightning stands."""
    root = "lightning.fabric" if package == "lightning" else "lightning_fabric"
    return import_module(f"{root}.{name}")
