"""Digests of a few places of data, by which workers, joiners and resumed runs know whether their data are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import date, time, timedelta
from decimal import Decimal
from fractions import Fraction
from hashlib import blake2b
from pathlib import PurePath
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import numpy as np
from torch import Tensor

from unisono.changes import Look, Memento, enlarge
from unisono.data.generators import generators_in, generators_kept, own_generators_kept
from unisono.data.loading import LoaderProcesses, Processes
from unisono.data.shards import ShardSource, is_plain, one_thread
from unisono.data.stream_reader import ReaderState
from unisono.data.stream_readers import OpenReaders, Wish
from unisono.errors import DataError
from unisono.plan.split import even_bounds
from unisono.words import Bytes, bytes_of

MOST_BYTES = 2**20
"""Bytes of a tensor, an array or a text that are read: of larger ones, evenly spaced blocks."""

BLOCKS = 64

MOST_ITEMS = 16
"""Items of a list without numbers that are read: of longer lists, evenly spaced items."""

DEEPEST = 8
"""Lists and mappings in each other, and no more."""

MOST_PARTS = 2**12
"""Parts of a sample, with all that they hold, even the sample itself again. A sample with more parts is left out."""

LEFT_OUT = b""
"""Stands for what cannot be told from others of its kind: samples are never called different because of it."""

Part = Any  # bytes, or an array of them


def digest_of(value: Any) -> str:
    """A digest of tensors, arrays, images, numbers, text, and lists, mappings and data classes of them.

    It goes by bytes, so NaN is equal to itself. Of an absolute path only the last part counts, since each host may have
    a copy of its own; of mappings and sets the order does not count. All else is left out.
    """
    try:
        return _digest(value, _Walk()).hex()
    except _TooManyPartsError:  # nothing of it counts: a set's first ones are others in each process
        return _digest(LEFT_OUT, _Walk()).hex()


class _TooManyPartsError(Exception):
    """Ends a walk."""


@dataclass
class _Walk:
    """Where in a sample it is looked at, and how many parts were looked at."""

    depth: int = 0
    parts: int = 0


def _digest(value: Any, walk: _Walk) -> bytes:
    walk.parts += 1
    if walk.parts > MOST_PARTS:
        raise _TooManyPartsError
    walk.depth += 1
    try:
        parts: list[Part] = list(_parts(value, walk)) if walk.depth <= DEEPEST else []
    except _TooManyPartsError:
        raise
    except Exception:  # noqa: BLE001 (whatever it is, it cannot be compared)
        parts = [LEFT_OUT]
    finally:
        walk.depth -= 1
    digest = blake2b(digest_size=8)
    for part in parts:
        digest.update(f"{len(part)}:".encode())
        digest.update(part)
    return digest.digest()


def _parts(value: Any, walk: _Walk) -> Iterator[Part]:
    match value:
        case np.ndarray() | np.generic():
            yield from _array(np.asarray(value), walk)
        case None | bool() | int() | date() | time() | timedelta() | Decimal() | Fraction():
            yield str(value).encode()
        case float() | complex():
            yield from _array(np.asarray(value), walk)
        case str() | PurePath():
            text = str(value)
            named = text.rstrip("/").rpartition("/")[2] if text.startswith("/") else text
            yield from _bounded(named.encode(errors="surrogatepass"))
        case bytes() | bytearray() | memoryview():
            yield from _bounded(bytes(value))
        case Tensor():
            yield f"{value.dtype} {list(value.shape)}".encode()
            yield from _bounded(bytes_of(value.detach().cpu().resolve_conj().resolve_neg().contiguous()))
        case Mapping():
            yield from sorted(_digest(key, walk) + _digest(value[key], walk) for key in value)
        case Set():
            yield from sorted(_digest(item, walk) for item in value)
        case Sequence():
            yield from _sequence(value, walk)
        case _ if is_dataclass(value):
            yield from (_digest(getattr(value, field.name), walk) for field in fields(value))
        case _ if hasattr(value, "__array__") or hasattr(value, "__array_interface__"):  # an image, say
            yield from _array(np.asarray(value), walk)
        case _:
            yield LEFT_OUT


def _array(value: np.ndarray[Any, Any], walk: _Walk) -> Iterator[Part]:
    kind = value.dtype
    if kind.names:  # there may be anything between its fields
        for name in kind.names:
            yield from _array(value[name], walk)
    elif kind.hasobject:
        yield from _sequence(value.reshape(-1).tolist(), walk)
    elif kind.char not in "gG":  # which have bytes that hold nothing
        yield f"{kind.str} {list(value.shape)}".encode()
        yield from _bounded(np.ascontiguousarray(value).reshape(-1).view(np.uint8))


def _sequence(value: Sequence[Any], walk: _Walk) -> Iterator[Part]:
    yield str(len(value)).encode()
    if isinstance(value, list | tuple) and value and isinstance(value[0], int | float):
        numbers = np.asarray(value)
        if numbers.dtype.kind in "biuf" and numbers.ndim == 1:
            yield from _array(numbers, walk)
            return
    yield from (_digest(value[place], walk) for place in evenly(len(value), MOST_ITEMS))


def _bounded(data: bytes | Bytes) -> Iterator[Part]:
    yield str(len(data)).encode()
    if len(data) <= MOST_BYTES:
        yield data
        return
    size = MOST_BYTES // BLOCKS
    yield from (data[start : start + size] for start in evenly(len(data) - size + 1, BLOCKS))


def evenly(count: int, most: int) -> list[int]:
    """Numbers below ``count`` that lie evenly, the first and the last one among them; no more than ``most``, from 2."""
    most = min(count, most)
    return [place * (count - 1) // (most - 1) for place in range(most)] if most > 1 else [*range(most)]


PLACES = 5
"""The number of places of an epoch whose samples have to be loaded, which may take long."""

PLAIN_PLACES = 64
"""The number of places of an epoch whose samples lie in memory."""

READERS = 4
"""The readers of a stream that are compared: more than the files that a few hosts would draw alike by chance."""

MOST_SAMPLES = 16
"""The most samples that each reader reads: as many as a shard has by default, so the first step need not read again."""

CONTENT = "samples at a few places, the first and the last among them"
"""Its name where workers compare it."""


class Glance(NamedTuple):
    """The places of data that workers look at.

    Attributes:
        samples: the number of samples that they all read for a step.
        is_again: whether the same data were looked at before.
        tell: a function that is told of state of a data set's own: its path, and what is the matter with it.
    """

    readers: int
    samples: int
    epoch: int = 0
    is_again: bool = False
    tell: Callable[[str, str], None] | None = None


class HasContent(Protocol):
    """Data that can be looked at."""

    def content(self, look: Glance) -> str:
        """A digest of the samples at a few places; empty where none were read."""


class Contents:
    """Digests of the data of a run's loops, or of its evaluations.

    Data that come again are looked at once more in one place alone: a script may have a loop for each epoch, and
    a worker that resumes or joins looks at the data of each loop that it skips.

    Args:
        looks_again: whether they are. Not in evaluations: a joiner has not made those in the bodies of loops.
    """

    def __init__(self, *, looks_again: bool = True) -> None:
        self._first: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        self._looks_again = looks_again

    def of(self, data: Any, feed: HasContent, look: Glance) -> str:
        """A digest of the samples at a few places; empty where they are compared in another way."""
        with suppress(TypeError):  # a list, say
            if (first := self._first.get(data)) is not None:
                again = feed.content(look._replace(is_again=True)) if self._looks_again else ""
                return f"{first} {again}".strip()
        result = feed.content(look)
        with suppress(TypeError):
            self._first[data] = result
        return result


def content_of_samples(source: ShardSource, processes: Processes, look: Glance) -> str:
    """A digest of samples at fixed places of an epoch's order, each seeded as in training."""
    count, is_in_memory = source.order.cut(look.epoch, 1).samples, is_plain(source.dataset)
    places = evenly(count, PLAIN_PLACES if is_in_memory else PLACES)
    places = places[:1] if look.is_again else places

    def held() -> list[str]:
        with one_thread(), own_generators_kept(generators_in(source.dataset)):
            digests = [_held_at(source, look.epoch, place) for place in places]
            return digests if look.is_again or not places else [*digests, *_own_state(source, look.epoch, places[0])]

    results = _apart(held, processes if not is_in_memory else replace(processes, count=0))
    if (tell := look.tell) is not None:
        for told in results[len(places) :]:
            path, _, words = told.partition("\0")
            tell(path, words)
    return _joined(results[: len(places)])


