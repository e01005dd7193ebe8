"""Copies of verified states, to go back to. Each worker has its own, or none."""

from __future__ import annotations

import warnings

from unisono.checkpoint.snapshot import FrozenSnapshot, Snapshot
from unisono.errors import CheckpointError, JobMismatch, MemoryFault, UnisonoWarning
from unisono.train.group.workers import Workers
from unisono.train.recovery.known_states import KnownStates
from unisono.train.state.checkpoints import as_tree
from unisono.train.state.trained import Trained

KEEPERS = 2
"""So many workers, those of the lowest ranks, keep a copy of the newest verified state."""

START_AGAIN = "start the job again, it goes on from its newest verified checkpoint"


class StateCopies:
    """This worker's copies of states.

    Args:
        trained: what is copied.
    """

    def __init__(self, trained: Trained) -> None:
        self._trained = trained
        self._copies: dict[int, FrozenSnapshot] = {}  # by step

    def keep(self, known: KnownStates, rank: int) -> None:
        """Copy the state, on some of the workers, if it is one to go back to; forget the copies of others."""
        step = self._trained.progress.position.step
        self._copies = {at: copy for at, copy in self._copies.items() if at in known.steps}
        if rank >= KEEPERS or step not in known.steps:
            return
        try:
            self._copies[step] = FrozenSnapshot.of(self._trained.capture())
        except CheckpointError as error:
            self._copies.pop(step, None)
            warnings.warn(f"no state can be kept to go back to: {error}", UnisonoWarning, stacklevel=4)

    def _whole(self, known: KnownStates) -> FrozenSnapshot | None:
        """The copy of the right state; nothing if this worker has none, or not as it was made."""
        right = known.right
        copy = None if right is None else self._copies.get(right.step)
        return copy if right is not None and copy is not None and copy.digests() == right.digests else None

    def can_return(self, known: KnownStates) -> bool:
        """Whether this worker has a whole copy of a right state of the present loop."""
        copy = self._whole(known)
        return copy is not None and bool(copy.text["state"]["progress"]["loop"] == self._trained.progress.loop)

    def retrieve(self, workers: Workers, known: KnownStates) -> Snapshot:
        """The right state, on every worker. Collective.

        Raises:
            JobMismatch: there is none, or no copy is as it was made.
            MemoryFault: it is of a loop that is over.
        """
        whole = self._whole(known)
        steps = workers.devices.gather(None if whole is None else whole.step)
        told = workers.gather_json(steps[0] if len(set(steps)) == 1 else None)
        newest = max((step for step in told if step is not None), default=None)
        why = "" if self._trained.doubt is None else f"{self._trained.doubt.why}, and "
        if newest is None:
            raise JobMismatch(f"{why}no copy of a verified state is left: {START_AGAIN}")
        source = told.index(newest)
        mine = whole.thawed() if workers.rank == source and whole is not None else None
        found = Snapshot(*workers.broadcast(None if mine is None else as_tree(mine), source))
        if found.state["progress"]["loop"] != self._trained.progress.loop:
            raise MemoryFault(
                f"{why}the newest state that is known to be right, that of step {newest}, is of a loop that is over, "
                f"whose steps the script cannot make again. {START_AGAIN}"
            )
        return found
