"""Policies by name, as the command line and the environment give them."""

from collections.abc import Callable, Sequence

from unisono.adapt.batch_policies import AdaScale, BatchSizeSchedule, EdgeOfStability, NoiseScalePolicy
from unisono.adapt.communication_policies import StragglerPolicy, TopologyPolicy
from unisono.adapt.layout_policies import GoodputPolicy, ScalingPolicy
from unisono.adapt.view import Policy
from unisono.errors import JobError
from unisono.named import load_named, require_named
from unisono.received import short, why_of

NAMED: dict[str, Callable[[int], Policy]] = {
    "noise-scale": lambda batch_size: NoiseScalePolicy(largest=16 * batch_size),
    "ada-scale": lambda batch_size: AdaScale(),
    "batch-size-schedule": lambda batch_size: BatchSizeSchedule(),
    "straggler": lambda batch_size: StragglerPolicy(),
    "topology": lambda batch_size: TopologyPolicy(),
    "goodput": lambda batch_size: GoodputPolicy(largest=16 * batch_size),
    "edge-of-stability": lambda batch_size: EdgeOfStability(),
    "scaling": lambda batch_size: ScalingPolicy(),
}
"""The policies that need no further settings, made for a job's batch size."""


def policies_named(names: Sequence[str], batch_size: int, where: str = "--policy") -> list[Policy]:
    """Make policies.

    Args:
        names: names of our own policies, of policies of other packages, or ``module:Class``; a class of another package
            is called without arguments.
        batch_size: the job's global batch size.
        where: the variable or option that has the names, for errors.

    Raises:
        JobError: there is no such policy; says which there are, or what failed.
    """
    return [_make(name, batch_size, where) for name in names]


def require_policies(names: Sequence[str], where: str) -> None:
    """Refuse names of no policy, as :func:`~unisono.named.require_named` does."""
    require_named(names, NAMED, "policy", where)


def _make(name: str, batch_size: int, where: str) -> Policy:
    make = load_named(name, NAMED, "policy", where)
    if name in NAMED:
        return NAMED[name](batch_size)
    try:
        policy = make()
    except Exception as error:  # noqa: BLE001 (whatever a class of the user does)
        raise JobError(f"{where}={short(name)}: the policy cannot be made: {why_of(error)}") from None
    if not isinstance(policy, Policy):
        raise JobError(f"{where}={short(name)}: it makes a {type(policy).__name__}, and no unisono.Policy")
    return policy
