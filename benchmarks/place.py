"""Where a worker stands among the workers of its crew."""

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """A worker's rank, and the number of workers."""

    rank: int
    workers: int

    @classmethod
    def of(cls, environ: Mapping[str, str] = os.environ) -> "Place":
        """As the variables of ``torch.distributed`` say it."""
        return cls(int(environ["RANK"]), int(environ["WORLD_SIZE"]))

    def part(self, samples: int) -> slice:
        """This worker's samples of a global batch."""
        return slice(self.rank * samples // self.workers, (self.rank + 1) * samples // self.workers)
