"""Policies by name, as the command line and the environment give them."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from unisono.adapt.ada_scale import AdaScale
from unisono.adapt.batch_size_policies import BatchSizeSchedule, NoiseScalePolicy
from unisono.adapt.communication_policies import StragglerPolicy, TopologyPolicy
from unisono.adapt.goodput_policy import GoodputPolicy
from unisono.adapt.policy import Policy
from unisono.adapt.scaling_policy import ScalingPolicy
from unisono.errors import JobError
from unisono.received import short

NAMED: dict[str, Callable[[int], Policy]] = {
    "noise-scale": lambda batch_size: NoiseScalePolicy(largest=16 * batch_size),
    "ada-scale": lambda batch_size: AdaScale(),
    "batch-size-schedule": lambda batch_size: BatchSizeSchedule(),
    "straggler": lambda batch_size: StragglerPolicy(),
    "topology": lambda batch_size: TopologyPolicy(),
    "goodput": lambda batch_size: GoodputPolicy(largest=16 * batch_size),
    "scaling": lambda batch_size: ScalingPolicy(),
}
"""What needs no further words, made for a job's batch size."""


def policies_named(names: Sequence[str], batch_size: int) -> list[Policy]:
    """Make policies.

    Args:
        names: names of our own policies, or ``module:Class`` of others, which are called without arguments.
        batch_size: the job's global batch size.

    Raises:
        JobError: there is no such policy; says which there are, or what failed.
    """
    return [_made(name, batch_size) for name in names]


def _made(name: str, batch_size: int) -> Policy:
    if name in NAMED:
        return NAMED[name](batch_size)
    module, colon, attribute = name.partition(":")
    if not colon:
        raise JobError(f"there is no policy {short(name)}: choose of {', '.join(NAMED)}, or write module:Class")
    try:
        found: Any = getattr(import_module(module), attribute)
        policy = found()
    except (ImportError, AttributeError, TypeError) as error:
        raise JobError(f"the policy {name} cannot be made: {error}") from error
    if not isinstance(policy, Policy):
        raise JobError(f"the policy {name} is a {type(policy).__name__}, and no unisono.Policy")
    return policy
