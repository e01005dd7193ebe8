"""The update split between the workers of one host: they share their parameters, and each updates a part of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.errors import JobError, WorkerLost
from unisono.reduce.buckets import Bucket, plan_buckets
from unisono.reduce.partial_sums import views_of
from unisono.reduce.transport import Transport
from unisono.train.model.at_rest import kept_by
from unisono.train.model.prepared import Prepared
from unisono.train.model.tensors import Untouched
from unisono.train.model.update import READERS, may_change_gradients, tell_schedulers

SCALARS = frozenset(("step", "mu_product"))
"""State that optimizers keep once per tensor, whatever its size."""


class ShardedUpdate:
    """Keeps parameters and optimizer state once per host, and updates this worker's part of every tensor.

    Optimizers that go element by element give the same bits on a part as on the whole, if it is cut at multiples of
    64 elements from the tensor's start: there their vector loops and scalar tails fall on the same elements.
    What ``optimizer.state`` and the modules hold is whole at all times, so a checkpoint needs nothing gathered.

    Args:
        prepared: models and optimizers; their parameters move into memory that the workers share. Collective.
        transport: the transport between the workers.
        bucket_bytes: the size of a group of parameters that lie together, in bytes.

    Raises:
        JobError: an optimizer needs whole tensors, or the workers share no memory.
    """

    def __init__(self, prepared: Prepared, transport: Transport, bucket_bytes: int) -> None:
        for optimizer in prepared.optimizers:
            _require_elementwise(optimizer)
        self._transport, self._optimizers = transport, prepared.optimizers
        self._parameters = tuple(prepared.parameters.values())
        self._numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        self._buckets = plan_buckets(self._parameters, bucket_bytes)
        self._cuts = self._own_cuts()
        self._states: dict[tuple[str, torch.dtype], _Shared] = {}
        self._inner: dict[int, Optimizer] = {}
        self._torn = False
        self._weights = _Shared.allocated(self._buckets, transport)
        for parameter, view in zip(self._parameters, self._weights.views, strict=True):
            parameter.data = view.copy_(parameter.detach())
        self._parts = [self._part(number, view) for number, view in enumerate(self._weights.views)]
        self._untouched = Untouched(
            self._parameters,
            "With shard_optimizer=True the workers of a host share them, so that each would change them once more",
        )

    @property
    def bytes_shared(self) -> int:
        """What parameters and optimizer state take, once for all workers of this host."""
        return sum(flat.nbytes for shared in (self._weights, *self._states.values()) for flat in shared.flats)

    @property
    def parts(self) -> list[Tensor]:
        """This worker's part of every parameter."""
        return self._parts

    def kept(self) -> list[Tensor]:
        """This worker's part of what optimizers keep; all of it as long as it is not shared."""
        return kept_by([self._inner.get(id(optimizer), optimizer) for optimizer in self._optimizers])

    def require_whole(self) -> None:
        """Refuse weights that a lost worker has left half updated.

        Raises:
            WorkerLost: says how to go on.
        """
        if self._torn:
            raise WorkerLost(
                "a worker was lost in the middle of an update, and the weights that the workers of this host share are "
                "half updated: start the job again, it goes on from its newest checkpoint"
            )

    def begin(self) -> None:
        """A step begins.

        Raises:
            WorkerLost: the weights are half updated.
            ModelError: the script has changed weights.
        """
        self.require_whole()
        self._untouched.require()

    @torch.no_grad()
    def apply(self, optimizers: Sequence[Optimizer]) -> None:
        """Update this worker's part. The weights are half updated until ``finish``."""
        self._torn = True
        for optimizer in optimizers:
            if id(optimizer) not in self._inner:
                self._inner[id(optimizer)] = self._made(optimizer)
            self._update(optimizer, self._inner[id(optimizer)])

    def finish(self) -> None:
        """Wait until all workers have updated their parts. Collective.

        As soon as the others go on, this worker's part may be read, or hit by a fault.

        Raises:
            WorkerLost: another worker is gone, and with it its part of the update.
        """
        self._transport.all_gather(torch.zeros(1, dtype=torch.uint8))
        self._torn = False
        self._untouched.accept()  # from now on only this may change the weights

    def _update(self, optimizer: Optimizer, inner: Optimizer) -> None:
        for group, ours in zip(optimizer.param_groups, inner.param_groups, strict=True):
            ours |= {name: value for name, value in group.items() if name != "params"}
        for number in self._trained(optimizer):
            self._take_over(number, optimizer, inner)
            gradient = self._parameters[number].grad
            self._parts[number].grad = None if gradient is None else self._part(number, gradient)
        inner.step()
        for number in self._trained(optimizer):
            self._publish(number, optimizer, inner)
        tell_schedulers([optimizer])

    def _made(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer of this worker's parts. A part may be empty: what is kept once per tensor is kept alike."""
        groups = [
            {**group, "params": [self._parts[number] for number in self._numbers_in(group)]}
            for group in optimizer.param_groups
        ]
        inner: Optimizer = type(optimizer)(groups)  # type: ignore[call-arg]
        inner.state.clear()  # some begin with a state; what counts is the outer one's
        return inner

    def _take_over(self, number: int, optimizer: Optimizer, inner: Optimizer) -> None:
        """State that was made or loaded outside: this worker copies its part of it."""
        outer = optimizer.state.get(self._parameters[number], {})
        for name, value in outer.items():
            mine = inner.state[self._parts[number]]
            if name in SCALARS or not isinstance(value, Tensor):
                mine[name] = value
            elif value is not (whole := self._state(name, value.dtype).views[number]):
                mine[name] = self._part(number, whole)
                mine[name].copy_(self._part(number, _laid_out_like(whole, value)))
                outer[name] = whole

    def _publish(self, number: int, optimizer: Optimizer, inner: Optimizer) -> None:
        """State that the update has made: it moves to where all workers see it."""
        outer = optimizer.state[self._parameters[number]] if inner.state.get(self._parts[number]) else {}
        for name, value in inner.state.get(self._parts[number], {}).items():
            if name in SCALARS or not isinstance(value, Tensor):
                outer[name] = value
            elif name not in outer:
                outer[name] = self._state(name, value.dtype).views[number]
                inner.state[self._parts[number]][name] = self._part(number, outer[name]).copy_(value)

    def _state(self, name: str, dtype: torch.dtype) -> "_Shared":
        if (name, dtype) not in self._states:
            buckets = [replace(bucket, dtype=dtype) for bucket in self._buckets]
            self._states[name, dtype] = _Shared.allocated(buckets, self._transport)
        return self._states[name, dtype]

    def _trained(self, optimizer: Optimizer) -> Iterator[int]:
        return (number for group in optimizer.param_groups for number in self._numbers_in(group))

    def _numbers_in(self, group: dict[str, Any]) -> Iterator[int]:
        return (self._numbers[id(parameter)] for parameter in group["params"] if id(parameter) in self._numbers)

    def _own_cuts(self) -> list[tuple[int, int]]:
        """Of every parameter, where this worker's elements start and stop, in the order of memory."""
        cuts = [(0, 0)] * len(self._parameters)
        for bucket in self._buckets:
            mine = self._transport.part(bucket.numel)
            for entry in bucket.entries:
                start, stop = (
                    min(max(edge - entry.offset, 0), self._parameters[entry.index].numel())
                    for edge in (mine.start, mine.stop)
                )
                cuts[entry.index] = (start, stop)
        return cuts

    def _part(self, number: int, tensor: Tensor) -> Tensor:
        start, stop = self._cuts[number]
        return tensor.as_strided((stop - start,), (1,), tensor.storage_offset() + start)


@dataclass(frozen=True, slots=True)
class _Shared:
    """One tensor per parameter, in memory that the workers of this host share."""

    flats: tuple[Tensor, ...]
    views: tuple[Tensor, ...]

    @classmethod
    def allocated(cls, buckets: Sequence[Bucket], transport: Transport) -> "_Shared":
        """Zeros in this layout. Collective."""
        flats = transport.share(buckets)
        return cls(flats, views_of(buckets, flats))


def _laid_out_like(whole: Tensor, value: Tensor) -> Tensor:
    if value.stride() == whole.stride():
        return value
    return torch.empty_strided(whole.shape, whole.stride(), dtype=value.dtype).copy_(value)


def _require_elementwise(optimizer: Optimizer) -> None:
    if type(optimizer) not in READERS:
        names = ", ".join(kind.__name__ for kind in READERS)
        raise JobError(
            f"shard_optimizer=True cannot split {type(optimizer).__name__}: it splits optimizers that go element by "
            f"element ({names})"
        )
    if may_change_gradients(optimizer):
        raise JobError(
            "shard_optimizer=True leaves no room for hooks on an optimizer's step: remove them, or go without"
        )
