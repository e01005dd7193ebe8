"""Buffers and further state belong to shards too: each starts from the same, and the results are combined."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from unisono.checkpoint.layout import form_of
from unisono.device import HostRead, is_accelerator
from unisono.errors import ModelError
from unisono.plan.split import Split
from unisono.plan.tree import SummationTree
from unisono.reduce.tally import Witness
from unisono.reduce.transport import Transport
from unisono.train.model.combining import Combining
from unisono.train.model.places import FRESH, BufferPlace, Placed, Rule
from unisono.train.model.tensors import set_all, version_of
from unisono.words import bytes_of, sum_of_words

LARGEST_STATISTIC = 2**16
"""Elements of the largest buffer that is compared by value."""

SHORT = 2**14
"""Bytes that a checksum goes over sooner than their words are summed."""


Combine = Callable[[Transport, Tensor, Sequence[Tensor]], Tensor | None]
"""Makes one tensor of what was there and what this worker's shards have made of it. Collective; None if it cannot."""


@dataclass(slots=True)
class _Base:
    """A buffer as it was when the step began."""

    tensor: Tensor
    value: Tensor
    version: int


class _Doubt(NamedTuple):
    """A buffer of which only its device knows whether a shard has written it: nobody has waited for it yet."""

    shard: int
    number: int
    is_written: Tensor


