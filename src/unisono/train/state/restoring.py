"""What a checkpoint holds is set part by part, and whatever cannot be set is named."""

from collections.abc import Iterator
from contextlib import contextmanager
from reprlib import repr as short
from typing import Any

import torch

from unisono.checkpoint.store import Snapshot
from unisono.errors import CheckpointError, UnisonoError, Unreadable


@contextmanager
def restoring(snapshot: Snapshot, part: str) -> Iterator[None]:
    """Where a part of a snapshot is set: by us, by torch or by an object of the script.

    Raises:
        CheckpointError: it cannot be; names the part. Errors of Unisono and a want of memory stay what they are.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, UnisonoError | MemoryError | torch.OutOfMemoryError) and not isinstance(error, Unreadable):
            raise
        raise CheckpointError(
            f"the {part} in the checkpoint of step {snapshot.step} cannot be restored: {type(error).__name__}: "
            f"{str(error)[:400]}. It is damaged, or of another version of this script or of Unisono: go on from "
            f"another checkpoint, or start in a new folder"
        ) from error


@contextmanager
def all_or_nothing(*things: object) -> Iterator[None]:
    """Where attributes of objects are set: if that fails, all have those again that they had before."""
    before = [dict(vars(thing)) for thing in things]
    try:
        yield
    except BaseException:
        for thing, attributes in zip(things, before, strict=True):
            vars(thing).clear()
            vars(thing).update(attributes)
        raise


def kept(snapshot: Snapshot, name: str) -> Any:
    """One part of what a snapshot holds besides models and optimizers.

    Raises:
        CheckpointError: it is not there; names it.
    """
    if not isinstance(snapshot.state, dict) or name not in snapshot.state:
        raise CheckpointError(f"the checkpoint of step {snapshot.step} has no {name}: {short(snapshot.state)}")
    return snapshot.state[name]
