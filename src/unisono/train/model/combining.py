"""What becomes of tensors of which each shard has made its own: the same, however shards are split among workers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import reduce

import torch
from torch import Tensor

from unisono.checkpoint.layout import DTYPES
from unisono.plan.tree import Node, SummationTree
from unisono.reduce.buckets import ALIGNMENT
from unisono.reduce.transport import Transport
from unisono.train.model.places import MOST_DIMENSIONS


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

    def furthest(self, pick: Pick, transport: Transport, base: Tensor, made: Sequence[Tensor]) -> Tensor:
        """The greatest or least of each element, over what was there and what all shards have made of it."""
        own = reduce(pick, made, base)
        rows = transport.all_gather(own.reshape(-1))
        # Whichever zero is taken, the sum has no sign.
        return reduce(pick, rows.unbind()).view(base.shape) + torch.zeros((), dtype=base.dtype)

    def joined(self, transport: Transport, base: Tensor, made: Sequence[Tensor]) -> Tensor | None:
        """What was there, and behind it what all shards have made, in the order of shards; None if they are unlike."""
        own = [tensor for tensor in made if len(tensor)]
        forms = transport.all_gather(_form_of(own)).tolist()
        told = {tuple(form) for _, *form in forms if any(form)}
        if not told:
            return base.clone()
        told |= {tuple(_form_of([base]).tolist()[1:])} if len(base) else set()
        code, dimensions, *shape = told.pop()
        if told or code < 0:
            return None
        most = max(rows for rows, *_ in forms)
        like = torch.empty((0, *shape[: dimensions - 1]), dtype=_CODES[code - 1], device=base.device)
        row_bytes = like.new_empty((1, *like.shape[1:])).nbytes
        data = torch.cat([like, *own]).reshape(-1).view(torch.uint8)
        sent = transport.all_gather(torch.cat([data, data.new_zeros(most * row_bytes - len(data))]))
        parts = [row[: rows * row_bytes] for row, (rows, *_) in zip(sent.unbind(), forms, strict=True)]
        joined = torch.cat(parts).view(like.dtype).view(-1, *like.shape[1:])
        return torch.cat([base, joined]) if len(base) else joined


Pick = Callable[[Tensor, Tensor], Tensor]
"""Picks the greater or the lesser one of two tensors' elements."""

_CODES = tuple(DTYPES[name] for name in sorted(DTYPES))


def _form_of(tensors: Sequence[Tensor]) -> Tensor:
    """How many rows tensors have together, and their dtype, dimensions and further sizes, as numbers.

    The sizes are zeros where there are no tensors, and -1 where they differ.
    """
    forms = {(one.dtype, one.shape[1:]) for one in tensors}
    row = torch.zeros(3 + MOST_DIMENSIONS, dtype=torch.int64)
    if len(forms) == 1:
        ((dtype, shape),) = forms
        row[1], row[2] = _CODES.index(dtype) + 1, len(shape) + 1
        row[3 : 3 + len(shape)] = torch.tensor(shape, dtype=torch.int64)
    elif forms:
        row[1:] = -1
    row[0] = sum(map(len, tensors))
    return row


def _flat(tensors: Sequence[Tensor], share: float) -> Tensor:
    values = [tensor.reshape(-1) for tensor in tensors]
    flat = torch.cat([*values, values[0].new_zeros(-sum(map(len, values)) % ALIGNMENT)])
    # A buffer may hold infinities, and an empty shard has no part in them.
    return flat.zero_() if not share else flat if share == 1.0 else flat.mul_(share)
