"""Messages between the stages of a model: tensors with their forms, and a few numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from unisono.data.generators import Generators
from unisono.errors import ModelError, Unreadable
from unisono.reduce.process_group import TensorUnderWay
from unisono.train.group.workers import Devices
from unisono.train.model.elsewhere import NOT_HANDED_ON, holds_elsewhere
from unisono.train.model.staging import Left, Received, Staging

HEADER = 256
"""The count of numbers, of 64 bits each, at the beginning of a message."""

GENERATORS = 4
"""The count of tensors with the state of the random generators, which come before all others in a message."""

_ALIGNED = 64

_DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16),
    *(torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128),
)

_MOST_DIMENSIONS = 8


@dataclass(frozen=True, slots=True)
class MessagePart:
    """A tensor of a message.

    Attributes:
        tensor: the tensor; an empty one in place of a missing one.
        is_marked: a flag that is sent with it.
    """

    tensor: Tensor
    is_marked: bool = False


@dataclass(frozen=True, slots=True)
class StageMessage:
    """A message from one block to another.

    Attributes:
        parts: tensors, which keep dtype, shape and layout.
    """

    numbers: Sequence[int]
    parts: Sequence[MessagePart]


class Channel:
    """One end of the connection between two blocks.

    Both ends know the size of the largest message in earlier passes. A message that is not larger is sent at once,
    behind its header. For a larger one, only the header is sent first, and the tensors follow by themselves. ``name``
    is the other end's, for messages to people.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        self._device, self._name = device, name
        self._capacity = self._largest = 0

    def begin(self) -> None:
        """Begin a pass through all shards: from now on, buffers have room for the largest message so far."""
        self._capacity = self._largest

    def buffer(self) -> Tensor:
        """Memory for the next message to come."""
        return torch.empty(8 * HEADER + self._capacity, dtype=torch.uint8, device=self._device)

    def packed(self, message: StageMessage) -> list[Tensor]:
        """A message as buffers to send: one, or two if it does not fit into the first.

        Raises:
            ModelError: it has too many tensors, or one that cannot be sent.
        """
        bases = [_base(part.tensor) for part in message.parts]
        spans = [_span(base) for base in bases]
        size = sum(_padded(span * base.itemsize) for span, base in zip(spans, bases, strict=True))
        header = [len(message.numbers), *message.numbers, len(bases), size]
        for part, base in zip(message.parts, bases, strict=True):
            header += [_code(part.tensor), part.is_marked, part.tensor.dim(), *part.tensor.shape, *base.stride()]
        if len(header) > HEADER:
            raise ModelError(
                f"{len(bases)} tensors and {len(message.numbers)} other values are to go to {self._name}, and there is "
                f"room for about {HEADER // 8} tensors: cut where fewer go on, or put some into one tensor"
            )
        self._largest = max(self._largest, size)
        first = self.buffer()
        first[: 8 * len(header)].view(torch.int64).copy_(torch.tensor(header, dtype=torch.int64))
        fits = size <= self._capacity
        rest = first[8 * HEADER :] if fits else torch.empty(size, dtype=torch.uint8, device=self._device)
        offset = 0
        for base, span in zip(bases, spans, strict=True):
            _placed(rest, offset, base.dtype, base.shape, base.stride()).copy_(base)
            offset += _padded(span * base.itemsize)
        return [first] if fits else [first, rest]

    def opened(self, buffer: Tensor, follows: Callable[[Tensor], object]) -> StageMessage:
        """The message in a buffer. ``follows`` receives the second buffer of a message into its argument.

        Raises:
            Unreadable: the buffer has no message.
        """
        header = _Header(buffer, self._name)
        self._largest = max(self._largest, header.size)
        memory = buffer[8 * HEADER :]
        if header.size > self._capacity:
            memory = torch.empty(header.size, dtype=torch.uint8, device=self._device)
            follows(memory)
        parts, offset = list[MessagePart](), 0
        for dtype, marked, shape, stride in header.forms:
            kept_shape = [1 if step == 0 else size for size, step in zip(shape, stride, strict=True)]
            span = _span_of(kept_shape, stride)
            if offset + span * dtype.itemsize > memory.numel():
                raise header.refusal("more than was announced")
            tensor = _placed(memory, offset, dtype, kept_shape, stride)
            parts.append(MessagePart(tensor.expand(shape) if kept_shape != shape else tensor, marked))
            offset += _padded(span * dtype.itemsize)
        return StageMessage(header.numbers, parts)


