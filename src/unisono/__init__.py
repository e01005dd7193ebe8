"""Unisono: exact data-parallel training on PyTorch.

The names below are all there is to import. They load on first use, so that ``import unisono`` costs nothing and the
command line starts without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import unisono.integrations.accelerate as accelerate
    import unisono.integrations.keras as keras
    import unisono.integrations.lightning as lightning
    import unisono.integrations.torchmetrics as torchmetrics
    import unisono.integrations.transformers as transformers
    import unisono.launch.notebook as notebook
    import unisono.launch.ray as ray
    from unisono.adapt.ada_scale import AdaScale, EdgeOfStability, LinearScaling
    from unisono.adapt.batch_size_policies import BatchSizeSchedule, NoiseScalePolicy
    from unisono.adapt.communication_policies import StragglerPolicy, StrategyPolicy, TopologyPolicy
    from unisono.adapt.layout_policies import GoodputPolicy, ScalingPolicy, SpotPolicy
    from unisono.adapt.norms import Monitoring
    from unisono.adapt.view import Policy, View
    from unisono.data.arrow_stream import ArrowStream
    from unisono.loggers.csv_file import CSVLogger
    from unisono.loggers.logger import Logger
    from unisono.loggers.mlflow import MLflowLogger
    from unisono.loggers.tensorboard import TensorBoardLogger
    from unisono.loggers.wandb import WandbLogger
    from unisono.plan.block_order import BlockShuffle
    from unisono.settings.table import Arithmetic, Checkpoints, Communication, Faults, Records
    from unisono.sync.averaging import DiLoCo, LocalSGD
    from unisono.sync.strategy import AllReduce, Strategy
    from unisono.train.model.tensors import digest
    from unisono.train.model.whole_matrix import whole_matrix
    from unisono.train.run import Run
    from unisono.train.start import init
    from unisono.train.state.first_weights import load
    from unisono.train.step.loss import BackwardDone, Weighted
    from unisono.train.step.step import Step
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
    "Faults",
    "GoodputPolicy",
    "LinearScaling",
    "LocalSGD",
    "Logger",
    "MLflowLogger",
    "Monitoring",
    "NoiseScalePolicy",
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
    "AdaScale": "unisono.adapt.ada_scale",
    "AllReduce": "unisono.sync.strategy",
    "Arithmetic": "unisono.settings.table",
    "ArrowStream": "unisono.data.arrow_stream",
    "BackwardDone": "unisono.train.step.loss",
    "BatchSizeSchedule": "unisono.adapt.batch_size_policies",
    "BlockShuffle": "unisono.plan.block_order",
    "CSVLogger": "unisono.loggers.csv_file",
    "Callback": "unisono.train.trainer",
    "Checkpoints": "unisono.settings.table",
    "Communication": "unisono.settings.table",
    "DiLoCo": "unisono.sync.averaging",
    "EdgeOfStability": "unisono.adapt.ada_scale",
    "Faults": "unisono.settings.table",
    "GoodputPolicy": "unisono.adapt.layout_policies",
    "LinearScaling": "unisono.adapt.ada_scale",
    "LocalSGD": "unisono.sync.averaging",
    "Logger": "unisono.loggers.logger",
    "MLflowLogger": "unisono.loggers.mlflow",
    "Monitoring": "unisono.adapt.norms",
    "NoiseScalePolicy": "unisono.adapt.batch_size_policies",
    "Policy": "unisono.adapt.view",
    "Records": "unisono.settings.table",
    "Run": "unisono.train.run",
    "ScalingPolicy": "unisono.adapt.layout_policies",
    "SpotPolicy": "unisono.adapt.layout_policies",
    "Step": "unisono.train.step.step",
    "StragglerPolicy": "unisono.adapt.communication_policies",
    "Strategy": "unisono.sync.strategy",
    "StrategyPolicy": "unisono.adapt.communication_policies",
    "TensorBoardLogger": "unisono.loggers.tensorboard",
    "TopologyPolicy": "unisono.adapt.communication_policies",
    "Trainer": "unisono.train.trainer",
    "View": "unisono.adapt.view",
    "WandbLogger": "unisono.loggers.wandb",
    "Weighted": "unisono.train.step.loss",
    "digest": "unisono.train.model.tensors",
    "init": "unisono.train.start",
    "load": "unisono.train.state.first_weights",
    "whole_matrix": "unisono.train.model.whole_matrix",
}

_GUESTS = {
    "accelerate": "unisono.integrations.accelerate",
    "keras": "unisono.integrations.keras",
    "lightning": "unisono.integrations.lightning",
    "notebook": "unisono.launch.notebook",
    "ray": "unisono.launch.ray",
    "torchmetrics": "unisono.integrations.torchmetrics",
    "transformers": "unisono.integrations.transformers",
}
"""Modules that load what few scripts need."""


_MOVED = {"KFAC", "ModelAveraging", "PairAveraging", "ParameterServer"}


def __getattr__(name: str) -> Any:
    if name in _MOVED:
        raise AttributeError(f"unisono.{name} is unisono_lab.{name} now: import unisono_lab, of the same installation")
    if name in _GUESTS:
        return import_module(_GUESTS[name])
    if name not in _HOMES:
        raise AttributeError(f"module 'unisono' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
