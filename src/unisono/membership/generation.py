"""One roster's life: who is in it, and which shards each worker computes."""

from dataclasses import dataclass

from unisono.plan.split import Split


@dataclass(frozen=True, slots=True)
class Generation:
    """A generation as one of its workers sees it.

    Attributes:
        number: 1, 2, 3 …, never reused within a run.
        rank: this worker's place in the roster.
        split: which shards each worker computes, unless some only serve.
        departures: workers that were lost or left on notice before it, in the whole job.
    """

    number: int
    rank: int
    split: Split
    departures: int = 0

    @property
    def world_size(self) -> int:
        """The number of workers."""
        return self.split.workers
