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
    from unisono.adapt.topology_policy import TopologyPolicy
    from unisono.adapt.view import View
    from unisono.train.digest import digest
    from unisono.train.load import load
    from unisono.train.run import Run
    from unisono.train.start import init
    from unisono.train.step import Step
    from unisono.train.trainer import Callback, Trainer

__version__ = "0.1.0"

__all__ = [
    "AdaScale",
    "BatchSizeSchedule",
    "Callback",
    "GoodputPolicy",
    "LinearScaling",
    "Monitoring",
    "NoiseScalePolicy",
    "Policy",
    "Run",
    "ScalingPolicy",
    "SpotPolicy",
    "StragglerPolicy",
    "Step",
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
    "BatchSizeSchedule": "unisono.adapt.batch_size_schedule",
    "GoodputPolicy": "unisono.adapt.goodput_policy",
    "LinearScaling": "unisono.adapt.linear_scaling",
    "Monitoring": "unisono.adapt.monitoring",
    "NoiseScalePolicy": "unisono.adapt.noise_scale_policy",
    "Policy": "unisono.adapt.policy",
    "ScalingPolicy": "unisono.adapt.scaling_policy",
    "SpotPolicy": "unisono.adapt.spot_policy",
    "StragglerPolicy": "unisono.adapt.straggler_policy",
    "TopologyPolicy": "unisono.adapt.topology_policy",
    "View": "unisono.adapt.view",
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
