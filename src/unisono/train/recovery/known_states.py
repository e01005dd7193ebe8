"""The record of the states so far. It is the same on all workers, since it decides which collective calls come next."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from unisono.checkpoint.snapshot import Digests, FrozenSnapshot, Snapshot, as_tree
from unisono.errors import CheckpointError, JobMismatch, MemoryFault
from unisono.host.tracebacks import warn
from unisono.train.group.workers import Workers
from unisono.train.state.trained import Trained

Place = tuple[int, int]
"""A step, and a call of ``step.run`` in it."""

BOUNDARY = -1
"""Stands for a moment between two steps, in place of a call."""


@dataclass(frozen=True, slots=True)
class AgreedState:
    """A state that all workers held."""

    step: int
    digests: Digests


@dataclass(slots=True)
class KnownStates:
    """The newest state known to be right, and what was seen since then.

    A replay has to reach the same digests as the first time, and a fault does not come twice in the same way.

    Attributes:
        right: the newest state that is known to be right: the run goes back to it.
        waits: a newer state, which counts as right when audits have found all workers right.
        cleared: the ranks that audits have found right since then.
        returns: the number of times that the run has gone back to the right state.
        digests: the digests of the weights since the right state, by place; all workers agreed on them.
        given: the inputs of the calls since the right state, by place: digests of the optimizers' settings and of the
            limits on the gradient; and of the loss, if the weights were right.
        wrong: the findings where some worker was wrong, by place.
        ignored: the names of registered objects that the script keeps different on each worker.
        before: the differences of registered objects when the run went back last.
        script_writes: whether the script itself has changed a bit: then nobody can tell such changes from faults.
        unseen: the reason why nobody could compare the newest state; empty if workers have compared theirs.
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

    @property
    def steps(self) -> set[int]:
        """The numbers of steps after which there are states that the run may go back to."""
        return {state.step for state in (self.right, self.waits) if state is not None}

    def agreed(self, step: int) -> Digests | None:
        """Return the digests on which all workers agreed after ``step`` steps; None if they are not known any more."""
        return next(
            (state.digests for state in (self.waits, self.right) if state is not None and state.step == step), None
        )

    def add(self, state: AgreedState, *, is_audited: bool) -> None:
        """Add a state that all workers hold. It is the one to go back to, at once or when audits have found all right.

        With ``is_audited`` it has to wait for audits, unless it is the first one.
        """
        if not is_audited or self.right is None:
            self._take_as_right(state)
        elif self.waits is None:
            self.waits, self.cleared = state, []

    def clear(self, ranks: Iterable[int], computing: Collection[int]) -> None:
        """Note that audits have found some workers right. A worker that computes right now did so before, too."""
        self.cleared = sorted({*self.cleared, *ranks})
        if self.waits is not None and set(computing) <= set(self.cleared):
            self._take_as_right(self.waits)

    def forget_from(self, place: Place) -> None:
        """Forget what was computed from a place on, as it may be wrong."""
        self.digests = {earlier: digest for earlier, digest in self.digests.items() if earlier < place}
        self.given = {earlier: inputs for earlier, inputs in self.given.items() if earlier < place}

    def _take_as_right(self, state: AgreedState) -> None:
        self.right, self.waits, self.returns, self.wrong = state, None, 0, {}
        self.digests = {place: digest for place, digest in self.digests.items() if place >= (state.step, 0)}
        self.given = {place: inputs for place, inputs in self.given.items() if place >= (state.step, 0)}


KEEPERS = 2
"""The number of workers, those of the lowest ranks, that keep a copy of the newest verified state."""

START_AGAIN = "start the job again, it goes on from its newest verified checkpoint"


class StateCopies:
    """This worker's copies of states, to go back to."""

    def __init__(self, trained: Trained) -> None:
        self._trained = trained
        self._copies: dict[int, FrozenSnapshot] = {}  # by step

    def keep(self, known: KnownStates, rank: int) -> None:
        """Copy the state, on some workers, if it is one to go back to; and forget the copies of other states."""
        step = self._trained.progress.position.step
        self._copies = {kept: copy for kept, copy in self._copies.items() if kept in known.steps}
        if rank >= KEEPERS or step not in known.steps:
            return
        try:
            self._copies[step] = FrozenSnapshot.of(self._trained.capture())
        except CheckpointError as error:
            self._copies.pop(step, None)
            warn(f"no state can be kept to go back to: {error}")

    def _whole(self, known: KnownStates) -> FrozenSnapshot | None:
        """The copy of the right state; None if this worker has none, or if the copy has changed."""
        right = known.right
        copy = None if right is None else self._copies.get(right.step)
        return copy if right is not None and copy is not None and copy.digests() == right.digests else None

    def can_return(self, known: KnownStates) -> bool:
        """Whether this worker has an unchanged copy of a right state of the present loop."""
        copy = self._whole(known)
        return copy is not None and bool(copy.text["state"]["progress"]["loop"] == self._trained.progress.loop)

    def retrieve(self, workers: Workers, known: KnownStates) -> Snapshot:
        """Return the right state, on every worker. Collective.

        Raises:
            JobMismatch: there is none, or every copy has changed.
            MemoryFault: the state is of a loop that is over.
        """
        whole = self._whole(known)
        steps = workers.devices.gather(None if whole is None else whole.step)
        steps_of_workers = workers.gather_json(steps[0] if len(set(steps)) == 1 else None)
        newest = max((step for step in steps_of_workers if step is not None), default=None)
        why = "" if self._trained.doubt is None else f"{self._trained.doubt.why}, and "
        if newest is None:
            raise JobMismatch(f"{why}no copy of a verified state is left: {START_AGAIN}")
        source = steps_of_workers.index(newest)
        own_snapshot = whole.thawed() if workers.rank == source and whole is not None else None
        snapshot = Snapshot(*workers.broadcast(None if own_snapshot is None else as_tree(own_snapshot), source))
        if snapshot.state["progress"]["loop"] != self._trained.progress.loop:
            raise MemoryFault(
                f"{why}the newest state that is known to be right, that of step {newest}, is of a loop that is over, "
                f"whose steps the script cannot make again. {START_AGAIN}"
            )
        return snapshot
