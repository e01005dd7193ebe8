"""Lightning, under the name by which the script imports it: ``lightning.pytorch`` or ``pytorch_lightning``."""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from unisono.integrations.kit import require

_NAMES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
"""Packages by what they are installed as: two copies of one code, whose classes are not each other's."""


def _package() -> str:
    """The one that the script uses; if that cannot be told, the one that is installed."""
    used = [package for package, name in _NAMES.items() if name in sys.modules]
    candidates = used or [package for package in _NAMES if find_spec(package) is not None] or list(_NAMES)
    require("lightning", [candidates[0].replace("_", "-")])
    return candidates[0]


package = _package()
pl: Any = import_module(_NAMES[package])


def part(name: str) -> Any:
    """A module of Lightning by its name below ``lightning.pytorch``."""
    return import_module(f"{_NAMES[package]}.{name}")


def fabric(name: str) -> Any:
    """A module of Fabric, on which this Lightning stands."""
    root = "lightning.fabric" if package == "lightning" else "lightning_fabric"
    return import_module(f"{root}.{name}")


# What several modules here need of it.

call = part("trainer.call")
is_overridden = part("utilities.model_helpers").is_overridden
extract_batch_size = part("utilities.data").extract_batch_size
Leaves: Any = part("utilities.exceptions")._TunerExitException
"""Raised where a training has nothing left to do: Lightning's loops end as they do otherwise."""