class Buffers:
    """Keeps the buffers of a step: what they were, and what each of this worker's shards made of them.

    Each is combined by its rule. By default floating-point buffers end as the mean over the shards, weighted by their
    numbers of samples, along the summation tree. Other buffers (counters) end as shard 0 left them, so they advance
    once per step. Buffers that no shard has written are not touched.

    Args:
        places: the places of the buffers.
        split: the split of the shards among workers.
        rank: this worker's rank in it.
        looks: whether what shards have made is looked at once more when it is used.

    Attributes:
        witness: a function that gets what a shard has made, to inject a fault.
        have_kept: whether what shards had made, where it lies on a CPU, still was what they left when it was used last.
    """

    have_kept = True

    def __init__(self, places: Sequence[BufferPlace], split: Split, rank: int, *, looks: bool = False) -> None:
        self._places, self._looks = tuple(places), looks
        self.witness: Witness | None = None
        self._fresh = [number for number, place in enumerate(self._places) if place.rule in FRESH]
        self.resplit(split, rank)

    def resplit(self, split: Split, rank: int) -> None:
        """Begin anew with other shards."""
        self._split = split
        self._tree = SummationTree(split.shards)
        self._mine = split.of(rank)
        self._combining = Combining(self._tree, self._mine)
        self._bases: list[_Base] = []
        self._found: dict[int, _Base] = {}  # what the present shard began with, in place of a base
        self._results: dict[int, list[Tensor | None]] = {}
        self._left: dict[int, list[int]] = {}  # of the results of each shard
        self._doubts: list[_Doubt] = []
        self._asked: list[Callable[[], list[_Doubt]]] = []

    def __len__(self) -> int:
        return len(self._places)

    @property
    def used(self) -> list[bool]:
        """For each buffer, whether a shard of this worker has written it."""
        self._settle()
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
        return [place.tensor if _written(place, base) is False else base.value for place, base in pairs]

    @torch.no_grad()
    def begin(self) -> None:
        """Remember the buffers as they are now; only what was written since the last step is copied."""
        self._results, self._left, self._doubts, self._asked = {}, {}, [], []
        if not self._bases:
            self._bases = [_Base(p.tensor, p.tensor.clone(), p.tensor._version) for p in self._places]
        for place, base in zip(self._places, self._bases, strict=True):
            if _written(place, base) is not False:
                base.tensor = place.tensor
                base.value = (
                    base.value.copy_(place.tensor) if _alike(base.value, place.tensor) else place.tensor.clone()
                )
                base.version = version_of(place.tensor, place.name)

    @torch.no_grad()
    def rewind(self) -> None:
        """Put every buffer back to where the step began."""
        for number in range(len(self._places)):
            self._rewind(number)

    @torch.no_grad()
    def open(self, *, first: bool, apart: bool = False) -> None:
        """A shard begins, the first one of this worker or another.

        Args:
            first: whether it is the first one, which finds buffers as the step began.
            apart: whether backward passes of the shards before it are yet to come: what those have written stays for
                them, and this shard gets other tensors.
        """
        if apart and self._tree.shards > 1:
            for number in range(len(self._places)):
                self._replace(number)
        elif not first and not apart:
            self.rewind()
        for number in self._fresh:
            place = self._places[number]
            if place.rule == "cat":  # another tensor: what shards begin with is shorter
                place.put(self._nothing(number))
            else:
                place.tensor.zero_()

    def take(self, shard: int) -> None:
        """Keep what ``shard`` has made of the buffers, besides what it has made before: stage after stage.

        Raises:
            ModelError: it has given one another shape or dtype, and there are other shards.
        """
        if shard in self._results:  # what one of its stages has not written, the next one may
            self._settle()
        made, doubts = self._made(shard)
        if self._tree.shards > 1:
            self._require_same_form(made)
            made = [None if tensor is None else tensor.detach().clone() for tensor in made]
        if (before := self._results.get(shard)) is None:
            self._doubts += doubts
        else:
            made = [old if new is None else new for old, new in zip(before, _without(made, doubts), strict=True)]
        self._keep(shard, made)

    def _keep(self, shard: int, made: list[Tensor | None]) -> None:
        self._results[shard] = made
        if self._looks:
            self._left[shard] = _summed(made)
        for tensor in made if self.witness is not None else ():
            if tensor is not None and self.witness is not None:
                self.witness("shard_buffer", tensor)

    def _require_same_form(self, made: Sequence[Tensor | None]) -> None:
        for place, base, tensor in zip(self._places, self._bases, made, strict=True):
            if tensor is not None and not place.fits(tensor, base.value):
                self.rewind()
                raise ModelError(
                    f"the buffer {place.name} had the form {form_of(base.value)} before a shard, and has "
                    f"{form_of(tensor)} after it, so there is no mean over shards. Run one batch through the model "
                    f"before run.prepare, if that gives the buffer its form; or use shards=1"
                )

    def result(self, shard: int) -> Sequence[Tensor | None]:
        """What a shard of this worker has made of each buffer; None of those that it has not written."""
        self._settle()
        return self._results.get(shard, [])

    def set_result(self, shard: int, made: Sequence[Tensor | None]) -> None:
        """Keep what another device of this worker says that a shard has made of the buffers.

        Raises:
            ModelError: it has given one another shape or dtype.
        """
        self._require_same_form(made)
        self._keep(shard, list(made))

    @contextmanager
    @torch.no_grad()
    def aside(self) -> Iterator[Callable[[], Sequence[Tensor | None]]]:
        """Begin once more in here, and have everything as it is now afterwards.

        Yields:
            what tells what was made of each buffer in here.
        """
        now = [(place, place.tensor, place.tensor.clone()) for place in self._places]
        self.open(first=False)
        try:
            with torch.enable_grad():
                yield lambda: _without(*self._made(0))
        finally:
            for place, tensor, value in now:
                place.put(tensor)
                set_all([(tensor, value)])

    def _made(self, shard: int) -> tuple[list[Tensor | None], list[_Doubt]]:
        """What there is of each buffer that a shard has written, or may have."""
        made: list[Tensor | None] = []
        doubts: list[_Doubt] = []
        for number, place in enumerate(self._places):
            base = self._found.get(number, self._bases[number])
            is_written = _written(place, base)
            if is_written is None:
                doubts.append(_Doubt(shard, number, (place.tensor != base.value).any()))
            made.append(None if is_written is False else place.tensor)
        return made, doubts

    def ask(self) -> None:
        """Ask the device which buffers shards have written, to wait for the answer later."""
        self._asked.append(_unwritten(self._doubts))
        self._doubts = []

    def _settle(self) -> None:
        """Wait for the device, once for all shards: what they have not written does not count."""
        self.ask()
        asked, self._asked = self._asked, []
        for unwritten in asked:
            for shard, number, _ in unwritten():
                self._results[shard][number] = None

    @torch.no_grad()
    def reduced(self, transport: Transport, used: Sequence[bool], counts: Sequence[int]) -> Placed:
        """What all shards together made of the buffers that any of them wrote. Collective.

        They are as the step began afterwards, unless there is one shard: then those that have a mean or are the first's
        are as that one left them.

        Args:
            transport: the transport between the workers.
            used: one flag per buffer: whether a shard of any worker wrote it.
            counts: the number of samples of each shard.

        Returns:
            each buffer, and what it is to be, until the next collective call.
        """
        by_rule: dict[Rule, list[int]] = {}
        for number, place in enumerate(self._places):
            if used[number] and (self._tree.shards > 1 or place.rule not in ("mean", "first")):
                by_rule.setdefault(place.rule, []).append(number)
        numbers = range(len(self._places)) if self._tree.shards > 1 else sorted(chain.from_iterable(by_rule.values()))
        shares = [count / sum(counts) for count in counts]
        found = [
            *self._added(transport, by_rule.get("mean", []), shares.__getitem__),
            *self._grown(transport, by_rule.get("sum", [])),
            *self._joined(transport, by_rule),
            *self._first(transport, by_rule.get("first", [])),
        ]
        # All is used now; and of a single shard, what it has made is what is put back.
        self.have_kept = all(left == _summed(self._results[one]) for one, left in self._left.items())
        for number in numbers:
            self._rewind(number)
        return found

    def _added(self, transport: Transport, numbers: Sequence[int], share: Callable[[int], float]) -> Placed:
        found: list[tuple[BufferPlace, Tensor]] = []
        for dtype in dict.fromkeys(self._bases[number].tensor.dtype for number in numbers):
            same = [number for number in numbers if self._bases[number].tensor.dtype == dtype]
            kind = self._places[same[0]].rule
            totals = self._combining.added(transport, ("buffers", kind, dtype), partial(self._values, same), share)
            for number, total in zip(same, totals, strict=True):
                found.append((self._places[number], total.view(self._bases[number].value.shape)))
        return found

    def _grown(self, transport: Transport, numbers: Sequence[int]) -> Placed:
        before = {id(self._places[number]): self._bases[number].value for number in numbers}
        return [(place, before[id(place)] + total) for place, total in self._added(transport, numbers, lambda _: 1.0)]

    def _joined(self, transport: Transport, by_rule: Mapping[Rule, Sequence[int]]) -> Placed:
        found: list[tuple[BufferPlace, Tensor]] = []
        kinds: Mapping[Rule, Combine] = {
            "max": partial(self._combining.furthest, torch.maximum),
            "min": partial(self._combining.furthest, torch.minimum),
            "cat": self._combining.joined,
        }
        for rule, combine in kinds.items():
            for number in by_rule.get(rule, []):
                made = [self._value(shard, number) for shard in self._mine]
                if (value := combine(transport, self._bases[number].value, made)) is None:
                    raise ModelError(
                        f"shards of one step have added tensors of different dtype or shape to "
                        f"{self._places[number].name}: only their first dimension may differ"
                    )
                found.append((self._places[number], value))
        return found

    def _first(self, transport: Transport, numbers: Sequence[int]) -> Placed:
        if not numbers:
            return []
        values = [self._value(0, number) if 0 in self._mine else self._bases[number].value for number in numbers]
        # All at once, as bytes: there may be a counter for every layer.
        joined = torch.cat([value.reshape(-1).view(torch.uint8) for value in values])
        transport.broadcast(joined, self._split.owner(0))
        parts = joined.split([value.nbytes for value in values])
        return [
            (self._places[number], part.clone().view(value.dtype).view(value.shape))
            for number, value, part in zip(numbers, values, parts, strict=True)
        ]

    def _values(self, numbers: Sequence[int], shard: int) -> list[Tensor]:
        return [self._value(shard, number) for number in numbers]

    def _value(self, shard: int, number: int) -> Tensor:
        results = self._results.get(shard)  # an empty shard has none
        result = results[number] if results else None
        if result is None:
            return self._nothing(number) if number in self._fresh else self._bases[number].value
        return result

    def _nothing(self, number: int) -> Tensor:
        """With which a shard begins whose results are added to what was there."""
        base = self._bases[number].value
        return base[:0].clone() if self._places[number].rule == "cat" else torch.zeros_like(base)

    def _replace(self, number: int) -> None:
        place, base = self._places[number], self._bases[number]
        if not place.is_held or _written(place, self._found.get(number, base)) is not False:
            value = base.value.clone()
            place.put(value)
            self._found[number] = _Base(value, base.value, value._version)

    def _rewind(self, number: int) -> None:
        place, base = self._places[number], self._bases[number]
        self._found.pop(number, None)
        if not place.is_held or _written(place, base) is not False:
            place.put(base.tensor)
            set_all([(base.tensor, base.value)])
            base.version = base.tensor._version


def _written(place: BufferPlace, base: _Base) -> bool | None:
    """Whether a buffer is not as it was; None where only its device knows, which would have to be waited for."""
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


def _without(made: list[Tensor | None], doubts: Sequence[_Doubt]) -> list[Tensor | None]:
    for _, number, _ in _unwritten(doubts)():
        made[number] = None
    return made


def _summed(made: Sequence[Tensor | None]) -> list[int]:
    return [_sum_of(tensor) for tensor in made if tensor is not None and tensor.device.type == "cpu"]


def _sum_of(tensor: Tensor) -> int:
    is_short = tensor.nbytes <= SHORT and tensor.is_contiguous()
    return crc32(bytes_of(tensor).data) if is_short else sum_of_words(tensor)


def _alike(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and left.dtype == right.dtype and left.device == right.device
