"""Membership: the workers that this worker trains with, and their changes; and which of them hold the right state."""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NoReturn

from unisono.errors import Dismissed, JobError, WorkerLost
from unisono.train.group.workers import Mesh, Workers


@dataclass(frozen=True, slots=True)
class MemberProgress:
    """The progress of a member when it leaves its generation.

    Attributes:
        acts: the number of collective calls that it has completed.
        at_boundary: whether it stands between two steps of the loop.
    """

    acts: int
    loop: int = 0
    step: int = 0
    at_boundary: bool = False


@dataclass(frozen=True, slots=True)
class StateTransfer:
    """The worker of a new generation that gives the state, and the workers that get it.

    Attributes:
        source: the rank of the worker that has come furthest.
        acts: the number of completed collective calls, by rank.
        joiners: the ranks of new workers.
        seconds: the seconds that the change of generation took so far, by part.
    """

    source: int
    acts: Sequence[int]
    joiners: frozenset[int]
    seconds: Mapping[str, float]

    @property
    def behind(self) -> frozenset[int]:
        """The ranks that have not completed what the source has."""
        late = {rank for rank, acts in enumerate(self.acts) if acts < self.acts[self.source]}
        return frozenset(late) | self.joiners

    @property
    def is_alone(self) -> bool:
        """Whether nobody but the source has completed what it has."""
        return len(self.acts) - len(self.behind) == 1


class Membership:
    """This worker's place among the others. In this base class workers stay the same, and no messages are exchanged.

    Attributes:
        joins: whether training is under way without this worker, which has yet to catch up with it.
        is_elastic: whether the others go on when one is lost.
        wants_checkpoint: whether somebody outside has asked this worker for a checkpoint, and none was begun since.
    """

    joins = is_elastic = wants_checkpoint = False

    def __init__(self, workers: Workers, mesh: Mesh | None = None) -> None:
        self.workers, self._mesh = workers, mesh

    @property
    def is_main(self) -> bool:
        """Whether this is the main worker, the first of those that train."""
        return not self.joins and self.workers.is_main

    @property
    def is_due(self) -> bool:
        """Whether a new generation is to begin once this one reaches a boundary."""
        return False

    def checkpoint_begins(self) -> None:
        """Note that a checkpoint is written: it fulfils the requests made so far."""

    def leave(self) -> bool:
        """Note that this worker was asked to leave. Returns whether the others may go on without it."""
        return False

    def regroup(self, lost: WorkerLost | None, progress: MemberProgress) -> StateTransfer:
        """Leave this generation and become part of the next one. Collective.

        Raises:
            WorkerLost: there will be no next generation, or another worker was lost on the way.
            Dismissed: this worker is not part of it.
        """
        assert lost is not None, "nobody asks workers that stay the same to regroup"
        raise lost

    def formed(self, seconds: Mapping[str, float]) -> None:
        """Note that this worker trains on. ``seconds`` says how long each part of regrouping took."""

    def report_progress(self, progress: MemberProgress, samples_per_s: float, shard_s: float) -> None:
        """Report how far this worker has come, and how fast.

        ``samples_per_s`` are those of all workers together; ``shard_s`` is 0 unless shards are to be split by speed.
        """

    def resize(self, workers: int) -> None:
        """Ask for another number of workers.

        Raises:
            JobError: these workers stay the same.
        """
        raise JobError(
            f"run.resize({workers}): the {self.workers.world_size} workers of this job stay the same. Start it with "
            f"a range, such as unisono run -n 1:{max(workers, self.workers.world_size)}"
        )

    def replace(self, generation: int, rank: int) -> None:
        """Have another worker take the place of a worker of a generation. All members ask for it.

        Raises:
            JobError: these workers stay the same.
        """
        raise JobError(f"rank {rank} cannot be replaced: the workers of this job stay the same")

    def finished(self, digest: str) -> None:
        """Report that the job is done."""

    def holds(self, acts: int) -> bool:
        """Whether all devices of this worker have worked out a collective call. Asked before the change is applied.

        With it, ``acts`` calls are complete.

        Raises:
            Dismissed: this worker is not needed, or the job is done.
            WorkerLost: another device of this worker is gone.
        """
        return True

    def publish(self, name: str, value: Any) -> None:
        """Make a value known to workers that join later.

        Every member does it, so that the value is known whichever of them is lost.
        """

    def published(self, name: str) -> Any:
        """Wait for a value that the others have published, and return it: for a joiner.

        Raises:
            Dismissed: this worker is not needed, or the job is done.
        """
        raise NotImplementedError

    def enter(self, loop: int) -> StateTransfer | None:
        """Wait in this loop until the others take this worker in: for a joiner.

        Return None if the others have finished the loop.

        Raises:
            Dismissed: this worker is not needed, or the job is done.
        """
        raise NotImplementedError

    def await_end(self) -> NoReturn:
        """Wait for the end of the job: for a joiner that was not taken in before its script was done.

        Raises:
            Dismissed: this worker is not needed, or the job is done.
        """
        raise NotImplementedError

    def clock(self) -> float | None:
        """Ask for the coordinator's clock, in seconds; None if there is no coordinator. Waits. Any thread may call it.

        Raises:
            LaunchError: the coordinator does not answer.
        """
        return None

    def away(self) -> str:
        """Why the job may go on without this worker; empty as long as it cannot. Any thread may call it."""
        return ""

    def cut_off(self, seconds: float) -> None:
        """Cut the connections to the other workers, and to the coordinator for a while, as a network fault does."""
        self.workers.abort()

    def close(self) -> None:
        """Let go of the connections."""
        self.workers.close()
        if self._mesh is not None:
            self._mesh.close()


