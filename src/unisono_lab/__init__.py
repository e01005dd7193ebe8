"""The lab: studies, simulations, replays, timelines, the page, faults, curvature, strategies.

It uses the package ``unisono``, which does not import it: ``unisono`` finds its commands and strategies by entry
points. The names below are loaded on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono_lab.faults.faults import Faults
    from unisono_lab.second_order.kfac import KFAC
    from unisono_lab.strategies.averaging import ModelAveraging, PairAveraging
    from unisono_lab.strategies.parameter_server import ParameterServer

__all__ = ["Faults", "KFAC", "ModelAveraging", "PairAveraging", "ParameterServer"]

_HOMES = {
    "Faults": "unisono_lab.faults.faults",
    "KFAC": "unisono_lab.second_order.kfac",
    "ModelAveraging": "unisono_lab.strategies.averaging",
    "PairAveraging": "unisono_lab.strategies.averaging",
    "ParameterServer": "unisono_lab.strategies.parameter_server",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'unisono_lab' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
