"""What the devices of an elastic job's worker say, as one: the coordinator knows of none of them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, TypeAdapter

from unisono.membership import messages

NEXT_ADDRESS = ","
"""Between the addresses of two devices."""


class WorkedOut(messages.Message):
    """A device has worked out a collective call. Nothing of it is set: all devices of its worker do so, or none.

    Attributes:
        generation: the number of the generation.
        acts: the number of collective calls that are complete with this one.
    """

    kind: Literal["worked out"] = "worked out"
    generation: messages.Count
    acts: messages.Count


class Agreed(messages.Message):
    """The answer to :class:`WorkedOut`, the same for all devices.

    Attributes:
        holds: whether all of them have worked it out, and set it now.
    """

    kind: Literal["agreed"] = "agreed"
    generation: messages.Count
    acts: messages.Count
    holds: bool


class Known(messages.Message):
    """A value that was watched for is there."""

    kind: Literal["known"] = "known"
    name: messages.Text
    value: messages.Value


FromDevice = Annotated[messages.FromWorker | WorkedOut, Field(discriminator="kind")]
ToDevice = Annotated[messages.ToWorker | Agreed | Known, Field(discriminator="kind")]

from_device: TypeAdapter[FromDevice] = TypeAdapter(FromDevice)
to_device: TypeAdapter[ToDevice] = TypeAdapter(ToDevice)


class Said(NamedTuple):
    """What follows when a device has said something.

    Attributes:
        outside: what the coordinator is told.
        inside: what devices are told, with their places.
    """

    outside: tuple[messages.FromWorker, ...] = ()
    inside: tuple[tuple[int, ToDevice], ...] = ()


class OneVoice:
    """Decides what is said when, and to whom. Nothing here knows sockets or threads.

    Devices stand at the same place of their script, or one has lost another worker there and the others do not know it
    yet. So what all of them have to say is said when the last one has. A device that leaves its generation has the
    others leave it, too, and what they have worked out does not hold.

    Args:
        devices: the number of devices of the worker.
    """

    def __init__(self, devices: int) -> None:
        self._devices = devices
        self._heard: dict[str, dict[int, Any]] = {}
        self._left = 0  # the newest generation that a device has left in the middle
        self._is_leaving = False

    def said(self, device: int, message: FromDevice) -> Said:
        """A device says something; of requests of the store see :class:`~unisono.train.group.device_line.FirstLine`."""
        match message:
            case WorkedOut():
                return self._judge(device, message)
            case messages.Arrived() | messages.Ready() if message.generation:
                told = self._break_off(device, message.generation)
                return Said(self._together(device, message), tuple(told))
            case messages.Ready() | messages.Arrived() | messages.Formed() | messages.Progress() | messages.Finished():
                return Said(self._together(device, message))
            case messages.Leaving():
                is_first, self._is_leaving = not self._is_leaving, True
                return Said((message,) if is_first else ())
            case _:  # what the script asks for, alike on all devices
                return Said((message,) if device == 0 and not isinstance(message, messages.WorkerHello) else ())

    def _judge(self, device: int, message: WorkedOut) -> Said:
        if message.generation <= self._left:
            return Said(inside=((device, _agreed(message, holds=False)),))
        told = self._heard.setdefault(message.kind, {})
        told[device] = message
        if len(told) < self._devices:
            return Said()
        del self._heard[message.kind]
        holds = all(each == message for each in told.values())
        assert holds, "devices make the same calls in the same order"
        return Said(inside=tuple((each, _agreed(message, holds=True)) for each in range(self._devices)))

    def _break_off(self, device: int, generation: int) -> Iterator[tuple[int, ToDevice]]:
        if generation <= self._left:
            return
        self._left = generation
        for each, waiting in self._heard.pop("worked out", {}).items():
            yield each, _agreed(waiting, holds=False)
        for each in range(self._devices):
            if each != device:
                yield each, messages.Lost(generation=generation)

    def _together(self, device: int, message: messages.FromWorker) -> tuple[messages.FromWorker, ...]:
        told = self._heard.setdefault(message.kind, {})
        told[device] = message
        if len(told) < self._devices:
            return ()
        del self._heard[message.kind]
        return (_merged([told[each] for each in range(self._devices)]),)


def _agreed(message: WorkedOut, *, holds: bool) -> Agreed:
    return Agreed(generation=message.generation, acts=message.acts, holds=holds)


def _merged(told: Sequence[Any]) -> messages.FromWorker:
    """One message of those that all devices have said, in their order."""
    first: Any = told[0]
    match first:
        case messages.Arrived() | messages.Ready():
            places = {(each.generation, each.loop, getattr(each, "acts", 0)) for each in told}
            assert len(places) == 1, f"the devices of a worker stand at different places: {places}"
            further: dict[str, Any] = {"unreached": tuple({one: None for each in told for one in each.unreached})}
            if isinstance(first, messages.Arrived):
                further["at_boundary"] = all(each.at_boundary for each in told)
            return first.model_copy(update={"address": NEXT_ADDRESS.join(each.address for each in told), **further})
        case messages.Formed():
            return first.model_copy(update={"seconds": _longest([each.seconds for each in told])})
        case messages.Progress():
            update = {"pulse": _pulse([each.pulse for each in told]), "acts": min(each.acts for each in told)}
            return first.model_copy(update=update)
    found: messages.FromWorker = first
    return found


def _longest(seconds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: max(each.get(name, 0.0) for each in seconds) for name in seconds[0]}


def _pulse(pulses: Sequence[messages.Pulse]) -> messages.Pulse:
    """That of the device which does something, and has done it longest: the others wait for it."""
    slowest = max(pulses, key=lambda each: (each.doing != "wait", each.still_s))
    longest = {name: max(getattr(each, name) for each in pulses) for name in ("longest_s", "shard_s")}
    return slowest.model_copy(update=longest)
