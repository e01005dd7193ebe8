"""What checkpoints hold of models, optimizers and objects that no run trains."""

from typing import Any

from unisono.checkpoint.snapshot import Snapshot
from unisono.train.model.prepared import Prepared
from unisono.train.state.policy_state import PolicyState
from unisono.train.state.trained import Trained


def captured(prepared: Prepared, **registered: Any) -> Snapshot:
    """Their state at the first step boundary.

    Args:
        prepared: models and optimizers.
        registered: objects with ``state_dict``, by name.
    """
    trained = Trained({}, PolicyState((), 1, 1))
    trained.prepared = prepared
    for name, thing in registered.items():
        trained.registry.add(name, thing)
    return trained.capture()
