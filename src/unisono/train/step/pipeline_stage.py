"""A block of stages for torch's pipelining: its passes, and its messages to the blocks beside it."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from unisono.data.generators import Generators
from unisono.errors import UnisonoError
from unisono.reduce.process_group import ProcessGroupTransport, TensorUnderWay
from unisono.train.group.workers import Devices
from unisono.train.model.elsewhere import as_received, without_view
from unisono.train.model.staging import Left, Received, Staging
from unisono.train.step.stage_messages import GENERATORS, Channel, MessagePart, StageMessage

_KINDS = 4
"""Kinds of messages between two blocks: forward and backward, each with a second one for what does not fit."""


class BlockPasses(Protocol):
    """Makes the passes of a block."""

    def name(self, place: int) -> str:
        """The name of a shard, for messages."""

    def forward(self, block: int, place: int, received: Received | None) -> Left | tuple[Tensor, float]:
        """The forward pass of a block, for one shard: what goes on, or a loss and its weight."""

    def backward(self, place: int) -> AbstractContextManager[None]:
        """A context for a part of the backward pass of a block, for one shard."""

    def backward_done(self, block: int, place: int, weight: float) -> None:
        """End the backward pass of a block for one shard, which has this weight."""


@dataclass(slots=True)
class _Chunk:
    """A shard in a block, between its forward and its backward pass.

    Attributes:
        leaves: the tensors that came from the block before.
        gradients: the gradients of the leaves, as autograd computed them.
        sent: the tensors that went on to the next block.
        messages: messages that are to be sent, forward (True) or backward.
        back: the gradients that came back.
        loss: the loss from which the backward pass begins, in the last block.
    """

    leaves: list[Tensor] = field(default_factory=list)
    gradients: dict[int, Tensor] = field(default_factory=dict)
    sent: Sequence[Tensor] = ()
    messages: dict[bool, list[Tensor]] = field(default_factory=dict)
    back: Sequence[Tensor] = ()
    weight: float = 0.0
    loss: Tensor | None = None

    def keep_gradient(self, number: int, gradient: Tensor) -> None:
        """Keep the gradient of a leaf before torch may change its layout."""
        self.gradients[number] = gradient


class _Operation(dist.P2POp):
    """A message that torch's schedules ask for, which is sent or received over the connections of this generation."""

    def __new__(cls, *about: Any) -> _Operation:
        """Make the object without torch's checks, which allow only torch's own two operations."""
        return object.__new__(cls)

    def __init__(self, begin: Callable[[Tensor], TensorUnderWay | _Meanwhile], buffer: Tensor, peer: int) -> None:
        self.op, self.tensor = lambda tensor, **_: begin(tensor), buffer
        self.peer = self.group_peer = peer
        self.group, self.tag = "none of torch's", 0  # type: ignore[assignment]  # so that torch does not batch messages by itself

    def __repr__(self) -> str:
        return f"a message with device {self.peer}"


@dataclass(frozen=True, slots=True)
class _Meanwhile:
    """A tensor that is under way, and work to do until it is here."""

    coming: TensorUnderWay
    work: Callable[[], None]

    def wait(self) -> None:
        """Do the work, then wait for the tensor."""
        self.work()
        self.coming.wait()