def _own_state(source: ShardSource, epoch: int, place: int) -> list[str]:
    """What loading a sample changes, and a sample goes by: paths, each with a sentence behind a zero.

    The sample is loaded three times: a generator that each time seeds anew is the same then, and numbers that are made
    far larger change nothing in a sample that does not go by them.
    """
    roots = {"dataset": source.dataset} | ({} if source.collate is None else {"collate_fn": source.collate})

    def load() -> str:
        digest = _held_at(source, epoch, place)
        if source.collate is not None:
            with suppress(Exception):  # one sample may be too few
                source.collate([source.sample(epoch, place)])
        return digest

    looks, digests = [Look(roots)], list[str]()
    for _ in range(2):
        digests.append(load())
        looks.append(Look(roots))
    changes = [changed for changed in looks[1].changed_until(looks[2]) if not changed.is_known]
    draws = [changed for changed in changes if changed.kind in ("generator", "position")]
    told = [f"{changed.path}\0{DRAWS.format(path=changed.path)}" for changed in draws]
    counts = [changed for changed in changes if changed.kind == "number" and not isinstance(changed.place.value, bool)]
    if counts and digests[0] == digests[1]:
        memento = Memento(changed.place for changed in counts)
        enlarge(counts)
        is_same = load() == digests[0]
        memento.restore()
        told += [] if is_same else [f"{changed.path}\0{COUNTS.format(path=changed.path)}" for changed in counts]
    return told or ([] if digests[0] == digests[1] else [f"dataset\0{TWO_ANSWERS}"])


