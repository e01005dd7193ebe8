"""Buffers and further state: each shard starts from the same values, and the shards' results are combined."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from unisono.checkpoint.tensor_bytes import form_of
from unisono.device import HostRead, is_accelerator
from unisono.errors import ModelError
from unisono.plan.split import Split
from unisono.plan.tree import SummationTree
from unisono.reduce.partial_sums import Witness
from unisono.reduce.transport import Transport
from unisono.train.model.places import FRESH, BufferPlace, Combining, Placed, Rule
from unisono.train.model.tensors import set_all, version_of
from unisono.words import bytes_of, sum_of_words

LARGEST_STATISTIC = 2**16
"""Elements of the largest buffer that is compared by value."""

SHORT = 2**14
"""Bytes up to which a checksum is faster than a sum of words."""


Combine = Callable[[Transport, Tensor, Sequence[Tensor]], Tensor | None]
"""Combines a tensor with what this worker's shards have made of it. Collective; None if it cannot."""


@dataclass(slots=True)
class _Base:
    """A buffer as it was when the step began."""

    tensor: Tensor
    value: Tensor
    version: int


class _Doubt(NamedTuple):
    """A buffer of which only its device knows whether a shard has written it; it has not answered yet."""

    shard: int
    number: int
    is_written: Tensor