class Fixed(Membership):
    """Workers that were started together. Without one of them the others cannot go on."""


# What becomes of the state when workers come and go.


class Recovers:
    """The state that collective calls change, and what to do when workers come and go. This base class has no state."""

    def leave(self) -> None:
        """End the generation: let go of what was made for it."""

    def give(self) -> Any:
        """Return the whole state, as a tree that can be broadcast."""

    def take(self, state: Any, *, joins: bool, follow: Callable[[], None] | None = None) -> None:
        """Set the state that another worker has given. This is neither collective nor does it do I/O.

        Args:
            state: the state, as its :meth:`give` returned it.
            joins: whether this worker joins.
            follow: a function that makes the newest change here. What it changes need not be set from ``state``.
        """

    def renew(self) -> None:
        """Make what computes in the new generation. Collective."""

    def go_on(self) -> None:
        """Note that a collective call is complete here, and so that all workers have completed the one before it."""

    def digests(self) -> Sequence[int] | None:
        """Return digests of the state, equal on workers that completed the same calls; None where they may differ."""
        return None

    def suspect_only_copy(self) -> None:
        """Note, before :meth:`give`, that members will get a state that only this worker has: nobody can compare it."""

    def require_same_result(self) -> None:
        """Note that members will get the result of a change that they have not made, without its cause.

        Called before :meth:`give`.

        Raises:
            JobMismatch: the script has changed that result since, and would change it there a second time.
        """

    def heal(self, workers: Workers, transfer: StateTransfer, name: str) -> None:
        """Give the right state to the workers that hold another one than most. Collective.

        ``name`` is that of the state, for the message.
        """

    def depart(self, dismissed: Dismissed) -> NoReturn:
        """End this worker: the others go on without it, or the job goes on later."""
        raise dismissed


# The majority of states: whether all workers hold the same one, and which ones do not.


class Verdict(Enum):
    """The verdict on the workers' states, from their digests."""

    RIGHT = "all hold the same"
    HEALING = "most hold the same"
    WRONG = "nobody can say who is right"


def verdict(held: Sequence[Hashable]) -> Verdict:
    """Judge the digests of what workers hold, by rank."""
    if len(set(held)) <= 1:
        return Verdict.RIGHT
    return Verdict.WRONG if healing(held) is None else Verdict.HEALING


def healing(held: Sequence[Hashable]) -> StateTransfer | None:
    """Return who gives whom the right state, where some workers hold another one than most do.

    ``held`` are digests by rank. Return None if no state is held by more than half of the workers.
    """
    right, votes = Counter(held).most_common(1)[0]
    if 2 * votes <= len(held):
        return None
    return StateTransfer(
        source=held.index(right), acts=[int(digest == right) for digest in held], joiners=frozenset(), seconds={}
    )


def trusted(transfer: StateTransfer, held: Mapping[int, Hashable]) -> StateTransfer | None:
    """Return who gives whom the state when some workers lack it.

    A worker that holds another state than most counts as behind. ``transfer`` is from the workers that have come
    furthest, any of which may hold a wrong state. ``held`` are digests by rank, empty if states are not compared.
    Return None if no majority holds the same.
    """
    if len(set(held.values())) <= 1:
        return transfer
    ranks, repair = list(held), healing(list(held.values()))
    if repair is None:
        return None
    outvoted = {ranks[number] for number in repair.behind}
    acts = [-1 if rank in outvoted else acts for rank, acts in enumerate(transfer.acts)]
    return replace(transfer, source=ranks[repair.source], acts=acts)
