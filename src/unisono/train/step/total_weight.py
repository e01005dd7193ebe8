"""What all shards of a step weigh together, and whether all workers' policies have decided alike before it."""

from collections.abc import Sequence

import torch

from unisono.errors import PolicyError
from unisono.plan.tree import Node
from unisono.reduce.transport import Transport

_MOST = 64
"""Partial sums of one worker: two for each level of the summation tree at most."""


def total_weight(transport: Transport, weights: Sequence[float], decided: int = 0) -> float:
    """The sum of the weights of all shards, along the summation tree. Collective.

    What travels is of one size, whatever was decided. So workers whose policies have decided differently find out here,
    before anything travels whose size or way depends on it.

    Args:
        transport: to the other workers.
        weights: of this worker's shards, in order.
        decided: a digest of what its policies decided before the step, below 2**53.

    Raises:
        PolicyError: workers have other digests, or other numbers of shards.
    """
    tree, split = transport.tree, transport.split
    covers = [tree.cover(split.of(rank).start, split.of(rank).stop) for rank in range(split.workers)]
    leaves = {Node(shard, shard + 1): weight for shard, weight in zip(split.of(transport.rank), weights, strict=True)}
    partials = [tree.finish(leaves, _add, node) for node in covers[transport.rank]]
    rows = _exchanged(transport, decided, partials)
    told = (zip(cover, row, strict=False) for cover, row in zip(covers, rows, strict=True))
    return tree.finish({node: value for one in told for node, value in one}, _add)


def require_agreement(transport: Transport, decided: int) -> None:
    """Refuse to go on with workers that decided otherwise. Collective; meets :func:`total_weight` of the others.

    Raises:
        PolicyError: workers have other digests, or other numbers of shards.
    """
    _exchanged(transport, decided, [])


def _exchanged(transport: Transport, decided: int, partials: Sequence[float]) -> list[list[float]]:
    row = torch.zeros(2 + _MOST, dtype=torch.float64)
    row[: 2 + len(partials)] = torch.tensor([transport.split.shards, decided, *partials], dtype=torch.float64)
    rows = transport.all_gather(row).tolist()
    if any(one[:2] != rows[0][:2] for one in rows):
        listed = ", ".join(f"rank {rank}: {int(one[0])}" for rank, one in enumerate(rows))
        raise PolicyError(f"the workers' policies decided differently; they have numbers of shards ({listed})")
    return [one[2:] for one in rows]


def _add(left: float, right: float) -> float:
    return left + right
