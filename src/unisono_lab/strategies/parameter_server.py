"""Central weights, or central sums, on servers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from unisono.errors import JobError
from unisono.sync import ROUND, Strategy

# Which server holds which tensors.


def shares(sizes: Sequence[int], servers: int) -> list[list[int]]:
    """Distribute tensors so that all servers hold about as many bytes: the largest ones first, each to the emptiest.

    The numbers of each server's tensors come in order, and are the same for the same sizes.
    """
    held: list[list[int]] = [[] for _ in range(servers)]
    filled = [0] * servers
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        emptiest = min(range(servers), key=lambda server: (filled[server], server))
        held[emptiest].append(number)
        filled[emptiest] += sizes[number]
    return [sorted(numbers) for numbers in held]


# Which worker may go on without making the gradient of another one too stale.


class StalenessBound:
    """Keeps the staleness of gradients within a bound.

    A worker reads the weights, computes, and asks to push; meanwhile others push. Pushes on their way may overtake each
    other, so the staleness of a gradient may reach the number of other pushes that were granted before it arrived,
    less those that had arrived when its worker read. A read or a push is granted if no push on its way can exceed the
    bound by it, and if all workers that have read can still push within the bound, in the order in which they read. So
    the worker that read first may push as soon as nothing is on its way, and no worker waits for ever.
    """

    def __init__(self, bound: int | None) -> None:
        self._bound = bound
        self._granted = self._arrived = 0
        self._reads: dict[int, int] = {}  # by worker, the number of pushes that had arrived when it read
        self._pushes: dict[int, int] = {}  # the same number, of workers whose push is on its way

    @property
    def out(self) -> list[int]:
        """The workers that have read, and whose push has yet to arrive."""
        return sorted({*self._reads, *self._pushes})

    def read(self, worker: int) -> bool:
        """Ask to read; returns whether it is granted."""
        if not self._is_bearable(self._granted, [*self._reads.values(), self._arrived]):
            return False
        self._reads[worker] = self._arrived
        return True

    def push(self, worker: int) -> bool:
        """Ask to push the gradient that was computed since the read; returns whether it is granted."""
        others = [arrived for other, arrived in self._reads.items() if other != worker]
        on_their_way = [*self._pushes.values(), self._reads[worker]]
        if not self._is_bearable(self._granted + 1, others, on_their_way):
            return False
        self._pushes[worker] = self._reads.pop(worker)
        self._granted += 1
        return True

    def arrived(self, worker: int) -> None:
        """Count the push of a worker, which has arrived on all servers."""
        del self._pushes[worker]
        self._arrived += 1

    def give_up(self, worker: int) -> None:
        """Forget the read of a worker that will not push."""
        self._reads.pop(worker, None)

    def _is_bearable(self, granted: int, reads: Iterable[int], on_their_way: Iterable[int] = ()) -> bool:
        if self._bound is None:
            return True
        stalest = [granted - 1 - arrived for arrived in on_their_way]
        stalest += [granted + position - arrived for position, arrived in enumerate(sorted(reads))]
        return all(staleness <= self._bound for staleness in stalest)


@dataclass(frozen=True)
class ParameterServer(Strategy):
    """Servers hold gradient sums or weights; workers push gradients and pull the results.

    Synchronous: each server finishes the sums of its share of the gradients, Σ gᵢ / n along the job's summation tree,
    and workers pull them and make the update (as BytePS does; Jiang et al., OSDI 2020). Exact, with the digest of
    :class:`AllReduce`, and nothing is lost with a server.

    Asynchronous: a worker pulls the weights w, computes the gradient g of a whole batch, and pushes it; the servers
    make the update at once, on weights that others may have changed meanwhile. The staleness τ of a gradient is the
    number of updates since its weights were read (Dean et al., NIPS 2012).

    - ``staleness_aware``: the learning rate is η / max(1, τ) (Zhang et al., arXiv 1511.05950).
    - ``delay_compensation`` λ: the gradient is g + λ·g⊙g⊙(w - w_read) (Zheng et al., arXiv 1609.08326).
    - ``max_staleness``: workers wait before a gradient would become staler than this (Ho et al., NIPS 2013).

    Args:
        synchronous: whether all workers make a step together.
        servers: the number of workers, those of the highest ranks, that serve and compute nothing; with 0 every worker
            serves a share, and computes, too.
        max_staleness: the largest staleness of a gradient; None for no limit.
        staleness_aware: whether to lower the learning rate of stale gradients.
        delay_compensation: λ, the strength of the compensation; 0 for none. The authors used 0.04.
        round_every: the number of steps in a round, as of :class:`Rounds`, if not synchronous.

    Raises:
        JobError: a value is out of range, or needs ``synchronous=False``.
    """

    name: ClassVar[str] = "parameter-server"
    part: ClassVar[str] = "unisono_lab.strategies.asynchronous_server:AsynchronousServer"

    synchronous: bool = True
    servers: int = 0
    max_staleness: int | None = None
    staleness_aware: bool = False
    delay_compensation: float = 0.0
    round_every: int = ROUND

    def __post_init__(self) -> None:
        self._require_switch("synchronous")
        self._require_switch("staleness_aware")
        self._require_count("servers", 0)
        if self.max_staleness is not None:
            self._require_count("max_staleness", 0)
        self._require_rate("delay_compensation")
        self._require_count("round_every", 1)
        stale = self.max_staleness is not None or self.staleness_aware or self.delay_compensation
        if self.synchronous and stale:
            raise JobError(
                "ParameterServer(synchronous=True) has no stale gradients: leave max_staleness, staleness_aware and "
                "delay_compensation out, or use synchronous=False"
            )

    @property
    def is_exact(self) -> bool:  # type: ignore[override]
        """Whether the strategy is exact: it is if synchronous."""
        return self.synchronous

    @property
    def central_servers(self) -> int | None:
        """The number of servers; None if it is asynchronous."""
        return self.servers if self.synchronous else None

    @property
    def round_steps(self) -> int:
        """The number of steps in a round: 1 if synchronous, else as given."""
        return 1 if self.synchronous else self.round_every

    def require(self, workers: int | None) -> None:
        """Refuse also servers without a worker that computes."""
        super().require(workers)
        if workers is not None and self.servers and self.servers >= workers:
            raise JobError(
                f"strategy={str(self)!r} with {workers} worker{'s' if workers > 1 else ''}: {self.servers} of them "
                f"would serve, so none would compute. Start more workers, or use fewer servers"
            )
