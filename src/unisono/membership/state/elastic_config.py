"""The settings of an elastic job, as the user has given them."""

from dataclasses import dataclass

from unisono.errors import JobError


@dataclass(frozen=True, slots=True)
class ElasticConfig:
    """The settings of an elastic job, as the user has given them.

    Attributes:
        smallest: the fewest workers with which training starts. Once it is under way, survivors go on, however few.
        largest: the most workers.
        wanted: the number of workers; None for as many as the agents have room for.
        max_restarts: times ``largest`` is how many lost workers are replaced at most.
        restart_on_error: replace a worker that an exception of its script has ended, too.
        failure_timeout_s: seconds without a sign after which a worker or an agent counts as lost.
        devices: the number of devices of each worker.

    Raises:
        JobError: these contradict each other.
    """

    smallest: int = 1
    largest: int = 1
    wanted: int | None = None
    max_restarts: int = 0
    restart_on_error: bool = False
    failure_timeout_s: float = 300.0
    devices: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.smallest <= self.largest:
            raise JobError(f"{self.smallest}:{self.largest} workers: at least 1, and first the fewest, then the most")
        if self.wanted is not None and not self.smallest <= self.wanted <= self.largest:
            raise JobError(f"{self.wanted} workers are not between {self.smallest} and {self.largest}")
        if self.devices < 1:
            raise JobError(f"workers of {self.devices} devices: at least 1 is needed")
        if self.max_restarts < 0 or not self.failure_timeout_s > 0:
            raise JobError("restarts cannot be fewer than 0, and a timeout has to be longer than 0 s")
