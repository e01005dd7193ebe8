"""Unisono: exact data-parallel training on PyTorch.

The names below are all there is to import. They load on first use, so that ``import unisono`` costs nothing and the
command line starts without torch.
"""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import unisono.integrations.accelerate as accelerate
    import unisono.integrations.keras as keras
    import unisono.integrations.lightning as lightning
    import unisono.integrations.torchmetrics as torchmetrics
    import unisono.integrations.transformers as transformers
    import unisono.launch.notebook as notebook
    import unisono.launch.ray as ray
    from unisono.adapt.batch_policies import (
        AdaScale,
        BatchSizeSchedule,
        EdgeOfStability,
        LinearScaling,
        NoiseScalePolicy,
    )
    from unisono.adapt.communication_policies import StragglerPolicy, StrategyPolicy, TopologyPolicy
    from unisono.adapt.layout_policies import GoodputPolicy, ScalingPolicy, SpotPolicy
    from unisono.adapt.norms import Monitoring
    from unisono.adapt.view import Policy, View
    from unisono.data.arrow_stream import ArrowStream
    from unisono.launch.engine import Engine
    from unisono.loggers.by_name import CSVLogger, MLflowLogger, TensorBoardLogger, WandbLogger
    from unisono.loggers.logger import Logger
    from unisono.plan.order import BlockShuffle
    from unisono.settings.table import Arithmetic, Checkpoints, Communication, Faults, Records
    from unisono.sync import AllReduce, DiLoCo, LocalSGD, Strategy
    from unisono.train.model.shared_work import whole_matrix
    from unisono.train.model.tensors import digest
    from unisono.train.run import Run
    from unisono.train.start import init
    from unisono.train.state.checkpoints import load
    from unisono.train.step.loss import BackwardDone, Weighted
    from unisono.train.step.part import Part
    from unisono.train.step.step import Step
    from unisono.train.step.word import Field
    from unisono.train.trainer import Callback, Trainer

__version__ = "0.1.0"

__all__ = [
    "AdaScale",
    "AllReduce",
    "Arithmetic",
    "ArrowStream",
    "BackwardDone",
    "BatchSizeSchedule",
    "BlockShuffle",
    "CSVLogger",
    "Callback",
    "Checkpoints",
    "Communication",
    "DiLoCo",
    "EdgeOfStability",
    "Engine",
    "Faults",
    "Field",
    "GoodputPolicy",
    "LinearScaling",
    "LocalSGD",
    "Logger",
    "MLflowLogger",
    "Monitoring",
    "NoiseScalePolicy",
    "Part",
    "Policy",
    "Records",
    "Run",
    "ScalingPolicy",
    "SpotPolicy",
    "Step",
    "StragglerPolicy",
    "Strategy",
    "StrategyPolicy",
    "TensorBoardLogger",
    "TopologyPolicy",
    "Trainer",
    "View",
    "WandbLogger",
    "Weighted",
    "__version__",
    "accelerate",
    "digest",
    "init",
    "keras",
    "lightning",
    "load",
    "notebook",
    "ray",
    "torchmetrics",
    "transformers",
    "whole_matrix",
]

_HOMES = {
    "adapt.batch_policies": ("AdaScale", "BatchSizeSchedule", "EdgeOfStability", "LinearScaling", "NoiseScalePolicy"),
    "adapt.communication_policies": ("StragglerPolicy", "StrategyPolicy", "TopologyPolicy"),
    "adapt.layout_policies": ("GoodputPolicy", "ScalingPolicy", "SpotPolicy"),
    "adapt.norms": ("Monitoring",),
    "adapt.view": ("Policy", "View"),
    "data.arrow_stream": ("ArrowStream",),
    "launch.engine": ("Engine",),
    "loggers.by_name": ("CSVLogger", "MLflowLogger", "TensorBoardLogger", "WandbLogger"),
    "loggers.logger": ("Logger",),
    "plan.order": ("BlockShuffle",),
    "settings.table": ("Arithmetic", "Checkpoints", "Communication", "Faults", "Records"),
    "sync": ("AllReduce", "DiLoCo", "LocalSGD", "Strategy"),
    "train.model.shared_work": ("whole_matrix",),
    "train.model.tensors": ("digest",),
    "train.run": ("Run",),
    "train.start": ("init",),
    "train.state.checkpoints": ("load",),
    "train.step.loss": ("BackwardDone", "Weighted"),
    "train.step.part": ("Part",),
    "train.step.step": ("Step",),
    "train.step.word": ("Field",),
    "train.trainer": ("Callback", "Trainer"),
}
"""Where the names are, by module."""

_GUESTS = {
    "integrations": ("accelerate", "keras", "lightning", "torchmetrics", "transformers"),
    "launch": ("notebook", "ray"),
}
"""Modules that load what few scripts need, by the room that they are in."""

_MOVED = {"KFAC", "ModelAveraging", "PairAveraging", "ParameterServer"}


def __getattr__(name: str) -> Any:
    if name in _MOVED:
        raise AttributeError(f"unisono.{name} is unisono_lab.{name} now: import unisono_lab, of the same installation")
    for room, guests in _GUESTS.items():
        if name in guests:
            return import_module(f"unisono.{room}.{name}")
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"unisono.{module}"), name)
    raise AttributeError(f"module 'unisono' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__


class _GuestFinder:
    """Finds ``unisono.keras`` and its like where they are imported as modules: ``from unisono.keras import Model``."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The specification of a guest's module; None for all others."""
        package, _, guest = name.partition(".")
        is_guest = package == __name__ and any(guest in guests for guests in _GUESTS.values())
        return ModuleSpec(name, _GuestFinder) if is_guest else None  # type: ignore[arg-type]  # it has what is called

    @staticmethod
    def create_module(spec: ModuleSpec) -> Any:
        """The module, which has a name of its own as well."""
        module = __getattr__(spec.name.rpartition(".")[2])
        spec.loader_state = module.__spec__
        return module

    @staticmethod
    def exec_module(module: Any) -> None:
        """Give the module, which was run before, its own specification back."""
        module.__spec__ = module.__spec__.loader_state


sys.meta_path.append(_GuestFinder)
