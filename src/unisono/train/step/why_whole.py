"""The choice between split and whole updates."""

from collections.abc import Sequence

from torch.optim import Optimizer

from unisono.errors import JobError
from unisono.host.memory import MIB
from unisono.reduce.segment import sees_writes
from unisono.train.config.run_config import Execution
from unisono.train.group.workers import Workers
from unisono.train.model.prepared import Prepared
from unisono.train.model.shared_work import SharingOptimizer
from unisono.train.model.tensors import COUNTS_HOLDERS
from unisono.train.model.update import READERS, has_own_step, may_change_gradients
from unisono.train.model.whole_matrix import cost_of


def why_whole(prepared: Prepared, workers: Workers, execution: Execution, *, survives: bool) -> str:
    """Why each worker makes whole updates; empty if the workers of this host split them.

    Args:
        prepared: models and optimizers.
        workers: the workers of the generation. If workers come and go, those of the next may share memory or not.
        execution: the settings of the computation.
        survives: whether workers go on when others are lost.

    Raises:
        JobError: updates are to be split, and an optimizer needs whole tensors, or the workers never share memory.
    """
    wanted, seat = execution.shard_optimizer, workers.transport.seat
    if not wanted:
        return "nobody has asked to split them"
    why = why_whole_by_optimizers(prepared.optimizers)
    have_owners = any(cost_of(one) or isinstance(one, SharingOptimizer) for one in prepared.optimizers)
    if why and wanted is True and not have_owners:
        raise JobError(f"shard_optimizer=True {why}")
    if seat is None or any(one.device.type != "cpu" for one in prepared.parameters.values()):
        if wanted is True and not survives:
            raise JobError(
                "shard_optimizer=True needs workers that share memory: on CPUs, exact, and not with "
                "transport='sockets' or 'process_group'"
            )
        return "the workers share no memory"
    if wanted == "auto" and not sees_writes():
        return "this system does not say which memory a script has written"
    if not COUNTS_HOLDERS:
        return "this version of torch does not say who holds the memory of a parameter"
    if seat[1] == 1:
        return "a worker is alone on its host"
    why = why or ("some workers only serve" if workers.servers else "")
    return why or (_why_in_vain(prepared, execution.split_from_mib) if wanted == "auto" else "")


def _why_in_vain(prepared: Prepared, least_mib: float) -> str:
    """Why a split update would save no time; empty if it would."""
    if (size := sum(one.nbytes for one in prepared.parameters.values()) / MIB) < least_mib:
        return f"the parameters take {size:.1f} MiB, and below {least_mib:g} a split update saves no time"
    if any(group.get("fused") for optimizer in prepared.optimizers for group in optimizer.param_groups):
        return "a fused optimizer goes over memory once, so that a split update saves no time"
    return ""


def why_whole_by_optimizers(optimizers: Sequence[Optimizer]) -> str:
    """Why the updates of these optimizers cannot be split as they are now; empty if they can."""
    owned = [id(one) for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]]
    if len(owned) != len(set(owned)):
        return "cannot split the update of parameters that several optimizers update"
    for optimizer in optimizers:
        if cost_of(optimizer) is not None:
            return (
                f"has no use for parts of matrices, which {type(optimizer).__name__} updates whole: each has an owner"
            )
        if isinstance(optimizer, SharingOptimizer):
            return f"has no use for parts of layers, of which {type(optimizer).__name__} needs the whole"
        if type(optimizer) not in READERS:
            names = ", ".join(kind.__name__ for kind in READERS)
            return f"cannot split {type(optimizer).__name__}: it splits optimizers that go element by element ({names})"
        if has_own_step(optimizer):
            return f"cannot split {type(optimizer).__name__} with a step of the script's own in place of its step"
        if may_change_gradients(optimizer):
            return "leaves no room for hooks on an optimizer's step, or for SGD with nesterov and foreach: go without"
    return ""
