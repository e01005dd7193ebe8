"""Audits: which shards are computed twice, by whom, and what follows from the results."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unisono.plan.order import Stream, stream_seed

# Which part of something large is looked at in a step, so that all of it is in turn.

ALIGNMENT = 64


def windows(lengths: Sequence[int], size: int, budget: int | None, turn: int) -> list[range]:
    """Of each buffer the elements that are looked at: all of them, or equal parts in turn.

    Args:
        lengths: the buffers' lengths, in elements.
        size: bytes of all buffers together.
        budget: bytes that may be looked at in one turn; None for all.
        turn: the number of the turn. As many as there are parts, one after the other, see every element.
    """
    if budget is None or size <= budget:
        return [range(length) for length in lengths]
    if budget <= 0:
        return [range(0) for _ in lengths]
    parts = -(-size // budget)
    return [_part(length, turn % parts, parts) for length in lengths]


def _part(length: int, number: int, parts: int) -> range:
    width = -(-length // (ALIGNMENT * parts)) * ALIGNMENT
    start = min(number * width, length)
    return range(start, min(start + width, length))


# Which shards are computed twice, by whom, and what follows from what comes of it.

WORDS = 2.0**64


def audited(seed: int, share: float, step: int, call: int, shards: int) -> tuple[int, ...]:
    """The shards of a call of ``step.run`` that are computed again: the same on any number of workers.

    Args:
        seed: the job's seed.
        share: the share of the work that is computed twice.
        step: the number of the step in the job.
        call: the number of the call in the step.
        shards: the number of shards in the batch.
    """
    return tuple(shard for shard in range(shards) if stream_seed(seed, Stream.AUDIT, step, call, shard) < share * WORDS)


def auditors(owner: int, workers: int, step: int, shard: int) -> tuple[int, int]:
    """Who computes a shard again, and who does if those two differ.

    As far as there are so many workers all three are different ones. Of two, both compute it once more.

    Args:
        owner: the rank that computes the shard anyway.
        workers: the number of workers.
        step: the number of the step: not always the same workers audit each other.
        shard: the number of the shard: not always the same workers audit each other.
    """
    others = [rank for rank in range(workers) if rank != owner] or [owner]
    first = (step + shard) % len(others)
    return others[first], others[(first + 1) % len(others)]


@dataclass(frozen=True, slots=True)
class AuditResult:
    """The result of one shard's audit.

    Attributes:
        shard: the shard's number in the batch.
        right: the ranks whose results are those of the others.
        wrong: the rank that computes otherwise than the others; None if there is none, or nobody can say who.
        is_transient: whether whoever was wrong computes right again.
        is_clean: whether all computed the same.
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


def judged(shard: int, first: Mapping[int, Sequence[str]]) -> AuditResult | None:
    """What follows from all results of a shard.

    Args:
        shard: the shard's number in the batch.
        first: digests of each rank's results, from the first to the last.

    Returns:
        nothing as long as nobody can say who is wrong.
    """
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
