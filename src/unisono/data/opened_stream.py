"""An iterator over a stream, opened at a state, and how it tells where it stands."""

from collections.abc import Callable
from typing import Any, NamedTuple


class OpenedStream(NamedTuple):
    """A stream that is read.

    Attributes:
        iterator: the iterator over its samples.
        tell: a function that returns the state behind the last sample; None if nothing tells it. Then it is opened at
            the beginning, whatever state was given.
    """

    iterator: Any
    tell: Callable[[], Any] | None


def opens_readers(stream: Any) -> bool:
    """Whether a stream opens its readers itself."""
    return hasattr(stream, "open_reader")


def open_stream(stream: Any, number: int, readers: int, state: Any, *, keeps: bool) -> OpenedStream:
    """Open a stream for one of its readers.

    Args:
        stream: the stream; nobody else reads it.
        number: the number of the reader.
        readers: the number of readers.
        state: the state to go on from; None for the beginning.
        keeps: whether the states of streams that do not open their readers themselves are exact: their iterator's, or
            their own.
    """
    if opens_readers(stream):
        return _going_on(stream.open_reader(number, readers), state)
    iterator = iter(stream)
    if not keeps:
        return OpenedStream(iterator, None)
    if iterator is not stream and _tells(iterator):
        return _going_on(iterator, state)
    if not _tells(stream):
        return OpenedStream(iterator, None)
    if state is not None:
        stream.load_state_dict(state)
        iterator = iter(stream)
    return OpenedStream(iterator, stream.state_dict)


def _going_on(iterator: Any, state: Any) -> OpenedStream:
    if not _tells(iterator):
        return OpenedStream(iterator, None)
    if state is not None:
        iterator.load_state_dict(state)
    return OpenedStream(iterator, iterator.state_dict)


def _tells(thing: Any) -> bool:
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")
