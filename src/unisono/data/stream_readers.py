"""The readers of a stream, open in this process or reading ahead in others, and their output for a step."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from unisono.data.generators import seed_generators
from unisono.data.loading import LoaderProcess, LoaderProcesses, Processes
from unisono.data.refusals import refused
from unisono.data.sample_order import LoopKey
from unisono.data.shards import Collate, alike, collated, one_thread
from unisono.data.stream_reader import Reader, ReaderKey, ReaderState
from unisono.errors import DataError
from unisono.plan.batches import Batch
from unisono.plan.order import Stream, stream_seed


class Wish(NamedTuple):
    """A request to a reader. Fewer ``samples`` are given where the stream ends."""

    epoch: int
    number: int
    at: ReaderState
    samples: int


class ReaderOutput(NamedTuple):
    """The output of a reader. ``samples`` are fewer than asked for, or none, where the stream ends."""

    epoch: int
    number: int
    samples: int
    before: ReaderState
    after: ReaderState
    is_over: bool

    def fulfils(self, wish: Wish) -> bool:
        """Whether this is the output for a wish."""
        is_enough = self.samples == wish.samples or (self.is_over and self.samples < wish.samples)
        return (self.epoch, self.number, self.before) == wish[:3] and is_enough


class Readers(Protocol):
    """Readers of a stream, some of which are open."""

    def expect(self, wishes: Sequence[Wish]) -> None:
        """Take the wishes of this worker for its next step. Readers of other numbers are closed."""

    def give(self, wish: Wish) -> ReaderOutput:
        """Return the output of a reader. Fast if the reader stands right before it, or has just given it.

        Raises:
            DataError: it no longer gives what it has given.
        """

    def batch(self, wish: Wish) -> Any:
        """Return the samples of a reader, collated; None if it gives none.

        Raises:
            DataError: it no longer gives what it has given, or samples cannot be collated.
        """

    def mark(self) -> int:
        """Return a number below 2**32 for the data of a step that all workers read; 0 if each reads its own."""
        return 0

    def close(self) -> None:
        """Close all readers; a later call opens them anew."""


@dataclass(slots=True)
class _Newest:
    """The newest output of a reader, and its batch once that was requested."""

    output: ReaderOutput
    samples: Sequence[Any]
    batch: Any = None


class OpenReaders(Readers):
    """Readers in this process.

    Args:
        collate: a function that makes a batch of a list of samples; None for torch's ``default_collate``.
        begin: a function that each reader calls with its number before it opens its copy of the stream.
        keeps: whether the states that streams tell of themselves are used.
    """

    def __init__(
        self,
        stream: Any,
        key: LoopKey,
        readers: int,
        collate: Collate | None = None,
        begin: Callable[[int], None] | None = None,
        *,
        keeps: bool = False,
    ) -> None:
        self._stream, self._key, self._readers, self._begin, self._keeps = stream, key, readers, begin, keeps
        self._is_repeatable = False  # whether it was read twice, and gave the same
        self._collate = collate
        self._open: dict[int, tuple[int, Reader]] = {}
        self._newest: dict[int, _Newest] = {}

    def expect(self, wishes: Sequence[Wish]) -> None:
        """Close readers of other numbers."""
        for number in {*self._open, *self._newest} - {wish.number for wish in wishes}:
            self._open.pop(number, None)
            self._newest.pop(number, None)

    def give(self, wish: Wish) -> ReaderOutput:
        """Return the output of a reader; see :class:`Readers`."""
        return self._read(wish).output

    def batch(self, wish: Wish) -> Any:
        """Return the samples of a reader, collated; see :class:`Readers`."""
        newest = self._read(wish)
        if newest.batch is None and newest.samples:
            key = self._key.loop, wish.epoch, wish.number, wish.at.samples
            with one_thread():
                seed_generators(stream_seed(self._key.seed, Stream.COLLATE, *key))
                numbers = range(wish.at.samples, wish.at.samples + len(newest.samples))
                whose = f"reader {wish.number} of {type(self._stream).__name__} in epoch {wish.epoch}"
                newest.batch = collated(self._collate, list(newest.samples), numbers, whose)
        return newest.batch

    def close(self) -> None:
        """Close all readers."""
        self.expect(())

    def _read(self, wish: Wish) -> _Newest:
        newest = self._newest.get(wish.number)
        if newest is not None and newest.output.fulfils(wish):
            return newest
        epoch, reader = self._open.get(wish.number, (-1, None))
        with one_thread():
            if reader is None or (epoch, reader.at) != (wish.epoch, wish.at):
                reader = self._reader(wish)
                self._open[wish.number] = wish.epoch, reader
            samples = reader.take(wish.samples)
            output = ReaderOutput(wish.epoch, wish.number, len(samples), wish.at, reader.at, reader.is_over)
            if not wish.number and not wish.at.samples:
                self._require_same(wish, samples)
        newest = self._newest[wish.number] = _Newest(output, samples)
        return newest

    def _reader(self, wish: Wish) -> Reader:
        key = self._key
        numbered = ReaderKey(key.seed, key.loop, key.passes, wish.epoch, wish.number, self._readers)
        return Reader(self._stream, numbered, wish.at, self._begin, keeps=self._keeps)

    def _require_same(self, wish: Wish, samples: Sequence[Any]) -> None:
        """Read the first samples twice, once in a loop: what comes by chance is other then.

        Where the stream tells a state, go on from it, too: what comes next has to be the same.
        """
        if self._is_repeatable:
            return
        reader, count = self._reader(wish), len(samples)
        if not alike(reader.take(count), list(samples)):
            raise DataError(refused("stream.not-repeated", name=type(self._stream).__name__))
        if reader.at.state is not None and not self._can_continue(wish, reader, count):
            raise DataError(refused("stream.state-inexact", name=type(self._stream).__name__))
        self._is_repeatable = True

    def _can_continue(self, wish: Wish, reader: Reader, count: int) -> bool:
        """Whether a reader that begins at another one's state gives the same as that."""
        try:
            resumed = self._reader(wish._replace(at=reader.at)).take(count)
        except Exception:  # noqa: BLE001 (whatever it is, it cannot go on)
            return False
        return alike(resumed, reader.take(count))


