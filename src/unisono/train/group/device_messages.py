"""The messages that the devices of an elastic job's worker send as one, and the news that its main thread waits for."""

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, NoReturn

from pydantic import Field, TypeAdapter

from unisono.errors import Dismissed, JobEnded, LaunchError
from unisono.membership import messages
from unisono.membership.messages import JobOver, NewGeneration, Refused, Removed, StoreReply, StoreRequest, Welcome

NEXT_ADDRESS = ","
"""Separates the addresses of two devices."""


class WorkedOut(messages.Message):
    """A device has worked out a collective call. It applies the change only if all devices of its worker do.

    Attributes:
        acts: the number of collective calls that are complete with this one.
    """

    kind: Literal["worked out"] = "worked out"
    generation: messages.Count
    acts: messages.Count


class Agreed(messages.Message):
    """The answer to :class:`WorkedOut`, the same for all devices.

    Attributes:
        holds: whether all devices have worked out the call, and apply it now.
    """

    kind: Literal["agreed"] = "agreed"
    generation: messages.Count
    acts: messages.Count
    holds: bool


class Watched(messages.Message):
    """A watched value, which is known now."""

    kind: Literal["known"] = "known"
    name: messages.Text
    value: messages.Value


FromDevice = Annotated[messages.FromWorker | WorkedOut, Field(discriminator="kind")]
ToDevice = Annotated[messages.ToWorker | Agreed | Watched, Field(discriminator="kind")]

from_device: TypeAdapter[FromDevice] = TypeAdapter(FromDevice)
to_device: TypeAdapter[ToDevice] = TypeAdapter(ToDevice)


class Outgoing(NamedTuple):
    """The messages that follow from the message of a device.

    ``outside`` go to the coordinator, ``inside`` to devices, each with the device's place.
    """

    outside: tuple[messages.FromWorker, ...] = ()
    inside: tuple[tuple[int, ToDevice], ...] = ()


class MessageMerger:
    """Decides which messages are sent when, and to whom. It knows no sockets and no threads.

    All devices are at the same place of their script, unless one has lost another worker there and the others do not
    know it yet. So what every device has to say is said once, when the last device has said it. When a device leaves
    its generation, the others leave it, too, and what they have worked out does not hold.
    """

    def __init__(self, devices: int) -> None:
        self._devices = devices
        self._waiting: dict[str, dict[int, Any]] = {}
        self._left = 0  # the newest generation that a device has left in the middle
        self._is_leaving = False

    def merge(self, device: int, message: FromDevice) -> Outgoing:
        """Return what follows from a message of a device.

        :class:`~unisono.train.group.device_line.FirstLine` answers requests of the store itself.
        """
        match message:
            case WorkedOut():
                return self._judge(device, message)
            case messages.Arrived() | messages.Ready() if message.generation:
                notices = self._break_off(device, message.generation)
                return Outgoing(self._together(device, message), tuple(notices))
            case messages.Ready() | messages.Arrived() | messages.Formed() | messages.Progress() | messages.Finished():
                return Outgoing(self._together(device, message))
            case messages.Leaving():
                is_first, self._is_leaving = not self._is_leaving, True
                return Outgoing((message,) if is_first else ())
            case _:  # what the script asks for, which is the same on all devices
                return Outgoing((message,) if device == 0 and not isinstance(message, messages.WorkerHello) else ())

    def _judge(self, device: int, message: WorkedOut) -> Outgoing:
        if message.generation <= self._left:
            return Outgoing(inside=((device, _agreed(message, holds=False)),))
        received = self._waiting.setdefault(message.kind, {})
        received[device] = message
        if len(received) < self._devices:
            return Outgoing()
        del self._waiting[message.kind]
        holds = all(other == message for other in received.values())
        assert holds, "devices make the same calls in the same order"
        return Outgoing(inside=tuple((place, _agreed(message, holds=True)) for place in range(self._devices)))

    def _break_off(self, device: int, generation: int) -> Iterator[tuple[int, ToDevice]]:
        if generation <= self._left:
            return
        self._left = generation
        for place, waiting in self._waiting.pop("worked out", {}).items():
            yield place, _agreed(waiting, holds=False)
        for place in range(self._devices):
            if place != device:
                yield place, messages.Lost(generation=generation)

    def _together(self, device: int, message: messages.FromWorker) -> tuple[messages.FromWorker, ...]:
        received = self._waiting.setdefault(message.kind, {})
        received[device] = message
        if len(received) < self._devices:
            return ()
        del self._waiting[message.kind]
        return (_merged([received[place] for place in range(self._devices)]),)


