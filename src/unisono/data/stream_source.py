"""A stream as one worker reads it, step by step."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from unisono.data.loader_processes import LoaderProcesses, Processes
from unisono.data.refused import refused
from unisono.data.stream_reader import ReaderState
from unisono.data.stream_readers import Given, OpenReaders, Readers, Wish
from unisono.errors import DataError
from unisono.plan.batches import Batch


class ReadRequest(NamedTuple):
    """A request for what the readers of a process give next.

    Attributes:
        readers: the numbers of the readers.
        wishes: what they are to give now; none to go on behind what was given last.
    """

    readers: tuple[int, ...]
    wishes: tuple[Wish, ...] = ()

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"the next samples of the stream's readers {', '.join(map(str, self.readers))}"


class ReadingOn:
    """Reads in a loader process: step after step, and epoch after epoch, until it is told to begin elsewhere.

    Args:
        readers: the readers.
        epochs: the number of epochs, behind which nothing is read.
    """

    def __init__(self, readers: OpenReaders, epochs: int) -> None:
        self._readers, self._epochs = readers, epochs
        self._wishes: Sequence[Wish] = ()

    def __call__(self, request: ReadRequest) -> list[tuple[Given, Any]]:
        """What the readers give, with its batch; nothing behind the last epoch."""
        if request.wishes:
            self._wishes = request.wishes
            self._readers.expect(request.wishes)
        found = [(self._readers.give(wish), self._readers.batch(wish)) for wish in self._wishes]
        self._wishes = self._behind([given for given, _ in found])
        return found

    def _behind(self, given: Sequence[Given]) -> Sequence[Wish]:
        both = list(zip(self._wishes, given, strict=True))
        if not all(one.is_over for one in given):
            return [wish._replace(at=one.after) for wish, one in both]
        following = [wish._replace(epoch=wish.epoch + 1, at=ReaderState()) for wish, _ in both]
        return [wish for wish in following if wish.epoch < self._epochs]


class ReadersAhead:
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
        self._newest: dict[int, tuple[Given, Any]] = {}

    def expect(self, wishes: Sequence[Wish]) -> None:
        """This is what this worker needs next; its readers are distributed among its processes."""
        self._wishes = {wish.number: wish for wish in wishes}
        count = self._settings.count
        mine = tuple(tuple(number for number in self._wishes if number % count == each) for each in range(count))
        if mine == self._mine:
            return
        self._mine = mine
        self._newest = {number: newest for number, newest in self._newest.items() if number in self._wishes}
        if self._processes is not None:
            self._begin(self._processes, range(count))

    def give(self, wish: Wish) -> Given:
        """What a reader gives; waits for it if need be."""
        return self._read(wish)[0]

    def batch(self, wish: Wish) -> Any:
        """The same, collated."""
        return self._read(wish)[1]

    def mark(self) -> int:
        """No other worker reads the same."""
        return 0

    def close(self) -> None:
        """End the processes."""
        self._readers.close()
        self._newest, self._mine = {}, ()
        processes, self._processes = self._processes, None
        if processes is not None:
            processes.close()

    def _read(self, wish: Wish) -> tuple[Given, Any]:
        newest = self._newest.get(wish.number)
        if newest is not None and newest[0].fulfils(wish):
            return newest
        if newest is not None and newest[0].is_over and (newest[0].epoch, newest[0].after) == (wish.epoch, wish.at):
            nothing = self._newest[wish.number] = Given(wish.epoch, wish.number, 0, wish.at, wish.at, True), None
            return nothing  # its process may read the next epoch by now
        if wish != self._wishes.get(wish.number):
            return self._readers.give(wish), self._readers.batch(wish)
        return self._next(wish)

    def _next(self, wish: Wish) -> tuple[Given, Any]:
        number = wish.number % self._settings.count
        if self._processes is None:
            reads = ReadingOn(self._readers, self._epochs)
            self._processes = LoaderProcesses(reads, self._settings, share_slots=False)
            self._begin(self._processes, range(self._settings.count))
        self._receive(self._processes, number)
        if wish.number not in self._newest or not self._newest[wish.number][0].fulfils(wish):
            self._begin(self._processes, [number])
            self._receive(self._processes, number)
        return self._newest[wish.number]

    def _begin(self, processes: LoaderProcesses, numbers: Iterable[int]) -> None:
        """Have processes begin with what is needed next; what lies ahead in them is dropped."""
        for number in numbers:
            while processes.under_way(number):
                processes.answer(number)
            mine = self._mine[number]
            if mine:
                processes.ask(number, partial(ReadRequest, mine, tuple(self._wishes[one] for one in mine)))
                self._go_on(processes, number)

    def _receive(self, processes: LoaderProcesses, number: int) -> None:
        for given, batch in processes.answer(number):
            self._newest[given.number] = given, batch
        self._go_on(processes, number)

    def _go_on(self, processes: LoaderProcesses, number: int) -> None:
        go_on = partial(ReadRequest, self._mine[number])
        while processes.under_way(number) < self._settings.ahead and processes.ask(number, go_on):
            pass


class StreamSource:
    """Gives the samples of any shard of the step that has begun.

    Args:
        readers: the readers, one for each shard of the job.
        name: the name of the stream's kind.
        cure: what to do if workers read different samples where they are to read the same, for messages.

    Attributes:
        unlike: why workers may have different samples in a step, and what to do, for messages.
    """

    def __init__(self, readers: Readers, name: str, cure: str = "") -> None:
        self._readers, self._name = readers, name
        self.unlike = f"All read the same batches of {name}: {cure}"
        self._begun: tuple[ReaderState, ...] = ()

    def read(self, wishes: Sequence[Wish]) -> Iterator[Given]:
        """What this worker's readers give for a step."""
        self._readers.expect(wishes)
        yield from map(self._readers.give, wishes)

    def begin(self, states: tuple[ReaderState, ...]) -> None:
        """A step begins: its batch starts where these states are."""
        self._begun = states

    def batch(self, wish: Wish) -> Any:
        """What one reader gives, collated; see :meth:`Readers.batch`."""
        return self._readers.batch(wish)

    def of(self, batch: Batch, shards: Iterable[int]) -> list[Any]:
        """The batches of some shards of the step that has begun; None for an empty one.

        Raises:
            DataError: a stream no longer gives what it has given, or samples cannot be collated.
        """
        return [self._shard(batch, number) for number in shards]

    def mark(self, batch: Batch) -> int:
        """What tells the samples of a step that all workers read; 0 where nobody else reads these samples."""
        return self._readers.mark()

    def close(self) -> None:
        """Close the readers; whoever reads again opens them anew."""
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
