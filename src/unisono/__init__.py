"""Unisono: exact data-parallel training on PyTorch.

The names below are all there is to import. They load on first use, so that ``import unisono`` costs nothing and the
command line starts without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.adapt.ada_scale import AdaScale
    from unisono.adapt.batch_size_schedule import BatchSizeSchedule
    from unisono.adapt.goodput_policy import GoodputPolicy
    from unisono.adapt.linear_scaling import LinearScaling
    from unisono.adapt.monitoring import Monitoring
    from unisono.adapt.noise_scale_policy import NoiseScalePolicy
    from unisono.adapt.policy import Policy
    from unisono.adapt.scaling_policy import ScalingPolicy
    from unisono.adapt.spot_policy import SpotPolicy
    from unisono.adapt.straggler_policy import StragglerPolicy
    from unisono.adapt.strategy_policy import StrategyPolicy
    from unisono.adapt.topology_policy import TopologyPolicy
    from unisono.adapt.view import View
    from unisono.sync.all_reduce import AllReduce
    from unisono.sync.local_sgd import DiLoCo, LocalSGD
    from unisono.sync.model_averaging import ModelAveraging
    from unisono.sync.pair_averaging import PairAveraging
    from unisono.sync.parameter_server import ParameterServer
    from unisono.sync.strategy import Strategy
    from unisono.train.load import load
    from unisono.train.model.digest import digest
    from unisono.train.run import Run
    from unisono.train.start import init
    from unisono.train.step.step import Step
    from unisono.train.trainer import Callback, Trainer

__version__ = "0.1.0"

__all__ = [
    "AdaScale",
    "AllReduce",
    "BatchSizeSchedule",
    "Callback",
    "DiLoCo",
    "GoodputPolicy",
    "LinearScaling",
    "LocalSGD",
    "ModelAveraging",
    "Monitoring",
    "NoiseScalePolicy",
    "PairAveraging",
    "ParameterServer",
    "Policy",
    "Run",
    "ScalingPolicy",
    "SpotPolicy",
    "Step",
    "StragglerPolicy",
    "Strategy",
    "StrategyPolicy",
    "TopologyPolicy",
    "Trainer",
    "View",
    "__version__",
    "digest",
    "init",
    "load",
]

_HOMES = {
    "AdaScale": "unisono.adapt.ada_scale",
    "AllReduce": "unisono.sync.all_reduce",
    "BatchSizeSchedule": "unisono.adapt.batch_size_schedule",
    "Callback": "unisono.train.trainer",
    "DiLoCo": "unisono.sync.local_sgd",
    "GoodputPolicy": "unisono.adapt.goodput_policy",
    "LinearScaling": "unisono.adapt.linear_scaling",
    "LocalSGD": "unisono.sync.local_sgd",
    "ModelAveraging": "unisono.sync.model_averaging",
    "Monitoring": "unisono.adapt.monitoring",
    "NoiseScalePolicy": "unisono.adapt.noise_scale_policy",
    "PairAveraging": "unisono.sync.pair_averaging",
    "ParameterServer": "unisono.sync.parameter_server",
    "Policy": "unisono.adapt.policy",
    "Run": "unisono.train.run",
    "ScalingPolicy": "unisono.adapt.scaling_policy",
    "SpotPolicy": "unisono.adapt.spot_policy",
    "Step": "unisono.train.step.step",
    "StragglerPolicy": "unisono.adapt.straggler_policy",
    "Strategy": "unisono.sync.strategy",
    "StrategyPolicy": "unisono.adapt.strategy_policy",
    "TopologyPolicy": "unisono.adapt.topology_policy",
    "Trainer": "unisono.train.trainer",
    "View": "unisono.adapt.view",
    "digest": "unisono.train.model.digest",
    "init": "unisono.train.start",
    "load": "unisono.train.load",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'unisono' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