def _agreed(message: WorkedOut, *, holds: bool) -> Agreed:
    return Agreed(generation=message.generation, acts=message.acts, holds=holds)


def _merged(device_messages: Sequence[Any]) -> messages.FromWorker:
    """Merge the messages that all devices have sent, in the order of devices, into one."""
    first: Any = device_messages[0]
    match first:
        case messages.Arrived() | messages.Ready():
            places = {(message.generation, message.loop, getattr(message, "acts", 0)) for message in device_messages}
            assert len(places) == 1, f"the devices of a worker stand at different places: {places}"
            further: dict[str, Any] = {
                "unreached": tuple({host: None for message in device_messages for host in message.unreached})
            }
            if isinstance(first, messages.Arrived):
                further["at_boundary"] = all(message.at_boundary for message in device_messages)
            return first.model_copy(
                update={"address": NEXT_ADDRESS.join(message.address for message in device_messages), **further}
            )
        case messages.Formed():
            return first.model_copy(update={"seconds": _longest([message.seconds for message in device_messages])})
        case messages.Progress():
            update = {
                "pulse": _pulse([message.pulse for message in device_messages]),
                "acts": min(message.acts for message in device_messages),
            }
            return first.model_copy(update=update)
    merged: messages.FromWorker = first
    return merged


def _longest(seconds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: max(parts.get(name, 0.0) for parts in seconds) for name in seconds[0]}


def _pulse(pulses: Sequence[messages.Pulse]) -> messages.Pulse:
    """The pulse of the device that has done something for longest, since the other devices wait for it."""
    slowest = max(pulses, key=lambda pulse: (pulse.doing != "wait", pulse.still_s))
    longest = {name: max(getattr(pulse, name) for pulse in pulses) for name in ("longest_s", "shard_s")}
    return slowest.model_copy(update=longest)


WATCH_S = 30.0
"""Seconds that the coordinator may take to answer one question for a value."""

AGAIN_S = 1.0
"""Seconds from a question that was not answered to the next."""

Farewell = Removed | Refused | JobOver
"""The last message of the coordinator."""


_Newest = Welcome | NewGeneration | Watched | Agreed | Farewell


class News:
    """Brings news from other threads to the main thread, in order."""

    def __init__(self) -> None:
        self.farewell: Farewell | None = None
        self._queue: queue.SimpleQueue[_Newest] = queue.SimpleQueue()
        self._end: Farewell | None = None
        self._closed = threading.Event()

    def put(self, news: _Newest) -> None:
        """Add news: a message of the coordinator, a watched value, or what all devices of this worker agree on."""
        if isinstance(news, Farewell):
            self.farewell = news
        self._queue.put(news)

    def take(self, *kinds: Any, wanted: Callable[[Any], bool] = lambda news: True) -> Any:
        """Wait for the next news of one of these kinds. After a farewell there are none, however often one asks.

        Raises:
            Dismissed: this worker takes part no more, or the job is done.
            JobEnded: the job has failed.
            LaunchError: the coordinator refuses this worker.
        """
        while True:
            news = self._end or self._queue.get()
            if isinstance(news, kinds) and wanted(news):
                return news
            if isinstance(news, Farewell):
                self._end = news
                _leave(news)

    def brings_farewell(self, within_s: float) -> bool:
        """Whether the next news is a farewell, and comes in time. Any other news is dropped."""
        try:
            return isinstance(self._queue.get(timeout=within_s), Farewell)
        except queue.Empty:
            return False

    def watch(self, name: str, request: Callable[[StoreRequest], StoreReply], send: Callable[[Watched], None]) -> None:
        """Have a value delivered as soon as the coordinator's store has it.

        ``request`` asks the coordinator's store; ``send`` gets the value, on another thread.
        """

        def look() -> None:
            while not self._closed.is_set():
                try:
                    reply = request(StoreRequest(id=0, operation="get", keys=(f"run/{name}",), timeout_s=WATCH_S))
                except LaunchError:  # the coordinator is gone for a while, or this worker has finished
                    self._closed.wait(AGAIN_S)
                    continue
                if not reply.error:
                    send(Watched(name=name, value=reply.value))
                    return

        threading.Thread(target=look, name="unisono-watch", daemon=True).start()

    def close(self) -> None:
        """Stop watching for values."""
        self._closed.set()


def _leave(news: Farewell) -> NoReturn:
    if isinstance(news, Removed):
        raise Dismissed(news.reason, preempted=news.preempted)
    if isinstance(news, Refused):
        raise LaunchError(f"the coordinator turns this worker away: {news.reason}")
    if news.digest:
        raise Dismissed("the job is done")
    raise JobEnded(f"the job is over: {news.reason}")
