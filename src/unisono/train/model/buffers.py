"""Buffers belong to shards too: each starts from the same ones, and the results are averaged."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.checkpoint.layout import form_of
from unisono.errors import ModelError
from unisono.plan.split import Split
from unisono.plan.tree import Node, SummationTree
from unisono.reduce.buckets import ALIGNMENT
from unisono.reduce.transport import Transport
from unisono.train.model.prepared import BufferPlace
from unisono.train.model.tensors import Values

LARGEST_STATISTIC = 2**16
"""Elements of the largest buffer that is compared by value."""


@dataclass(slots=True)
class _Base:
    """A buffer as it was when the step began."""

    tensor: Tensor
    value: Tensor
    version: int


class Buffers:
    """Keeps the buffers of a step: what they were, and what each of this worker's shards made of them.

    Floating-point buffers end as the mean over the shards, weighted by their numbers of samples, along the
    summation tree. Other buffers (counters) end as shard 0 left them, so they advance once per step. Buffers
    that no shard has written are not touched.
    """

    def __init__(self, places: Sequence[BufferPlace], split: Split, rank: int) -> None:
        self._places = tuple(places)
        self._split = split
        self._tree = SummationTree(split.shards)
        self._mine = split.of(rank)
        self._bases: list[_Base] = []
        self._results: dict[int, list[Tensor | None]] = {}

    def __len__(self) -> int:
        return len(self._places)

    @property
    def used(self) -> list[bool]:
        """For each buffer, whether a shard of this worker has written it."""
        return [
            any(results[number] is not None for results in self._results.values())
            for number in range(len(self._places))
        ]

    def present(self) -> list[Tensor]:
        """The buffers as they are now."""
        return [place.tensor for place in self._places]

    def begun(self) -> list[Tensor]:
        """What shards begin with, since :meth:`begin`."""
        pairs = zip(self._places, self._bases, strict=True)
        return [base.value if _written(place, base) else place.tensor for place, base in pairs]

    @torch.no_grad()
    def begin(self) -> None:
        """Remember the buffers as they are now; only what was written since the last step is copied."""
        self._results = {}
        if not self._bases:
            self._bases = [_Base(p.tensor, p.tensor.clone(), p.tensor._version) for p in self._places]
        for place, base in zip(self._places, self._bases, strict=True):
            if _written(place, base):
                base.tensor = place.tensor
                base.value = (
                    base.value.copy_(place.tensor) if _alike(base.value, place.tensor) else place.tensor.clone()
                )
                base.version = place.tensor._version

    @torch.no_grad()
    def rewind(self) -> None:
        """Put every buffer back to where the step began."""
        for place, base in zip(self._places, self._bases, strict=True):
            if _written(place, base):
                place.registry[place.key] = base.tensor
                base.tensor.resize_(base.value.shape).copy_(base.value)
                base.version = base.tensor._version

    def take(self, shard: int) -> None:
        """Keep what ``shard`` has made of the buffers.

        Raises:
            ModelError: it has given one another shape or dtype, and there are other shards.
        """
        made = self._made()
        if self._tree.shards > 1:
            self._require_same_form(made)
            made = [None if tensor is None else tensor.detach().clone() for tensor in made]
        self._results[shard] = made

    def _require_same_form(self, made: Sequence[Tensor | None]) -> None:
        for place, base, tensor in zip(self._places, self._bases, made, strict=True):
            if tensor is not None and (tensor.shape, tensor.dtype) != (base.value.shape, base.value.dtype):
                self.rewind()
                raise ModelError(
                    f"the buffer {place.name} had the form {form_of(base.value)} before a shard, and has "
                    f"{form_of(tensor)} after it, so there is no mean over shards. Run one batch through the model "
                    f"before run.prepare, if that gives the buffer its form; or use shards=1"
                )

    def result(self, shard: int) -> Sequence[Tensor | None]:
        """What a shard of this worker has made of each buffer; None of those that it has not written."""
        return self._results.get(shard, [])

    @contextmanager
    @torch.no_grad()
    def aside(self) -> Iterator[Callable[[], Sequence[Tensor | None]]]:
        """Begin once more in here, and have everything as it is now afterwards.

        Yields:
            what tells what was made of each buffer in here.
        """
        now = [(place, place.tensor, place.tensor.clone()) for place in self._places]
        self.rewind()
        try:
            with torch.enable_grad():
                yield self._made
        finally:
            for place, tensor, value in now:
                place.registry[place.key] = tensor
                tensor.copy_(value)

    def _made(self) -> list[Tensor | None]:
        return [
            place.tensor if _written(place, base) else None
            for place, base in zip(self._places, self._bases, strict=True)
        ]

    @torch.no_grad()
    def reduced(self, transport: Transport, used: Sequence[bool], counts: Sequence[int]) -> Values:
        """What all shards together made of the buffers that any of them wrote. Collective.

        They are as the step began afterwards, unless there is one shard: then they are as that one left them.

        Args:
            transport: the transport between the workers.
            used: one flag per buffer: whether a shard of any worker wrote it.
            counts: the number of samples of each shard.

        Returns:
            each buffer, and what it is to be, until the next collective call; see
            :func:`unisono.train.model.tensors.set_all`.
        """
        if self._tree.shards == 1:
            return []
        self.rewind()
        written = [number for number, is_used in enumerate(used) if is_used]
        floats = [number for number in written if self._bases[number].tensor.is_floating_point()]
        found: list[tuple[Tensor, Tensor]] = []
        for dtype in dict.fromkeys(self._bases[number].tensor.dtype for number in floats):
            same = [number for number in floats if self._bases[number].tensor.dtype == dtype]
            found += self._average(transport, same, [count / sum(counts) for count in counts])
        return [*found, *self._first(transport, [number for number in written if number not in floats])]

    def _average(self, transport: Transport, numbers: Sequence[int], shares: Sequence[float]) -> Values:
        bases = [self._bases[number] for number in numbers]
        leaves = {Node(shard, shard + 1): self._scaled(shard, numbers, shares[shard]) for shard in self._mine}
        cover = self._tree.cover(self._mine.start, self._mine.stop)
        partials = [self._tree.finish(leaves, lambda left, right: left.add_(right), node) for node in cover]
        if not self._mine:  # a server tells what they are like
            partials = [self._scaled(0, numbers, 0.0)]
        total = transport.reduce(("buffers", bases[0].tensor.dtype), partials)
        means = total[: sum(base.tensor.numel() for base in bases)].split([base.tensor.numel() for base in bases])
        return [(base.tensor, mean.view(base.tensor.shape)) for base, mean in zip(bases, means, strict=True)]

    def _first(self, transport: Transport, numbers: Sequence[int]) -> Values:
        if not numbers:
            return []
        values = [self._value(0, number) if 0 in self._mine else self._bases[number].value for number in numbers]
        # All at once, as bytes: there may be a counter for every layer.
        joined = torch.cat([value.reshape(-1).view(torch.uint8) for value in values])
        transport.broadcast(joined, self._split.owner(0))
        parts = joined.split([value.nbytes for value in values])
        return [
            (self._bases[number].tensor, part.clone().view(value.dtype).view(value.shape))
            for number, value, part in zip(numbers, values, parts, strict=True)
        ]

    def _scaled(self, shard: int, numbers: Sequence[int], share: float) -> Tensor:
        values = [self._value(shard, number).reshape(-1) for number in numbers]
        flat = torch.cat([*values, values[0].new_zeros(-sum(map(len, values)) % ALIGNMENT)])
        # A buffer may hold infinities, and an empty shard has no part in them.
        return flat.mul_(share) if share else flat.zero_()

    def _value(self, shard: int, number: int) -> Tensor:
        results = self._results.get(shard)  # an empty shard has none
        result = results[number] if results else None
        return self._bases[number].value if result is None else result


def _written(place: BufferPlace, base: _Base) -> bool:
    # Autograd counts the writes in place, so most buffers cost neither a copy nor a comparison. Batch norm's kernel
    # writes its running statistics without being counted, but those are as small as a layer is wide.
    if place.tensor is not base.tensor or place.tensor._version != base.version:
        return True
    return 0 < place.tensor.numel() <= LARGEST_STATISTIC and not torch.equal(place.tensor, base.value)


def _alike(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and left.dtype == right.dtype and left.device == right.device
