"""What all shards of a step weigh together, and whether all workers cut its batch alike."""

from collections.abc import Sequence

import torch

from unisono.errors import PolicyError
from unisono.plan.tree import Node
from unisono.reduce.transport import Transport

_MOST = 64
"""Partial sums of one worker: two for each level of the summation tree at most."""


def total_weight(transport: Transport, weights: Sequence[float]) -> float:
    """The sum of the weights of all shards, along the summation tree. Collective.

    What travels is of one size for any number of shards. So workers that cut a batch differently find out here,
    before anything travels whose size depends on it.

    Args:
        transport: to the other workers.
        weights: of this worker's shards, in order.

    Raises:
        PolicyError: workers have different numbers of shards; says how many each has.
    """
    tree, split = transport.tree, transport.split
    covers = [tree.cover(split.of(rank).start, split.of(rank).stop) for rank in range(split.workers)]
    leaves = {Node(shard, shard + 1): weight for shard, weight in zip(split.of(transport.rank), weights, strict=True)}
    partials = [tree.finish(leaves, _add, node) for node in covers[transport.rank]]
    rows = _exchanged(transport, partials)
    told = (zip(cover, row, strict=False) for cover, row in zip(covers, rows, strict=True))
    return tree.finish({node: value for one in told for node, value in one}, _add)


def require_equal_shards(transport: Transport) -> None:
    """Refuse to go on with workers that cut a batch differently. Collective; meets :func:`total_weight` of the others.

    Raises:
        PolicyError: says how many shards each has.
    """
    _exchanged(transport, [])


def _exchanged(transport: Transport, partials: Sequence[float]) -> list[list[float]]:
    row = torch.zeros(1 + _MOST, dtype=torch.float64)
    row[: 1 + len(partials)] = torch.tensor([transport.split.shards, *partials], dtype=torch.float64)
    rows = transport.all_gather(row).tolist()
    shards = [int(one[0]) for one in rows]
    if len(set(shards)) > 1:
        listed = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(shards))
        raise PolicyError(f"the workers cut one batch into different numbers of shards ({listed})")
    return [one[1:] for one in rows]


def _add(left: float, right: float) -> float:
    return left + right