class _Header:
    """The numbers at the beginning of a message, checked."""

    def __init__(self, buffer: Tensor, name: str) -> None:
        self._name, self._at = name, 0
        self._values: list[int] = buffer[: 8 * HEADER].view(torch.int64).tolist()
        self.numbers = self._several(self._count())
        count = self._count()
        (self.size,) = self._several(1)
        self.forms = [self._form() for _ in range(count)]
        if self.size < 0:
            raise self.refusal(f"{self.size} bytes")

    def refusal(self, problem: str) -> Unreadable:
        """An error for a header that no message has."""
        return Unreadable(f"{self._name} has sent a damaged message: {problem}")

    def _several(self, count: int) -> list[int]:
        if self._at + count > HEADER:
            raise self.refusal("its header is too long")
        self._at += count
        return self._values[self._at - count : self._at]

    def _count(self, most: int = HEADER) -> int:
        (count,) = self._several(1)
        if not 0 <= count <= most:
            raise self.refusal(f"a count of {count}")
        return count

    def _form(self) -> tuple[torch.dtype, bool, list[int], list[int]]:
        code, (marked,), dimensions = self._count(len(_DTYPES) - 1), self._several(1), self._count(_MOST_DIMENSIONS)
        shape, stride = self._several(dimensions), self._several(dimensions)
        if min((*shape, *stride), default=0) < 0:
            raise self.refusal(f"a tensor of the shape {shape}")
        return _DTYPES[code], bool(marked), shape, stride


def _code(tensor: Tensor) -> int:
    if tensor.dtype not in _DTYPES or tensor.layout != torch.strided or tensor.dim() > _MOST_DIMENSIONS:
        raise ModelError(
            f"a tensor of the dtype {tensor.dtype}, the layout {tensor.layout} and {tensor.dim()} dimensions goes from "
            f"one stage to the next: only dense tensors of plain dtypes and up to {_MOST_DIMENSIONS} dimensions can"
        )
    return _DTYPES.index(tensor.dtype)


def _base(tensor: Tensor) -> Tensor:
    """A tensor without repeated elements: each expanded dimension has only one."""
    base = tensor.detach()
    for dimension, step in enumerate(base.stride()):
        if step == 0 and base.shape[dimension] > 1:
            base = base.narrow(dimension, 0, 1)
    return base


def _span(tensor: Tensor) -> int:
    return _span_of(tensor.shape, tensor.stride())


def _span_of(shape: Sequence[int], stride: Sequence[int]) -> int:
    """The elements of memory from a tensor's first to its last. Gaps are kept, because kernels depend on the layout."""
    if not prod(shape):
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _placed(memory: Tensor, offset: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    span = _span_of(shape, stride) * dtype.itemsize
    flat = memory[offset : offset + span].view(dtype) if span else torch.empty(0, dtype=dtype, device=memory.device)
    return flat.as_strided(tuple(shape), tuple(stride), flat.storage_offset())


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


R = TypeVar("R")

_FIRST_TAG = 2**16
"""Larger than all tags of training."""


class StagedEvaluation:
    """Calls a function that calls the model, of which each device computes its stages.

    Devices with neighbouring stages work on different batches at the same time: each goes on once it has sent its
    results.
    """

    def __init__(self, staging: Staging, devices: Devices, device: torch.device) -> None:
        self._staging, self._devices, self._device = staging, devices, device
        self._channels: dict[int, Channel] = {}
        self._sent: list[TensorUnderWay] = []

    def __call__(self, act: Callable[[], R]) -> R | None:
        """Call a function, which calls the model once.

        Return its result on the device with the last stage, None on others.

        Raises:
            WorkerLost: another device is lost.
        """
        generators, result = Generators.capture(), None
        for block in self._staging.places.own:
            generators.restore()
            received = self._received(block) if block else None
            try:
                with self._staging.computing(block, received):
                    result = act()
                if holds_elsewhere(result):
                    raise ModelError(f"what the function returns has {NOT_HANDED_ON}")
            except Left as left:
                self._send(block, left)
        return result

    def shared(self, results: list[Any]) -> list[Any]:
        """The results of the device with the last stage, on all devices. Collective among them."""
        for transfer in self._sent:
            transfer.wait()
        self._sent.clear()
        last = self._staging.places.last
        shared: list[Any] = self._devices.inside.broadcast(results if self._devices.rank == last else None, last)
        return shared

    def _received(self, block: int) -> Received:
        channel, source = self._channel(block - 1), self._staging.places.device(block - 1)
        first, tag, exchange = channel.buffer(), _FIRST_TAG + 2 * block, self._devices.exchange
        exchange.receive(first, source, tag).wait()
        message = channel.opened(first, lambda rest: exchange.receive(rest, source, tag + 1).wait())
        generators = [part.tensor.cpu() for part in message.parts[:GENERATORS]]
        tensors = [part.tensor for part in message.parts[GENERATORS:]]
        return Received(message.numbers, tensors, partial(Generators.set_tensors, generators))

    def _send(self, block: int, left: Left) -> None:
        generators = [MessagePart(state.to(self._device)) for state in Generators.capture().as_tensors()]
        message = StageMessage(left.numbers, [*generators, *map(MessagePart, left.tensors)])
        target = self._staging.places.device(block + 1)
        for rest, buffer in enumerate(self._channel(block).packed(message)):
            self._sent.append(self._devices.exchange.send(buffer, target, _FIRST_TAG + 2 * (block + 1) + rest))

    def _channel(self, hop: int) -> Channel:
        """The connection from a block to the next one, for another message."""
        if hop not in self._channels:
            other = hop if self._staging.places.device(hop) != self._devices.rank else hop + 1
            self._channels[hop] = Channel(self._device, self._staging.title(other))
        self._channels[hop].begin()
        return self._channels[hop]
