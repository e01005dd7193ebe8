"""Unisono: exact data-parallel training on PyTorch.

The names below are all there is to import. They load on first use, so that ``import unisono`` costs nothing and the
command line starts without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.train.digest import digest
    from unisono.train.load import load
    from unisono.train.run import Run
    from unisono.train.start import init
    from unisono.train.step import Step
    from unisono.train.trainer import Callback, Trainer

__version__ = "0.1.0"

__all__ = ["Callback", "Run", "Step", "Trainer", "__version__", "digest", "init", "load"]

_HOMES = {
    "Run": "unisono.train.run",
    "Step": "unisono.train.step",
    "Trainer": "unisono.train.trainer",
    "Callback": "unisono.train.trainer",
    "digest": "unisono.train.digest",
    "init": "unisono.train.start",
    "load": "unisono.train.load",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'unisono' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
