"""What becomes of tensors of which each shard has made its own: the same, however shards are split among workers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import reduce

import torch
from torch import Tensor

from unisono.plan.tree import Node, SummationTree
from unisono.reduce.buckets import ALIGNMENT
from unisono.reduce.transport import Transport


class Combining:
    """Combines what the shards of all workers have made. Every method but the first is collective.

    Args:
        tree: the summation tree.
        mine: the shards of this worker.
    """

    def __init__(self, tree: SummationTree, mine: range) -> None:
        self._tree, self._mine = tree, mine

    def added(
        self,
        transport: Transport,
        name: Hashable,
        leaf: Callable[[int], Sequence[Tensor]],
        share: Callable[[int], float],
    ) -> Sequence[Tensor]:
        """The sums over all shards, along the summation tree, each in one dimension.

        Args:
            transport: the transport between the workers.
            name: a name for these sums, the same in every step.
            leaf: a function that returns what a shard has made, tensors of one dtype.
            share: a function that returns by what a shard's tensors are multiplied; one of 0 counts for nothing.
        """
        leaves = {Node(shard, shard + 1): _flat(leaf(shard), share(shard)) for shard in self._mine}
        cover = self._tree.cover(self._mine.start, self._mine.stop)
        partials = [self._tree.finish(leaves, lambda left, right: left.add_(right), node) for node in cover]
        if not self._mine:  # a server tells what they are like
            partials = [_flat(leaf(0), 0.0)]
        sizes = [tensor.numel() for tensor in leaf(0)]
        total = partials[0] if self._tree.shards == 1 else transport.reduce(name, partials)
        found: Sequence[Tensor] = total[: sum(sizes)].split(sizes)
        return found

    def greatest(self, transport: Transport, base: Tensor, made: Sequence[Tensor]) -> Tensor:
        """The greatest of each element, over what was there and what all shards have made of it."""
        own = reduce(torch.maximum, made, base)
        rows = transport.all_gather(own.reshape(-1))
        # Whichever zero is taken, the sum has no sign.
        return reduce(torch.maximum, rows.unbind()).view(base.shape) + torch.zeros((), dtype=base.dtype)

    def joined(self, transport: Transport, base: Tensor, made: Sequence[Tensor]) -> Tensor:
        """What was there, and behind it what all shards have made, in the order of shards."""
        own = torch.cat([base[:0], *made])
        lengths = transport.all_gather(torch.tensor([len(own)])).reshape(-1).tolist()
        padding = own.new_zeros((max(lengths) - len(own), *own.shape[1:]))
        rows = transport.all_gather(torch.cat([own, padding]).reshape(-1))
        parts = (row[: length * _row_size(base)] for row, length in zip(rows.unbind(), lengths, strict=True))
        return torch.cat([base, *(part.view(-1, *base.shape[1:]) for part in parts if part.numel())])


def _row_size(base: Tensor) -> int:
    return base[0:1].numel() if len(base) else base.new_zeros((1, *base.shape[1:])).numel()


def _flat(tensors: Sequence[Tensor], share: float) -> Tensor:
    values = [tensor.reshape(-1) for tensor in tensors]
    flat = torch.cat([*values, values[0].new_zeros(-sum(map(len, values)) % ALIGNMENT)])
    # A buffer may hold infinities, and an empty shard has no part in them.
    return flat.zero_() if not share else flat if share == 1.0 else flat.mul_(share)
