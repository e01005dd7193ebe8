"""What a few places of data hold, by which workers, joiners and resumed runs know whether theirs are the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from unisono.data.loader_processes import LoaderProcesses, Processes
from unisono.data.own_generators import generators_in, own_generators_kept
from unisono.data.sample_digest import digest_of, evenly
from unisono.data.shards import ShardSource, is_plain, one_thread
from unisono.data.stream_reader import ReaderState
from unisono.data.stream_readers import OpenReaders, Wish
from unisono.data.streams import generators_kept
from unisono.errors import DataError
from unisono.plan.split import even_bounds

PLACES = 5
"""Of an epoch whose samples are loaded, which may take long."""

PLAIN_PLACES = 64
"""Of an epoch whose samples lie in memory."""

READERS = 4
"""Of a stream: more than the files that a few hosts would draw alike by chance."""

MOST_SAMPLES = 16
"""That each of them reads: as many as a shard has if nothing is set, so the first step need not read them again."""

CONTENT = "samples at a few places, the first and the last among them"
"""Its name where workers compare it."""


class Glance(NamedTuple):
    """What is looked at.

    Attributes:
        readers: the number of a stream's readers.
        samples: the number of samples that they all read for a step.
        epoch: the number of the epoch whose samples are loaded.
        is_again: whether the same data were looked at before.
    """

    readers: int
    samples: int
    epoch: int = 0
    is_again: bool = False


class HasContent(Protocol):
    """Data that can be looked at."""

    def content(self, look: Glance) -> str:
        """A digest of what a few places hold; empty where nothing was looked at."""


class Contents:
    """What the data of a run's loops, or of its evaluations, hold.

    Data that come again are looked at once more in one place alone: a script may have a loop for each epoch, and
    whoever resumes or joins looks at the data of each loop that it skips.

    Args:
        looks_again: whether they are. Not in evaluations: whoever joins has not made those in the bodies of loops.
    """

    def __init__(self, *, looks_again: bool = True) -> None:
        self._first: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        self._looks_again = looks_again

    def of(self, data: Any, feed: HasContent, look: Glance) -> str:
        """A digest of what a few places hold; empty where that is compared in another way.

        Args:
            data: the data, as the script gives them.
            feed: the same as they are read.
            look: what to look at.
        """
        with suppress(TypeError):  # a list, say
            if (first := self._first.get(data)) is not None:
                again = feed.content(look._replace(is_again=True)) if self._looks_again else ""
                return f"{first} {again}".strip()
        result = feed.content(look)
        with suppress(TypeError):
            self._first[data] = result
        return result


def content_of_samples(source: ShardSource, processes: Processes, look: Glance) -> str:
    """A digest of samples at fixed places of an epoch's order, each seeded as in training.

    Args:
        source: gives the samples.
        processes: the processes that load.
        look: what to look at.
    """
    count, is_in_memory = source.order.cut(look.epoch, 1).samples, is_plain(source.dataset)
    places = evenly(count, PLAIN_PLACES if is_in_memory else PLACES)
    places = places[:1] if look.is_again else places

    def held() -> list[str]:
        with one_thread(), own_generators_kept(generators_in(source.dataset)):
            return [_held_at(source, look.epoch, place) for place in places]

    return _joined(_apart(held, processes if not is_in_memory else replace(processes, count=0)))


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
    except Exception as error:  # noqa: BLE001 (whoever trains on the sample is told)
        return type(error).__name__


def _held_by(readers: OpenReaders, wish: Wish) -> str:
    try:
        return digest_of(readers.batch(wish))
    except DataError:
        raise
    except Exception as error:  # noqa: BLE001 (whoever trains on the samples is told)
        return type(error).__name__


def _joined(digests: Sequence[str]) -> str:
    return digest_of(" ".join(digests)) if digests else ""


class _LookRequest(NamedTuple):
    """A request for what the data hold."""

    name: str


def _apart(held: Callable[[], list[str]], processes: Processes) -> list[str]:
    """Call a function; in a loader process, if such load: what it opens here would be theirs as well."""
    if not processes.count:
        with generators_kept():
            return held()
    apart = LoaderProcesses(lambda request: held(), replace(processes, count=1), share_slots=True)
    try:
        apart.ask(0, lambda: _LookRequest("samples at a few places, to compare them"))
        result: list[str] = apart.answer(0)
        return result
    finally:
        apart.close()