# Readers in loader processes.


class ReadRequest(NamedTuple):
    """A request for the next outputs of the readers of a process.

    Without ``wishes``, they go on behind the newest outputs.
    """

    readers: tuple[int, ...]
    wishes: tuple[Wish, ...] = ()

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"the next samples of the stream's readers {', '.join(map(str, self.readers))}"


class ReadingOn:
    """Reads in a loader process: step after step, and epoch after epoch, until it is told to begin elsewhere."""

    def __init__(self, readers: OpenReaders, epochs: int) -> None:
        self._readers, self._epochs = readers, epochs
        self._wishes: Sequence[Wish] = ()

    def __call__(self, request: ReadRequest) -> list[tuple[ReaderOutput, Any]]:
        """Return the outputs of the readers, each with its batch; nothing behind the last epoch."""
        if request.wishes:
            self._wishes = request.wishes
            self._readers.expect(request.wishes)
        read = [(self._readers.give(wish), self._readers.batch(wish)) for wish in self._wishes]
        self._wishes = self._behind([output for output, _ in read])
        return read

    def _behind(self, outputs: Sequence[ReaderOutput]) -> Sequence[Wish]:
        if not all(answer.is_over for answer in outputs):
            return [wish._replace(at=answer.after) for wish, answer in zip(self._wishes, outputs, strict=True)]
        following = [wish._replace(epoch=wish.epoch + 1, at=ReaderState()) for wish in self._wishes]
        return [wish for wish in following if wish.epoch < self._epochs]


