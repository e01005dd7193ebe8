"""The record of the states so far: the same on all workers, since it decides which collective calls come next."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, get_type_hints

from unisono.checkpoint.snapshot import Digests, FrozenSnapshot, Snapshot
from unisono.errors import CheckpointError, JobMismatch, MemoryFault, UnisonoWarning
from unisono.received import value_of
from unisono.train.group.workers import Workers
from unisono.train.state.checkpoints import as_tree
from unisono.train.state.trained import Trained

Place = tuple[int, int]
"""A step, and a call of ``step.run`` in it."""

BOUNDARY = -1
"""In place of a call: between two steps."""


@dataclass(frozen=True, slots=True)
class AgreedState:
    """A state that all workers had alike.

    Attributes:
        step: the number of steps committed by then.
        digests: the digests on which all workers agreed.
    """

    step: int
    digests: Digests


@dataclass(slots=True)
class KnownStates:
    """The newest state known to be right, and what was seen since.

    A replay has to come by the same digests as the first time, and a fault does not come twice in the same way.

    Attributes:
        right: the newest state that is known to be right: the run goes back to it.
        waits: a newer state, which counts as right when audits have found all workers right.
        cleared: the ranks that audits have found right since then.
        returns: the number of times that the run has gone back to the right state.
        digests: the digests of the weights since the right state, by place; all workers agreed on them.
        given: what the calls were given since the right state, by place: digests of the optimizers' settings and of the
            limits on the gradient; and of the loss, if the weights were right.
        wrong: the findings where some worker was wrong, by place.
        ignored: the names of registered objects of which the script keeps a different one on each worker.
        before: the differences of registered objects when the run went back last.
        script_writes: whether it was the script that had changed a bit: then nobody can tell such changes from faults.
        unseen: the reason for which nobody could compare the newest state; empty if workers have compared theirs.
    """

    right: AgreedState | None = None
    waits: AgreedState | None = None
    cleared: list[int] = field(default_factory=list)
    returns: int = 0
    digests: dict[Place, int] = field(default_factory=dict)
    given: dict[Place, list[int]] = field(default_factory=dict)
    wrong: dict[Place, list[int]] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    before: dict[str, list[int]] = field(default_factory=dict)
    script_writes: bool = False
    unseen: str = ""

    @classmethod
    def of(cls, tree: Any) -> KnownStates:
        """What another worker has given.

        Raises:
            Unreadable: it is nothing of the kind.
        """
        return cls(**value_of(get_type_hints(cls), tree, "what another worker knows of older states"))

    def tree(self) -> dict[str, Any]:
        """All of it, for a worker that lacks it."""
        return asdict(self)

    @property
    def steps(self) -> set[int]:
        """After how many steps the states were that the run may go back to."""
        return {one.step for one in (self.right, self.waits) if one is not None}

    def agreed(self, step: int) -> Digests | None:
        """On what all workers have agreed after so many steps; None if that is not known any more."""
        return next((one.digests for one in (self.waits, self.right) if one is not None and one.step == step), None)

    def add(self, state: AgreedState, *, is_audited: bool) -> None:
        """All workers hold this one. It is the one to go back to, at once or when audits have found all of them right.

        Args:
            state: the state on which all agree.
            is_audited: whether a state counts as right only then. The first one is believed.
        """
        if not is_audited or self.right is None:
            self._take_as_right(state)
        elif self.waits is None:
            self.waits, self.cleared = state, []

    def clear(self, ranks: Iterable[int], computing: Collection[int]) -> None:
        """Audits have found some workers right. Whoever computes right did so before, too.

        Args:
            ranks: the ranks of these workers.
            computing: all ranks that compute.
        """
        self.cleared = sorted({*self.cleared, *ranks})
        if self.waits is not None and set(computing) <= set(self.cleared):
            self._take_as_right(self.waits)

    def forget_from(self, place: Place) -> None:
        """What was computed from here on is not to be believed."""
        self.digests = {at: seen for at, seen in self.digests.items() if at < place}
        self.given = {at: seen for at, seen in self.given.items() if at < place}

    def _take_as_right(self, state: AgreedState) -> None:
        self.right, self.waits, self.returns, self.wrong = state, None, 0, {}
        self.digests = {place: seen for place, seen in self.digests.items() if place >= (state.step, 0)}
        self.given = {place: seen for place, seen in self.given.items() if place >= (state.step, 0)}


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
