"""What a checkpoint holds is set part by part, and whatever cannot be set is named."""

from collections.abc import Iterator
from contextlib import contextmanager
from reprlib import repr as short
from typing import Any

import torch

from unisono.checkpoint.store import Snapshot
from unisono.errors import CheckpointError, UnisonoError


@contextmanager
def restoring(snapshot: Snapshot, part: str) -> Iterator[None]:
    """Where a part of a snapshot is set: by us, by torch or by an object of the script.

    Raises:
        CheckpointError: it cannot be; names the part. Errors of Unisono and a want of memory stay what they are.
    """
    try:
        yield
    except (UnisonoError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"the {part} in the checkpoint of step {snapshot.step} cannot be restored: {type(error).__name__}: "
            f"{str(error)[:400]}. It is damaged, or of another version of this script or of Unisono: go on from "
            f"another checkpoint, or start in a new folder"
        ) from error


def kept(snapshot: Snapshot, name: str) -> Any:
    """One part of what a snapshot holds besides models and optimizers.

    Raises:
        CheckpointError: it is not there; names it.
    """
    if not isinstance(snapshot.state, dict) or name not in snapshot.state:
        raise CheckpointError(f"the checkpoint of step {snapshot.step} has no {name}: {short(snapshot.state)}")
    return snapshot.state[name]