class BlockStage(PipelineStage):
    """A block of stages in torch's schedules.

    Torch would fix the forms of tensors beforehand. Here each message has them with it, since batches and shards may
    differ.

    Attributes:
        busy_s: the seconds in which passes of this block were computed, in this attempt.
    """

    def __init__(self, block: int, module: nn.Module, staging: Staging, devices: Devices, device: torch.device) -> None:
        count, group = len(staging.places.firsts), devices.mesh.mesh.get_group()
        dummy = torch.zeros(1, device=device)
        super().__init__(nn.Identity(), block, count, device, input_args=dummy, output_args=dummy, group=group)
        own = (parameter for name, parameter in module.named_parameters() if staging.block_of(name) == block)
        self.submod = nn.ParameterList(own)
        self._staging, self._block, self._devices = staging, block, devices
        self._channels = {
            (hop, forward): Channel(device, staging.title(other))
            for hop, other in ((block - 1, block - 1), (block, block + 1))
            if 0 <= other < count
            for forward in (True, False)
        }
        self._passes: BlockPasses  # of the attempt under way
        self.busy_s = 0.0
        self._due: int | None = None  # a shard whose gradients are complete, and not taken yet
        self._chunks: dict[int, _Chunk] = {}
        self._coming: dict[tuple[int, bool], Tensor] = {}
        self._sent: list[TensorUnderWay] = []

    def begin(self, passes: BlockPasses) -> None:
        """Begin another attempt."""
        self._passes, self._chunks, self._coming, self.busy_s, self._due = passes, {}, {}, 0.0, None
        for channel in self._channels.values():
            channel.begin()

    # Messages, for which torch's schedules ask.

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Tensor | None = None) -> Tensor:
        return torch.ones(1)  # devices do not agree on forms beforehand: each message has them with it

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:
        return torch.ones(1)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The messages to receive before a forward pass."""
        return [] if self.is_first else self._receiving(fwd_chunk_id, self._block - 1, forward=True)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The messages to receive before a backward pass."""
        return [] if self.is_last else self._receiving(bwd_chunk_id, self._block, forward=False)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The messages to send after a forward pass."""
        return [] if self.is_last else self._sending(fwd_chunk_id, self._block, forward=True)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The messages to send after a backward pass."""
        return [] if self.is_first else self._sending(bwd_chunk_id, self._block - 1, forward=False)

    def _receiving(self, chunk: int, hop: int, *, forward: bool) -> list[dist.P2POp]:
        buffer = self._coming[chunk, forward] = self._channels[hop, forward].buffer()
        peer, tag = self._place(hop, forward=forward)
        transport = self._way(forward=forward)
        return [_Operation(lambda into: _Meanwhile(transport.receive(into, peer, tag), self._take), buffer, peer)]

    def _sending(self, chunk: int, hop: int, *, forward: bool) -> list[dist.P2POp]:
        first, *others = self._chunks[chunk].messages.pop(forward)
        (peer, tag), transport = self._place(hop, forward=forward), self._way(forward=forward)
        for (
            rest
        ) in others:  # the other device receives it after the first: waiting for it here before that would block both
            self._sent.append(transport.send(rest, peer, tag + 1))
        return [_Operation(lambda buffer: transport.send(buffer, peer, tag), first, peer)]

    def settle(self) -> None:
        """Take the gradients that are not taken yet, and wait until all messages are sent."""
        self._take()
        for work in self._sent:
            work.wait()
        self._sent.clear()

    def _place(self, hop: int, *, forward: bool) -> tuple[int, int]:
        """The other device of a hop, and the tag of a message. The second message of a pair has the next tag."""
        other = hop + 1 if hop == self._block else hop
        return self._staging.places.device(other), _KINDS * hop + 2 * (not forward)

    def _way(self, *, forward: bool) -> ProcessGroupTransport:
        return self._devices.exchange if forward else self._devices.back

    def _arrived(self, chunk: int, hop: int, *, forward: bool) -> StageMessage:
        peer, tag = self._place(hop, forward=forward)
        transport = self._way(forward=forward)
        buffer = self._coming.pop((chunk, forward))
        return self._channels[hop, forward].opened(buffer, lambda rest: transport.receive(rest, peer, tag + 1).wait())

    # Passes.

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        """The forward pass of one shard; the last block returns the loss."""
        self._take()
        chunk = self._chunks[fwd_chunk_id] = _Chunk()
        with self._noted(fwd_chunk_id):
            received = None if self.is_first else self._received(chunk, fwd_chunk_id)
            result = self._passes.forward(self._block, fwd_chunk_id, received)
            if isinstance(result, Left):
                parts = [MessagePart(tensor.to(self.device)) for tensor in Generators.capture().as_tensors()]
                parts += [MessagePart(tensor, tensor.requires_grad) for tensor in result.tensors]
                chunk.sent = [_whole(tensor) for tensor in result.tensors if tensor.requires_grad]
                message = StageMessage(result.numbers, parts)
                chunk.messages[True] = self._channels[self._block, True].packed(message)
                return None
            loss, chunk.weight = result
            chunk.loss = _whole(loss)
            return chunk.loss

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run the backward pass of one shard; without gradients of weights if it is not full."""
        self._take()
        chunk = self._chunks[bwd_chunk_id]
        with self._noted(bwd_chunk_id):
            outputs = self._outputs(chunk, bwd_chunk_id)
            if chunk.weight and (outputs or self.is_last):
                self.fwd_cache[bwd_chunk_id] = tuple(outputs), chunk.leaves
                with self._passes.backward(bwd_chunk_id):
                    super().backward_one_chunk(bwd_chunk_id, chunk.loss, full_backward)
                self.bwd_cache.pop(bwd_chunk_id, None)
            if not self.is_first:
                parts = [
                    MessagePart(*self._gradient(chunk, number))
                    for number, leaf in enumerate(chunk.leaves)
                    if leaf.requires_grad
                ]
                message = StageMessage([_as_number(chunk.weight)], parts)
                chunk.messages[False] = self._channels[self._block - 1, False].packed(message)
            chunk.leaves, chunk.sent, chunk.back, chunk.loss = [], (), (), None
            chunk.gradients.clear()
        if full_backward:
            self._due = bwd_chunk_id

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Compute the gradients of weights of one shard, which :meth:`backward_one_chunk` has left out."""
        self._take()
        with self._noted(bwd_chunk_id):
            if bwd_chunk_id in self.dw_runner:
                with self._passes.backward(bwd_chunk_id):
                    super().backward_weight_one_chunk(bwd_chunk_id)
                self.dw_runner.pop(bwd_chunk_id)
        self._due = bwd_chunk_id

    def _take(self) -> None:
        """Take the gradients of the newest backward pass.

        Called late, so that other devices get the messages that they wait for first.
        """
        place, self._due = self._due, None
        if place is not None:
            with self._noted(place):
                self._passes.backward_done(self._block, place, self._chunks[place].weight)

    def _received(self, chunk: _Chunk, place: int) -> Received:
        message = self._arrived(place, self._block - 1, forward=True)
        generators = [part.tensor.cpu() for part in message.parts[:GENERATORS]]
        tensors = []
        for number, part in enumerate(message.parts[GENERATORS:]):
            leaf = part.tensor.requires_grad_(part.is_marked)
            if part.is_marked:
                leaf.register_hook(partial(chunk.keep_gradient, number))
            chunk.leaves.append(leaf)
            tensors.append(as_received(leaf))
        return Received(message.numbers, tensors, partial(Generators.set_tensors, generators))

    def _outputs(self, chunk: _Chunk, place: int) -> list[Tensor]:
        """The tensors from which the backward pass begins, in any block but the last; keeps their gradients."""
        if self.is_last:
            return []
        message = self._arrived(place, self._block, forward=False)
        chunk.weight = _as_weight(message.numbers)
        pairs = [(sent, part.tensor) for sent, part in zip(chunk.sent, message.parts, strict=True) if part.is_marked]
        chunk.back = [gradient for _, gradient in pairs]
        return [sent for sent, _ in pairs]

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor, ...]:
        return tuple(self._chunks[bwd_chunk_id].back)

    def _gradient(self, chunk: _Chunk, number: int) -> tuple[Tensor, bool]:
        gradient = chunk.gradients.get(number)
        return (torch.empty(0, device=self.device), False) if gradient is None else (gradient, True)

    @contextmanager
    def _noted(self, place: int) -> Iterator[None]:
        begun = perf_counter()
        try:
            yield
            self.busy_s += perf_counter() - begun
        except UnisonoError as error:
            raise type(error)(f"{self._where(place)}: {error}") from error
        except Exception as error:
            error.add_note(f"unisono: in {self._where(place)}")
            if "meta" in str(error):
                error.add_note(
                    "unisono: a tensor on the meta device is held by another device. A parameter directly in a module "
                    "that a cut divides belongs to that module's first stage: put it into a module of the stage that "
                    "uses it"
                )
            raise

    def _where(self, place: int) -> str:
        return f"{self._staging.title(self._block)}, {self._passes.name(place)}"


def _whole(output: Tensor) -> Tensor:
    """An output that is no view: schedules without full backward passes detach outputs in place."""
    return without_view(output) if output._is_view() and output.requires_grad else output


def _as_number(weight: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", weight))[0])


def _as_weight(numbers: Sequence[int]) -> float:
    (number,) = numbers
    return float(struct.unpack("<d", struct.pack("<q", number))[0])


@contextmanager
def quiet() -> Iterator[None]:
    """Keep torch from logging a whole schedule with each error; the error is reported anyway."""
    logger = logging.getLogger("torch.distributed.pipelining.schedules")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
