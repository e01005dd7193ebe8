"""The transport over a ``torch.distributed`` process group: Gloo, or NCCL on GPUs."""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from unisono.errors import NoProgress, WorkerLost
from unisono.plan.split import Split
from unisono.plan.tree import Node
from unisono.reduce.buckets import ALIGNMENT
from unisono.reduce.transport import Transport


class ProcessGroupTransport(Transport):
    """All-to-all of the partial sums, the tree finished locally, all-gather of the results.

    Every worker finishes the tree for 1/W of the elements. Together that moves the bytes of a ring
    all-reduce in 2 rounds instead of 2(W-1).

    Args:
        group: a ``ProcessGroupGloo`` or ``ProcessGroupNCCL``; used by one thread, closed by :meth:`close`.
        device: where the backend wants its tensors; others are staged there and back.
    """

    def __init__(self, group: Any, rank: int, split: Split, device: torch.device) -> None:
        super().__init__(rank, split)
        self._group = group
        self._device = device
        covers = [self.tree.cover(split.of(peer).start, split.of(peer).stop) for peer in range(split.workers)]
        self._covers: tuple[tuple[Node, ...], ...] = tuple(covers)
        self._exchanges: dict[tuple[Hashable, int, torch.dtype], _Exchange] = {}

    def reduce(self, bucket: Hashable, partials: Sequence[Tensor], divisor: float | None = None) -> Tensor:
        """All-to-all, finish the tree on this worker's part, all-gather."""
        first = partials[0]
        if first.device != self._device:
            return self.reduce(bucket, [partial.to(self._device) for partial in partials], divisor).to(first.device)
        key = (bucket, first.numel(), first.dtype)
        if key not in self._exchanges:
            self._exchanges[key] = _Exchange(first, self.rank, self._covers)
        exchange = self._exchanges[key]
        with _named_errors(self.rank):
            self._group.alltoall_base(
                exchange.received, exchange.pack(partials), exchange.receive_sizes, exchange.send_sizes
            ).wait()
            part = self.tree.finish(exchange.partials(), lambda left, right: left.add_(right))
            if divisor is not None:
                part.div_(divisor)
            exchange.part[: part.numel()].copy_(part)
            self._group._allgather_base(exchange.gathered, exchange.part).wait()
        return exchange.total

    def reduce_native(self, total: Tensor) -> Tensor:
        """The backend's all-reduce."""
        staged = total.to(self._device)
        with _named_errors(self.rank):
            self._group.allreduce([staged]).wait()
        return total if staged is total else total.copy_(staged)

    def all_gather(self, row: Tensor) -> Tensor:
        """One all-gather of rows of equal length."""
        staged = row.to(self._device).contiguous()
        rows = torch.empty((self.world_size, row.numel()), dtype=row.dtype, device=self._device)
        with _named_errors(self.rank):
            self._group._allgather_base(rows.view(-1), staged).wait()
        return rows.to(row.device)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """One broadcast."""
        staged = tensor.detach().to(self._device).contiguous()
        with _named_errors(self.rank):
            self._group.broadcast(staged, source).wait()
        with torch.no_grad():
            tensor.copy_(staged)

    def close(self) -> None:
        """Shut the group's connections down without waiting for the others."""
        self._exchanges.clear()
        if self._group is not None:
            self._group.abort()
        self._group = None


class _Exchange:
    """The buffers and sizes for reducing buckets of one length and dtype, allocated once."""

    def __init__(self, like: Tensor, rank: int, covers: Sequence[Sequence[Node]]) -> None:
        workers = len(covers)
        length = -(-like.numel() // (ALIGNMENT * workers)) * ALIGNMENT
        starts = [min(peer * length, like.numel()) for peer in range(workers + 1)]
        sizes = [stop - start for start, stop in pairwise(starts)]
        mine = sizes[rank]
        self._starts = starts
        self._nodes = [node for cover in covers for node in cover]
        pieces = len(covers[rank])
        self._packed = like.new_empty(pieces * like.numel() if pieces > 1 else 0)
        self.send_sizes = [len(covers[rank]) * size for size in sizes]
        self.receive_sizes = [len(cover) * mine for cover in covers]
        self.received = like.new_empty(len(self._nodes) * mine)
        self.part = like.new_zeros(length)
        self.gathered = like.new_empty(workers * length)
        self.total = self.gathered[: like.numel()]

    def pack(self, partials: Sequence[Tensor]) -> Tensor:
        """The partial sums in the order in which they are sent: by receiver, then from left to right."""
        if len(partials) == 1:
            return partials[0]
        pieces = [partial[start:stop] for start, stop in pairwise(self._starts) for partial in partials]
        return torch.cat(pieces, out=self._packed)

    def partials(self) -> dict[Node, Tensor]:
        """What was received: this worker's part of every partial sum of everybody."""
        parts = self.received.view(len(self._nodes), -1)
        return dict(zip(self._nodes, parts, strict=True))


@contextmanager
def _named_errors(rank: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if "timed out" in first_line.lower():
            raise NoProgress(
                f"rank {rank} waited for another worker in vain: {first_line}. It hangs, or takes longer for "
                f"something than the others: see its log, or allow more with unisono.init(failure_timeout_s=…)"
            ) from error
        raise WorkerLost(
            f"rank {rank} lost its connection to another worker: {first_line}. Look for the first error of the others"
        ) from error