class Buffers:
    """Keeps the buffers of a step: their values at its beginning, and what each of this worker's shards made of them.

    Each is combined by its rule. By default, a floating-point buffer becomes the mean over the shards, weighted by
    their numbers of samples, along the summation tree. Any other buffer (a counter) becomes what shard 0 made of it, so
    that it advances once per step. Buffers that no shard has written are not touched.

    Args:
        looks: whether to check the shards' results for flipped bits when they are used.

    Attributes:
        witness: a function that gets what a shard has made, to inject a fault.
        have_kept: whether the shards' results on a CPU, when they were used last, had the bits with which they were
            made.
    """

    have_kept = True

    def __init__(self, places: Sequence[BufferPlace], split: Split, rank: int, *, looks: bool = False) -> None:
        self._places, self._looks = tuple(places), looks
        self.witness: Witness | None = None
        self._fresh = [number for number, place in enumerate(self._places) if place.rule in FRESH]
        self.resplit(split, rank)

    def resplit(self, split: Split, rank: int) -> None:
        """Begin anew with another split of the shards."""
        self._split = split
        self._tree = SummationTree(split.shards)
        self._mine = split.of(rank)
        self._combining = Combining(self._tree, self._mine)
        self._bases: list[_Base] = []
        self._shard_bases: dict[int, _Base] = {}  # what the present shard began with, if not the base
        self._results: dict[int, list[Tensor | None]] = {}
        self._left: dict[int, list[int]] = {}  # the checksums of each shard's results
        self._doubts: list[_Doubt] = []
        self._pending: list[Callable[[], list[_Doubt]]] = []

    def __len__(self) -> int:
        return len(self._places)

    @property
    def used(self) -> list[bool]:
        """For each buffer, whether a shard of this worker has written it."""
        if not self._places:
            return []
        self._settle()
        return [
            any(results[number] is not None for results in self._results.values())
            for number in range(len(self._places))
        ]

    @property
    def places(self) -> Sequence[BufferPlace]:
        """The places of the buffers."""
        return self._places

    def present(self) -> list[Tensor]:
        """The buffers as they are now."""
        return [place.tensor for place in self._places]

    def begun(self) -> list[Tensor]:
        """What shards begin with, since :meth:`begin`."""
        pairs = zip(self._places, self._bases, strict=True)
        return [place.tensor if _written(place, base) is False else base.value for place, base in pairs]

    def begin(self) -> None:
        """Remember the present buffers; only those that were written since the last step are copied."""
        self._results, self._left, self._doubts, self._pending = {}, {}, [], []
        if not self._bases:
            self._bases = [_Base(p.tensor, p.tensor.detach().clone(), p.tensor._version) for p in self._places]
        for place, base in zip(self._places, self._bases, strict=True):
            if _written(place, base) is not False:
                base.tensor, now = place.tensor, place.tensor.detach()
                base.value = base.value.copy_(now) if _alike(base.value, now) else now.clone()
                base.version = version_of(place.tensor, place.name)

    def rewind(self) -> None:
        """Set every buffer to what it was when the step began."""
        self._rewind(range(len(self._places)))

    def open(self, *, first: bool, apart: bool = False) -> None:
        """Begin a shard.

        Args:
            first: whether it is this worker's first one, which finds buffers as the step began.
            apart: whether backward passes of earlier shards are still to come. These keep the tensors that they have
                written, and this shard gets others.
        """
        if not self._places:
            return
        if apart and self._tree.shards > 1:
            for number, (place, base) in enumerate(zip(self._places, self._bases, strict=True)):
                if not place.is_held or _written(place, self._shard_bases.get(number, base)) is not False:
                    value = base.value.clone()
                    place.put(value)
                    self._shard_bases[number] = _Base(value, base.value, value._version)
        elif not first and not apart:
            self.rewind()
        for number in self._fresh:
            place = self._places[number]
            if place.rule == "cat":  # not in place: the tensor that a shard begins with has another length
                place.put(self._nothing(number))
            else:
                place.tensor.detach().zero_()

    def take(self, shard: int) -> None:
        """Keep what ``shard`` has made of the buffers. A model in stages calls this once for each of its blocks.

        Raises:
            ModelError: the shard has given a buffer another shape or dtype, and there are other shards.
        """
        if not self._places:
            return
        if shard in self._results:  # what one of its stages has not written, the next one may
            self._settle()
        results, doubts = self._results_of(shard)
        if self._tree.shards > 1:
            self._require_same_form(results)
            results = [None if tensor is None else tensor.detach().clone() for tensor in results]
        if (before := self._results.get(shard)) is None:
            self._doubts += doubts
        else:
            results = [old if new is None else new for old, new in zip(before, _without(results, doubts), strict=True)]
        self._keep(shard, results)

    def _keep(self, shard: int, results: list[Tensor | None]) -> None:
        self._results[shard] = results
        if self._looks:
            self._left[shard] = _summed(results)
        for tensor in results if self.witness is not None else ():
            if tensor is not None and self.witness is not None:
                self.witness("shard_buffer", tensor)

    def _require_same_form(self, results: Sequence[Tensor | None]) -> None:
        for place, base, tensor in zip(self._places, self._bases, results, strict=True):
            if tensor is not None and not place.fits(tensor, base.value):
                self.rewind()
                raise ModelError(
                    f"the buffer {place.name} had the form {form_of(base.value)} before a shard, and has "
                    f"{form_of(tensor)} after it, so there is no mean over shards. Run one batch through the model "
                    f"before run.prepare, if that gives the buffer its form; or use shards=1"
                )

    def result(self, shard: int) -> Sequence[Tensor | None]:
        """What a shard of this worker has made of each buffer; None for those that it has not written."""
        self._settle()
        return self._results.get(shard, [])

    def set_result(self, shard: int, results: Sequence[Tensor | None]) -> None:
        """Keep what a shard has made of the buffers on another device of this worker.

        Raises:
            ModelError: it has given one another shape or dtype.
        """
        self._require_same_form(results)
        self._keep(shard, list(results))

    @contextmanager
    @torch.no_grad()
    def aside(self) -> Iterator[Callable[[], Sequence[Tensor | None]]]:
        """Begin a shard once more within the context, and restore the buffers behind it.

        Yields:
            a function that returns what was made of each buffer within the context.
        """
        saved = [(place, place.tensor, place.tensor.clone()) for place in self._places]
        self.open(first=False)
        try:
            with torch.enable_grad():
                yield lambda: _without(*self._results_of(0))
        finally:
            for place, tensor, value in saved:
                place.put(tensor)
                set_all([(tensor, value)])

    def _results_of(self, shard: int) -> tuple[list[Tensor | None], list[_Doubt]]:
        """Each buffer that a shard has written, or may have written."""
        results: list[Tensor | None] = []
        doubts: list[_Doubt] = []
        for number, place in enumerate(self._places):
            base = self._shard_bases.get(number, self._bases[number])
            is_written = _written(place, base)
            if is_written is None:
                doubts.append(_Doubt(shard, number, (place.tensor != base.value).any()))
            results.append(None if is_written is False else place.tensor)
        return results, doubts

    def ask(self) -> None:
        """Ask the device which buffers shards have written, without waiting for the answer."""
        if self._doubts:
            self._pending.append(_unwritten(self._doubts))
            self._doubts = []

    def _settle(self) -> None:
        """Wait for the device, once for all shards, and drop results of buffers that were not written."""
        self.ask()
        pending, self._pending = self._pending, []
        for unwritten in pending:
            for shard, number, _ in unwritten():
                self._results[shard][number] = None

    @torch.no_grad()
    def reduced(self, transport: Transport, used: Sequence[bool], counts: Sequence[int]) -> Placed:
        """The buffers that any shard has written, combined over all shards. Collective.

        The buffers themselves are as they were when the step began afterwards. With a single shard, those whose rule is
        "mean", "first" or "last" stay as it left them. ``used`` says of each buffer whether a shard of any worker wrote
        it; ``counts`` are the numbers of samples of the shards.

        Returns:
            each buffer with its new value, which is valid until the next collective call.
        """
        if not self._places:
            return []
        by_rule: dict[Rule, list[int]] = {}
        for number, place in enumerate(self._places):
            if used[number] and (self._tree.shards > 1 or place.rule not in ("mean", "first", "last")):
                by_rule.setdefault(place.rule, []).append(number)
        numbers = range(len(self._places)) if self._tree.shards > 1 else sorted(chain.from_iterable(by_rule.values()))
        shares = [count / sum(counts) for count in counts]
        grown = by_rule.get("sum", [])
        before = {id(self._places[number]): self._bases[number].value for number in grown}
        values = [
            *self._added(transport, by_rule.get("mean", []), shares.__getitem__),
            *((place, before[id(place)] + total) for place, total in self._added(transport, grown, lambda _: 1.0)),
            *self._joined(transport, by_rule),
            *self._of_shard(0, transport, by_rule.get("first", [])),
            *self._of_shard(
                max((shard for shard, count in enumerate(counts) if count), default=0),
                transport,
                by_rule.get("last", []),
            ),
        ]
        # Checked after the last use, and before rewinding: the results of a single shard are the buffers themselves.
        self.have_kept = all(sums == _summed(self._results[shard]) for shard, sums in self._left.items())
        self._rewind(numbers)
        return values

    def _added(self, transport: Transport, numbers: Sequence[int], share: Callable[[int], float]) -> Placed:
        totals_by_place: list[tuple[BufferPlace, Tensor]] = []
        for dtype in dict.fromkeys(self._bases[number].tensor.dtype for number in numbers):
            same = [number for number in numbers if self._bases[number].tensor.dtype == dtype]
            kind = self._places[same[0]].rule

            def values(shard: int, same: Sequence[int] = same) -> list[Tensor]:
                return [self._value(shard, number) for number in same]

            totals = self._combining.added(transport, ("buffers", kind, dtype), values, share)
            for number, total in zip(same, totals, strict=True):
                totals_by_place.append((self._places[number], total.view(self._bases[number].value.shape)))
        return totals_by_place

    def _joined(self, transport: Transport, by_rule: Mapping[Rule, Sequence[int]]) -> Placed:
        values: list[tuple[BufferPlace, Tensor]] = []
        kinds: Mapping[Rule, Combine] = {
            "max": partial(self._combining.furthest, torch.maximum),
            "min": partial(self._combining.furthest, torch.minimum),
            "cat": self._combining.joined,
        }
        for rule, combine in kinds.items():
            for number in by_rule.get(rule, []):
                results = [self._value(shard, number) for shard in self._mine]
                if (value := combine(transport, self._bases[number].value, results)) is None:
                    raise ModelError(
                        f"shards of one step have added tensors of different dtype or shape to "
                        f"{self._places[number].name}: only their first dimension may differ"
                    )
                values.append((self._places[number], value))
        return values

    def _of_shard(self, shard: int, transport: Transport, numbers: Sequence[int]) -> Placed:
        """The buffers as one shard has left them."""
        if not numbers:
            return []
        is_here = shard in self._mine
        values = [self._value(shard, number) if is_here else self._bases[number].value for number in numbers]
        # All at once, as bytes: there may be a counter for every layer.
        joined = torch.cat([value.reshape(-1).view(torch.uint8) for value in values])
        transport.broadcast(joined, self._split.owner(shard))
        parts = joined.split([value.nbytes for value in values])
        return [
            (self._places[number], part.clone().view(value.dtype).view(value.shape))
            for number, value, part in zip(numbers, values, parts, strict=True)
        ]

    def _value(self, shard: int, number: int) -> Tensor:
        results = self._results.get(shard)  # an empty shard has no results
        result = results[number] if results else None
        if result is None:
            return self._nothing(number) if number in self._fresh else self._bases[number].value
        return result

    def _nothing(self, number: int) -> Tensor:
        """The value that a shard begins with, if its result is added to what was there."""
        base = self._bases[number].value
        return base[:0].clone() if self._places[number].rule == "cat" else torch.zeros_like(base)

    def _rewind(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            place, base = self._places[number], self._bases[number]
            self._shard_bases.pop(number, None)
            if not place.is_held or _written(place, base) is not False:
                place.put(base.tensor)
                set_all([(base.tensor, base.value)])
                base.version = base.tensor._version


def _written(place: BufferPlace, base: _Base) -> bool | None:
    """Whether a buffer has changed; None if only its device knows, which would have to be waited for."""
    # Autograd counts the writes in place, so most buffers cost neither a copy nor a comparison. Batch norm's kernel
    # writes its running statistics without being counted, but those are as small as a layer is wide.
    tensor = place.tensor
    if tensor is not base.tensor or tensor._version != base.version or not _alike(tensor, base.value):
        return True
    if not 0 < tensor.numel() <= LARGEST_STATISTIC:
        return False
    return None if is_accelerator(tensor.device) else not torch.equal(tensor, base.value)


def _unwritten(doubts: Sequence[_Doubt]) -> Callable[[], list[_Doubt]]:
    if not doubts:
        return list
    flags = HostRead(torch.stack([doubt.is_written for doubt in doubts]))
    return lambda: [doubt for doubt, written in zip(doubts, flags.values().tolist(), strict=True) if not written]


def _without(results: list[Tensor | None], doubts: Sequence[_Doubt]) -> list[Tensor | None]:
    for _, number, _ in _unwritten(doubts)():
        results[number] = None
    return results


def _summed(results: Sequence[Tensor | None]) -> list[int]:
    return [_sum_of(tensor) for tensor in results if tensor is not None and tensor.device.type == "cpu"]


def _sum_of(tensor: Tensor) -> int:
    is_short = tensor.nbytes <= SHORT and tensor.is_contiguous()
    return crc32(bytes_of(tensor).data) if is_short else sum_of_words(tensor)


def _alike(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and left.dtype == right.dtype and left.device == right.device