class ReadersAhead(Readers):
    """Readers in loader processes, each of which has some of this worker's.

    A process reads ahead by itself, as it would go on if nothing happens. What it says of a reader belongs to what it
    gives, so nothing that lies ahead gets into a state of the run. If a step wants something else, since the run has
    gone back or shards have come here, what lies ahead is dropped, and the processes begin there.

    Args:
        readers: the readers, as processes get them; here they read for audits of other workers' shards.
        processes: the processes to start.
        epochs: the number of epochs.
    """

    def __init__(self, readers: OpenReaders, processes: Processes, epochs: int) -> None:
        self._readers, self._settings, self._epochs = readers, processes, epochs
        self._processes: LoaderProcesses | None = None
        self._mine: tuple[tuple[int, ...], ...] = ()  # the readers of each process
        self._wishes: dict[int, Wish] = {}
        self._newest: dict[int, tuple[ReaderOutput, Any]] = {}

    def expect(self, wishes: Sequence[Wish]) -> None:
        """Take the wishes of this worker for its next step; its readers are distributed among its processes."""
        self._wishes = {wish.number: wish for wish in wishes}
        count = self._settings.count
        mine = tuple(tuple(number for number in self._wishes if number % count == process) for process in range(count))
        if mine == self._mine:
            return
        self._mine = mine
        self._newest = {number: newest for number, newest in self._newest.items() if number in self._wishes}
        if self._processes is not None:
            self._begin_all(self._processes)

    def give(self, wish: Wish) -> ReaderOutput:
        """Return the output of a reader; wait for it if need be."""
        return self._read(wish)[0]

    def batch(self, wish: Wish) -> Any:
        """Return the samples of a reader, collated."""
        return self._read(wish)[1]

    def close(self) -> None:
        """End the processes."""
        self._readers.close()
        self._newest, self._mine = {}, ()
        processes, self._processes = self._processes, None
        if processes is not None:
            processes.close()

    def _read(self, wish: Wish) -> tuple[ReaderOutput, Any]:
        newest = self._newest.get(wish.number)
        if newest is not None and newest[0].fulfils(wish):
            return newest
        if newest is not None and newest[0].is_over and (newest[0].epoch, newest[0].after) == (wish.epoch, wish.at):
            nothing = self._newest[wish.number] = ReaderOutput(wish.epoch, wish.number, 0, wish.at, wish.at, True), None
            return nothing  # its process may read the next epoch by now
        if wish != self._wishes.get(wish.number):
            return self._readers.give(wish), self._readers.batch(wish)
        return self._next(wish)

    def _next(self, wish: Wish) -> tuple[ReaderOutput, Any]:
        number = wish.number % self._settings.count
        if self._processes is None:
            reads = ReadingOn(self._readers, self._epochs)
            self._processes = LoaderProcesses(reads, self._settings, share_slots=False)
            self._begin_all(self._processes)
        process, mine = self._processes.all[number], self._mine[number]
        self._receive(process, mine)
        if wish.number not in self._newest or not self._newest[wish.number][0].fulfils(wish):
            self._begin(process, mine)
            self._receive(process, mine)
        return self._newest[wish.number]

    def _begin_all(self, processes: LoaderProcesses) -> None:
        for process, mine in zip(processes.all, self._mine, strict=True):
            self._begin(process, mine)

    def _begin(self, process: LoaderProcess, mine: tuple[int, ...]) -> None:
        """Have a process begin with the next needed outputs; those that lie ahead in it are dropped."""
        while process.under_way:
            process.answer()
        if mine:
            process.ask(partial(ReadRequest, mine, tuple(self._wishes[number] for number in mine)))
            self._go_on(process, mine)

    def _receive(self, process: LoaderProcess, mine: tuple[int, ...]) -> None:
        for output, batch in process.answer():
            self._newest[output.number] = output, batch
        self._go_on(process, mine)

    def _go_on(self, process: LoaderProcess, mine: tuple[int, ...]) -> None:
        while process.under_way < self._settings.ahead and process.ask(partial(ReadRequest, mine)):
            pass


class StreamSource:
    """Gives the samples of any shard of the step that has begun.

    Args:
        cure: what to do if workers read different samples where they are to read the same, for messages.

    Attributes:
        unlike: why workers may have different samples in a step, and what to do, for messages.
    """

    def __init__(self, readers: Readers, name: str, cure: str = "") -> None:
        self._readers, self._name = readers, name
        self.unlike = f"All read the same batches of {name}: {cure}"
        self._begun: tuple[ReaderState, ...] = ()

    def read(self, wishes: Sequence[Wish]) -> Iterator[ReaderOutput]:
        """Yield the outputs of this worker's readers for a step."""
        self._readers.expect(wishes)
        yield from map(self._readers.give, wishes)

    def begin(self, states: tuple[ReaderState, ...]) -> None:
        """Begin a step, whose batch starts at these states."""
        self._begun = states

    def batch(self, wish: Wish) -> Any:
        """Return the samples of a reader, collated; see :meth:`Readers.batch`."""
        return self._readers.batch(wish)

    def of(self, batch: Batch, shards: Iterable[int]) -> list[Any]:
        """The batches of some shards of the step that has begun; None for an empty one.

        Raises:
            DataError: a stream no longer gives what it has given, or samples cannot be collated.
        """
        return [self._shard(batch, number) for number in shards]

    def mark(self, batch: Batch) -> int:
        """Return the mark of the samples of a step that all workers read; 0 where only this worker reads them."""
        return self._readers.mark()

    def close(self) -> None:
        """Close the readers; a later call opens them anew."""
        self._readers.close()

    def _shard(self, batch: Batch, number: int) -> Any:
        if not (count := len(batch.shard(number))):
            return None
        wish = Wish(batch.epoch, number, self._begun[number], count)
        if (given := self._readers.give(wish).samples) != count:
            raise DataError(
                refused("stream.unlike-elsewhere", reader=number, name=self._name, given=given, asked=count)
            )
        return self._readers.batch(wish)
