"""The state of a run as a checkpoint holds it, and how it comes back."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from unisono.checkpoint.store import Snapshot
from unisono.errors import CheckpointError
from unisono.plan.batches import Position
from unisono.train.prepared import Prepared, prefixed


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands, besides its weights.

    Attributes:
        position: in the loop that is under way, or comes next.
        loop: the number of that loop; a script may have several, one after the other.
        evaluations: how many times the script has evaluated or predicted.
    """

    position: Position = field(default_factory=Position)
    loop: int = 0
    evaluations: int = 0

    def as_tree(self) -> dict[str, Any]:
        """As numbers by name."""
        return asdict(self)

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> "Progress":
        """The inverse of :meth:`as_tree`."""
        return cls(Position(**tree["position"]), tree["loop"], tree["evaluations"])


def capture(
    prepared: Prepared, progress: Progress, registered: Mapping[str, Any], about: Mapping[str, Any]
) -> Snapshot:
    """The state of a run at a step boundary.

    Args:
        prepared: models and optimizers.
        progress: where the run stands.
        registered: objects with ``state_dict``, by name.
        about: JSON values that say whose state this is.
    """
    return Snapshot(
        step=progress.position.step,
        model=prepared.tensors(),
        optimizer=[optimizer.state_dict() for optimizer in prepared.optimizers],
        state={
            "progress": progress.as_tree(),
            "registered": {name: thing.state_dict() for name, thing in registered.items()},
            "transient": _transient(prepared),
            "extra": _extra(prepared),
            "about": dict(about),
        },
    )


def restore_models(prepared: Prepared, snapshot: Snapshot) -> None:
    """Set all modules' parameters and buffers.

    Raises:
        CheckpointError: the checkpoint holds another model; names what differs.
    """
    ours = {name: tensor.shape for name, tensor in prepared.tensors().items()}
    theirs = {name: tensor.shape for name, tensor in snapshot.model.items()}
    if ours != theirs:
        names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
        raise CheckpointError(
            f"the checkpoint of step {snapshot.step} holds another model; {len(names)} tensors differ, first "
            f"{names[0]}: {_shape(ours.get(names[0]))} here, {_shape(theirs.get(names[0]))} in the checkpoint"
        )
    for prefix, module in prefixed(prepared.modules):
        found = {**snapshot.model, **snapshot.state["extra"]}
        module.load_state_dict(
            {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}
        )
    with torch.no_grad():
        for place, value in zip(_transient_places(prepared), snapshot.state["transient"], strict=True):
            place.copy_(value)


def restore_optimizers(prepared: Prepared, snapshot: Snapshot) -> None:
    """Set all optimizers' state.

    Raises:
        CheckpointError: the checkpoint holds other optimizers.
    """
    if len(snapshot.optimizer) != len(prepared.optimizers):
        raise CheckpointError(
            f"the checkpoint of step {snapshot.step} holds {len(snapshot.optimizer)} optimizers, the script has "
            f"{len(prepared.optimizers)}"
        )
    for optimizer, state in zip(prepared.optimizers, snapshot.optimizer, strict=True):
        try:
            optimizer.load_state_dict(state)
        except (ValueError, KeyError) as error:
            raise CheckpointError(
                f"the checkpoint of step {snapshot.step} holds another optimizer than the script's "
                f"{type(optimizer).__name__}: {error}"
            ) from error


def _extra(prepared: Prepared) -> dict[str, Any]:
    return {
        prefix + name: value
        for prefix, module in prefixed(prepared.modules)
        for name, value in module.state_dict().items()
        if not isinstance(value, Tensor)
    }


def _transient_places(prepared: Prepared) -> list[Tensor]:
    # Buffers that state_dict leaves out still decide bits, so a resumed run needs them.
    saved = {tensor.data_ptr() for tensor in prepared.tensors().values()}
    return [place.tensor for place in prepared.buffers if place.tensor.data_ptr() not in saved]


def _transient(prepared: Prepared) -> list[Tensor]:
    return list(_transient_places(prepared))


def _shape(shape: Any) -> str:
    return "absent" if shape is None else str(list(shape))
