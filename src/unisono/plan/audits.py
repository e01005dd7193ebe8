"""Audits: which shards are computed twice, by whom, and what follows from the results."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unisono.plan.order import Stream, stream_seed

WORDS = 2.0**64


def audited(seed: int, share: float, step: int, call: int, shards: int) -> tuple[int, ...]:
    """The shards of a call of ``step.run`` that are computed again: the same on any number of workers."""
    return tuple(shard for shard in range(shards) if stream_seed(seed, Stream.AUDIT, step, call, shard) < share * WORDS)


def auditors(owner: int, workers: int, step: int, shard: int) -> tuple[int, int]:
    """Who computes a shard again, and who does if those two differ.

    As far as there are so many workers all three are different ones. Of two, both compute it once more. ``owner``
    computes it anyway. ``step`` and ``shard`` decide, so that not always the same workers audit each other.
    """
    others = [rank for rank in range(workers) if rank != owner] or [owner]
    first = (step + shard) % len(others)
    return others[first], others[(first + 1) % len(others)]


@dataclass(frozen=True, slots=True)
class AuditResult:
    """The result of one shard's audit.

    Attributes:
        right: the ranks whose results are those of the others.
        wrong: the rank that computes otherwise than the others; None if there is none, or nobody can say who.
        is_transient: whether whoever was wrong computes right again.
    """

    shard: int
    right: frozenset[int] = frozenset()
    wrong: int | None = None
    is_transient: bool = False
    is_clean: bool = False

    @property
    def is_proof(self) -> bool:
        """Whether it says of a worker that it computes wrongly every time."""
        return self.wrong is not None and not self.is_transient


def judged_audit(shard: int, first: Mapping[int, Sequence[str]]) -> AuditResult | None:
    """What follows from all results of a shard; nothing as long as nobody can say who is wrong."""
    votes = Counter(digest for results in first.values() for digest in results)
    if len(votes) == 1:
        return AuditResult(shard, frozenset(first), is_clean=True)
    right, most = votes.most_common(1)[0]
    if 2 * most <= votes.total():
        return None
    odd = [rank for rank, results in first.items() if any(digest != right for digest in results)]
    if len(odd) != 1:
        return None
    (wrong,) = odd
    return AuditResult(shard, frozenset(first) - {wrong}, wrong, is_transient=first[wrong][-1] == right)