DRAWS = (
    "{path} is a random generator, or an iterator, of the data set's own, which loading a sample moves on: each "
    "worker, and each loader process, has one, so that samples depend on how many there are. Draw in __getitem__ from "
    "the global generators of torch, NumPy or Python, which are seeded for each sample"
)
COUNTS = (
    "{path} changes when a sample is loaded: each worker, and each loader process, has its own, so that samples which "
    "go by it would depend on how many there are, and on whether the run was resumed"
)
TWO_ANSWERS = (
    "the data set has two answers: the same sample, loaded twice with the global generators seeded alike, differs. A "
    "sample has to follow from its index, and from draws of the global generators of torch, NumPy or Python"
)


def content_of_stream(readers: OpenReaders, processes: Processes, look: Glance) -> str:
    """A digest of what some readers give for the first step.

    Args:
        readers: the readers; what they have read here, they need not read again.
        processes: the processes that read.
        look: what to look at; nothing where it is looked at again, since to open a stream may take long.
    """
    bounds = even_bounds(look.samples, look.readers)
    counts = {number: bounds[number + 1] - bounds[number] for number in evenly(look.readers, READERS)}

    def held() -> list[str]:
        wishes = [Wish(0, number, ReaderState(), min(count, MOST_SAMPLES)) for number, count in counts.items() if count]
        return [_held_by(readers, wish) for wish in wishes]

    return "" if look.is_again else _joined(_apart(held, processes))


def _held_at(source: ShardSource, epoch: int, place: int) -> str:
    try:
        return digest_of(source.sample(epoch, place))
    except Exception as error:  # noqa: BLE001 (the worker that trains on the sample raises it)
        return type(error).__name__


def _held_by(readers: OpenReaders, wish: Wish) -> str:
    try:
        return digest_of(readers.batch(wish))
    except DataError:
        raise
    except Exception as error:  # noqa: BLE001 (the worker that trains on the samples raises it)
        return type(error).__name__


def _joined(digests: Sequence[str]) -> str:
    return digest_of(" ".join(digests)) if digests else ""


class _LookRequest(NamedTuple):
    """A request for a digest of the data."""

    name: str


def _apart(held: Callable[[], list[str]], processes: Processes) -> list[str]:
    """Call a function; in a loader process, if such load: what it opens here would be theirs as well."""
    if not processes.count:
        with generators_kept():
            return held()
    apart = LoaderProcesses(lambda request: held(), replace(processes, count=1), share_slots=True)
    try:
        (process,) = apart.all
        process.ask(lambda: _LookRequest("samples at a few places, to compare them"))
        digests: list[str] = process.answer()
        return digests
    finally:
        apart.close()
