"""Central weights, or central sums, on servers."""

from dataclasses import dataclass
from typing import ClassVar

from unisono.errors import JobError
from unisono.sync.strategy import ROUND, Strategy

LAMBDA = 0.04
"""The strength of delay compensation with which its authors trained on CIFAR-10."""


@dataclass(frozen=True)
class ParameterServer(Strategy):
    """Servers hold what is central; workers push gradients and pull what became of them.

    Synchronous: each server finishes the sums of its share of the gradients, Σ gᵢ / n along the job's summation tree,
    and workers pull them and make the update (as BytePS does; Jiang et al., OSDI 2020). Exact, with the digest of
    :class:`AllReduce`, and nothing is lost with a server.

    Asynchronous: a worker pulls the weights w, computes the gradient g of a whole batch, and pushes it; the servers
    make the update at once, on weights that others may have changed meanwhile. The staleness τ of a gradient is the
    number of updates since its weights were read (Dean et al., NIPS 2012).

    - ``staleness_aware``: the learning rate is η / max(1, τ) (Zhang et al., arXiv 1511.05950).
    - ``delay_compensation`` λ: the gradient is g + λ·g⊙g⊙(w - w_read) (Zheng et al., arXiv 1609.08326).
    - ``max_staleness``: nobody gets so far ahead that a gradient would be staler (Ho et al., NIPS 2013).

    Args:
        synchronous: whether all workers make a step together.
        servers: so many workers, those of the highest ranks, serve and compute nothing; 0: every worker serves a share,
            and computes, too.
        max_staleness: None for no limit.
        staleness_aware: lower the rate of stale gradients.
        delay_compensation: λ; 0 for none. The authors used 0.04.
        round_every: as for :class:`Rounds`, if not synchronous.

    Raises:
        JobError: a value is out of range, or needs ``synchronous=False``.
    """

    name: ClassVar[str] = "parameter-server"

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
        """If synchronous."""
        return self.synchronous

    @property
    def round_steps(self) -> int:
        """Of the asynchronous form: as given."""
        return 1 if self.synchronous else self.round_every

    def require(self, workers: int | None, *, shards_optimizer: bool = False) -> None:
        """Also refuse servers without anybody to serve."""
        super().require(workers, shards_optimizer=shards_optimizer)
        if workers is not None and self.servers and self.servers >= workers:
            raise JobError(
                f"strategy={str(self)!r} with {workers} worker{'s' if workers > 1 else ''}: {self.servers} of them "
                f"would serve, which leaves nobody to compute. Start more, or use fewer servers"
            )
        if self.servers and shards_optimizer:
            raise JobError(
                f"shard_optimizer=True splits the update over all workers, and with strategy={str(self)!r} some only "
                f"serve: leave one of them out"
            )
