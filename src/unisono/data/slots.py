"""Memory that a process shares with those it forks: batches are written there, and read where they lie."""

import mmap
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, MutableMapping
from copy import copy
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

# The leaves of a batch, whatever holds them.

Leaf = TypeVar("Leaf")


def replaced(tree: Any, kind: type[Leaf], replace: Callable[[Leaf], Any], known: dict[int, Any] | None = None) -> Any:
    """A copy of lists, tuples and mappings in which every leaf of one kind is replaced.

    Args:
        tree: lists, tuples and mappings; anything else is a leaf.
        kind: the type of the leaves to replace.
        replace: a function that returns a leaf's replacement; called once for each leaf, also for one in several
            places.
        known: the replacements so far, by the ids of leaves.
    """
    known = {} if known is None else known  # no closure that knows itself: it would keep the tensors until a collection
    if isinstance(tree, kind):
        if id(tree) not in known:
            known[id(tree)] = replace(tree)
        return known[id(tree)]
    if isinstance(tree, list | tuple):
        parts = [replaced(part, kind, replace, known) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    if isinstance(tree, MutableMapping):
        changed = copy(tree)  # a defaultdict, or a class of its own, stays what it is
        changed.update({key: replaced(value, kind, replace, known) for key, value in tree.items()})
        return changed
    return tree


ALIGNMENT = 64
"""Bytes: tensors begin at multiples of it, as torch's own do."""


class TensorDescriptor(NamedTuple):
    """The offset and the layout of a tensor in a slot's memory."""

    offset: int
    elements: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Packed(NamedTuple):
    """A batch whose tensors lie in a slot.

    Attributes:
        tree: the batch, with a :class:`TensorDescriptor` for each tensor.
        size: bytes of the slot's memory that it takes.
    """

    tree: Any
    size: int


class Slot:
    """Room for one batch at a time. It has no name, grows with what is written, and is gone with its last user.

    Make it before the processes are forked that write to it.
    """

    def __init__(self) -> None:
        self._descriptor = _unnamed_file()
        self._map: mmap.mmap | None = None

    def write(self, batch: Any) -> Packed:
        """Copy a batch's tensors here. What cannot lie here as it is stays in the tree."""
        described: list[tuple[TensorDescriptor, Tensor]] = []
        end = 0

        def describe(tensor: Tensor) -> Any:
            nonlocal end
            if not _is_plain(tensor):
                return tensor
            offset = -(-end // ALIGNMENT) * ALIGNMENT
            end = offset + tensor.numel() * tensor.itemsize
            descriptor = TensorDescriptor(offset, tensor.numel(), tensor.dtype, tuple(tensor.shape), tensor.stride())
            described.append((descriptor, tensor))
            return descriptor

        tree = replaced(batch, Tensor, describe)
        memory = self._memory(end)
        for descriptor, tensor in described:
            _at(memory, descriptor).copy_(tensor)
        return Packed(tree, end)

    def lend(self, packed: Packed, when_unused: Callable[[], None]) -> Any:
        """The batch that was written here. Its tensors are not copied: they lie in this memory.

        ``when_unused`` is called once the last of the tensors, and of whatever shares their memory, is gone.
        """
        lease = memoryview(self._memory(packed.size))
        weakref.finalize(lease, when_unused).atexit = False
        return replaced(packed.tree, TensorDescriptor, lambda descriptor: _at(lease, descriptor))

    def copied(self, packed: Packed) -> Any:
        """Return the packed values with tensors of their own."""
        memory = self._memory(packed.size)
        return replaced(packed.tree, TensorDescriptor, lambda descriptor: _at(memory, descriptor).clone())

    def close(self) -> None:
        """Let go of the memory. Tensors that are still in use keep theirs."""
        self._map = None
        os.close(self._descriptor)

    def _memory(self, size: int) -> mmap.mmap:
        if self._map is None or len(self._map) < size:
            if os.fstat(self._descriptor).st_size < max(size, 1):
                os.ftruncate(self._descriptor, size + size // 4 + mmap.PAGESIZE)
            self._map = mmap.mmap(self._descriptor, 0)  # all of it
        return self._map


class Slots:
    """Slots of shared memory in which batches travel, and are used where they lie.

    A slot is filled again when nobody has a tensor of its batch any more.
    """

    def __init__(self, count: int) -> None:
        self.all = [Slot() for _ in range(count)]
        self._free = deque(range(count))

    def take(self) -> int | None:
        """The number of a free slot, which is free no more; None if there is none."""
        return self._free.popleft() if self._free else None

    def give_back(self, number: int) -> None:
        """Note that a slot is free again."""
        self._free.append(number)

    def received(self, packed: Packed, number: int) -> Any:
        """Return the values that a process has left in a slot. The last free slot is never lent: requests need it."""
        if self._free:
            return self.all[number].lend(packed, partial(self.give_back, number))
        batch = self.all[number].copied(packed)  # the script keeps many batches
        self.give_back(number)
        return batch

    def close(self) -> None:
        """Let go of their memory. Tensors that are in use keep theirs."""
        slots, self.all = self.all, []
        for slot in slots:
            slot.close()


def _unnamed_file() -> int:
    if hasattr(os, "memfd_create"):  # Linux; needs no space in /dev/shm
        return os.memfd_create("unisono-loader")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _is_plain(tensor: Tensor) -> bool:
    """Whether its elements, in the order of memory, are all there is to it."""
    return (
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        # Other strides could lead to other kernels, and so to other bits: they stay, where nothing overlaps.
        and (tensor.is_contiguous() or torch.empty_like(tensor).stride() == tensor.stride())
    )


def _at(memory: Any, descriptor: TensorDescriptor) -> Tensor:
    if not descriptor.elements:
        return torch.empty_strided(descriptor.shape, descriptor.stride, dtype=descriptor.dtype)
    flat = torch.frombuffer(memory, dtype=descriptor.dtype, count=descriptor.elements, offset=descriptor.offset)
    return flat.as_strided(descriptor.shape, descriptor.stride)
