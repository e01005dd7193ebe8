"""Membership: the workers that this worker trains with, and their changes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from unisono.errors import JobError, WorkerLost
from unisono.train.group.workers import Mesh, Workers


@dataclass(frozen=True, slots=True)
class MemberProgress:
    """The progress of a member when it leaves its generation.

    Attributes:
        acts: the number of collective calls that it has completed.
        loop: the number of its present loop.
        step: the number of the newest step that it has committed.
        at_boundary: whether it stands between two steps of the loop.
    """

    acts: int
    loop: int = 0
    step: int = 0
    at_boundary: bool = False


@dataclass(frozen=True, slots=True)
class StateTransfer:
    """Which worker of a new generation gives the state, and which ones get it.

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
    """This worker's place among the others, which says and hears nothing as long as they stay the same.

    Args:
        workers: the workers of the present generation.
        mesh: torch's group of the devices of this one; None if it has but one.

    Attributes:
        joins: whether training is under way without this worker, which has yet to catch up with it.
        is_elastic: whether the others go on when one is lost.
        wants_checkpoint: whether somebody outside has asked this worker for one, and none was begun since.
    """

    joins = is_elastic = wants_checkpoint = False

    def __init__(self, workers: Workers, mesh: Mesh | None = None) -> None:
        self._workers, self._mesh = workers, mesh

    @property
    def workers(self) -> Workers:
        """Those of the present generation."""
        return self._workers

    @property
    def is_main(self) -> bool:
        """Whether this is the main worker: the first of those that train."""
        return not self.joins and self.workers.is_main

    @property
    def is_due(self) -> bool:
        """Whether a new generation waits for this one to reach a boundary."""
        return False

    def checkpoint_begins(self) -> None:
        """One is written: whoever has asked for one by now gets it."""

    def leave(self) -> bool:
        """This worker was asked to leave. Returns whether the others may go on without it."""
        return False

    def regroup(self, lost: WorkerLost | None, progress: MemberProgress) -> StateTransfer:
        """Leave this generation and become part of the next. Collective.

        Args:
            lost: why, if a worker was lost.
            progress: the place that this worker has reached.

        Raises:
            WorkerLost: there will be no next one, or another worker was lost on the way.
            Dismissed: this worker is not part of it.
        """
        assert lost is not None, "nobody asks workers that stay the same to regroup"
        raise lost

    def formed(self, seconds: Mapping[str, float]) -> None:
        """This worker trains on, after so many seconds, by part."""

    def tell(self, progress: MemberProgress, samples_per_s: float, shard_s: float) -> None:
        """Tell how far this worker has come, and how fast.

        Args:
            progress: the place that it has reached.
            samples_per_s: the recent throughput of all workers together, in samples per second.
            shard_s: seconds per shard on this worker, if shards are to be split by speed; else 0.
        """

    def resize(self, workers: int) -> None:
        """Ask for another number of workers.

        Raises:
            JobError: these workers stay the same.
        """
        raise JobError(
            f"run.resize({workers}): the {self._workers.world_size} workers of this job stay the same. Start it with "
            f"a range, such as unisono run -n 1:{max(workers, self._workers.world_size)}"
        )

    def replace(self, generation: int, rank: int) -> None:
        """Have a worker of a generation leave, and another one come instead. All members ask for it.

        Raises:
            JobError: these workers stay the same.
        """
        raise JobError(f"rank {rank} cannot be replaced: the workers of this job stay the same")

    def finished(self, digest: str) -> None:
        """The job is done."""

    def holds(self, acts: int) -> bool:
        """Whether all devices of this worker have worked a collective call out. Asked before it is set.

        Args:
            acts: the number of calls that are complete with it.

        Raises:
            Dismissed: this worker is not needed, or the job is done.
            WorkerLost: another device of this worker is gone.
        """
        return True

    def publish(self, name: str, value: Any) -> None:
        """Make a value known to those who will join. Every member does, so that it is known whoever of them is lost."""

    def published(self, name: str) -> Any:
        """For a joiner: what the others have made known; waits for it.

        Raises:
            Dismissed: this worker is not needed, or the job is done.
        """
        raise NotImplementedError

    def enter(self, loop: int) -> StateTransfer | None:
        """For a joiner: wait to be taken in by the others, in this loop.

        Returns:
            the generation it is part of; nothing if the others are through with the loop.

        Raises:
            Dismissed: this worker is not needed, or the job is done.
        """
        raise NotImplementedError

    def await_end(self) -> NoReturn:
        """For a joiner that was not taken in before its script was done.

        Raises:
            Dismissed: this worker is not needed, or the job is done.
        """
        raise NotImplementedError

    def clock(self) -> float | None:
        """The coordinator's clock, in seconds; None if there is no coordinator. Asks it, and waits. From any thread.

        Raises:
            LaunchError: it does not answer.
        """
        return None

    def away(self) -> str:
        """Why the job may go on without this worker, in words; empty as long as it cannot. From any thread."""
        return ""

    def cut_off(self, seconds: float) -> None:
        """Lose the others, and the coordinator for so many seconds, as a network fault does.

        Args:
            seconds: until the coordinator can be reached again.
        """
        self.workers.abort()

    def close(self) -> None:
        """Let go of the connections."""
        self._workers.close()
        if self._mesh is not None:
            self._mesh.close()


class Fixed(Membership):
    """The workers that were started together. Without one of them the others cannot go on."""
