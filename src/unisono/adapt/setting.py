"""How a step was computed."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Setting:
    """By whom and how a step was computed: what its times depend on.

    Attributes:
        generation: of the workers.
        world_size: how many there were.
        batch_size: samples in the global batch that was wanted; the last one of an epoch may have had fewer.
        shards: into which it was cut.
        topology: the way of the partial sums over a process group; empty where there was none.
        departures: workers that had been lost by then, or had left on notice, in the whole job.
    """

    generation: int = 0
    world_size: int = 0
    batch_size: int = 0
    shards: int = 0
    topology: str = ""
    departures: int = 0
