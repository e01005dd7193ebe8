"""Making values known to those who join later, until the coordinator has them."""

import base64
import json
import threading
import warnings
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import safetensors.torch

from unisono.checkpoint.codec import flatten, unflatten
from unisono.checkpoint.tensors import tensors_of
from unisono.errors import CheckpointError, JobError, LaunchError, UnisonoWarning, Unreadable
from unisono.membership.messages import LARGEST_VALUE, StoreReply, StoreRequest
from unisono.received import parse_object

# Values that members make known to those who join later, as text.


def packed(value: Any) -> str:
    """A value as text: numbers, text, tensors, and lists and dicts of them.

    What cannot be made known is replaced by the reason why, for whoever asks for it.
    """
    try:
        skeleton, tensors = flatten(value)
    except CheckpointError as error:
        return unpublishable(str(error))
    size = sum(tensor.nbytes for tensor in tensors.values())
    if size > LARGEST_VALUE:
        return unpublishable(f"it is too large, with {size / 2**20:.1f} MiB of tensors")
    data = safetensors.torch.save({name: tensor.contiguous().cpu() for name, tensor in tensors.items()})
    text = _text({"skeleton": skeleton, "tensors": base64.b64encode(data).decode()})
    if len(text) > LARGEST_VALUE:
        return unpublishable(f"it is too large, with {len(data) / 2**20:.1f} MiB of tensors")
    return text


def unpublishable(reason: str) -> str:
    """What is made known instead of a value that cannot be."""
    return _text({"unknown": reason})


def unpacked(text: str) -> Any:
    """The inverse of :func:`packed`.

    Raises:
        JobError: the value could not be made known; says why.
        CheckpointError: the text is none of :func:`packed`.
    """
    try:
        found = parse_object(_decoded(text))
    except Unreadable as error:
        raise CheckpointError(f"a value that was made known cannot be read: {error}") from error
    match found:
        case {"unknown": str(reason)}:
            raise JobError(
                f"this worker cannot join: a collective call outside of the training loops had a result that cannot "
                f"be handed on to it: {reason}. Let such calls return less, or make them after the last loop"
            )
        case {"skeleton": skeleton, "tensors": str(encoded)}:
            return unflatten(skeleton, tensors_of(_decoded(encoded)))
    raise CheckpointError("a value that was made known has neither tensors nor a reason why it is unknown")


def _text(value: Any) -> str:
    return base64.b64encode(json.dumps(value).encode()).decode()


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise CheckpointError(f"a value that was made known is no base64: {error}") from error


# Which published values the coordinator lacks, and what to ask it next.

MANY = 256
"""Values that are asked for at once, and that a member keeps before it asks which of them are there."""


class Backlog:
    """Every member keeps what was published until it knows that the coordinator has it; one of them tells it.

    When that one is lost, the next one tells all that is not there yet. Nothing here waits: whoever asks the
    coordinator wants to know the :meth:`next` request, and says what was :meth:`answered`.

    Args:
        many: the number of kept values after which the coordinator is asked which of them it has; also the most keys
            of one request.
    """

    def __init__(self, many: int = MANY) -> None:
        self._many = many
        self._kept: dict[str, str] = {}  # by key, in the order in which they were published
        self._replaced: set[str] = set()  # by the reason why the coordinator does not keep the value
        self._tells = self._checks = False

    def __len__(self) -> int:
        return len(self._kept)

    def publish(self, key: str, text: str) -> None:
        """Keep a value, the same on all members, until the coordinator has it."""
        self._kept[key] = text

    def lead(self, tells: bool) -> None:
        """Whether this member tells the coordinator from now on. What it has kept another one may have told."""
        self._checks = bool(self._kept) and (self._checks or not self._tells)
        self._tells = tells

    def next(self) -> StoreRequest | None:
        """What to ask the coordinator; None while there is nothing to ask."""
        if not self._kept or not (self._tells or len(self._kept) > self._many):
            return None
        if self._checks or not self._tells:
            return StoreRequest(id=0, operation="check", keys=tuple(islice(self._kept, self._many)))
        key, text = next(iter(self._kept.items()))
        return StoreRequest(id=0, operation="set", keys=(key,), value=text)

    def answered(self, request: StoreRequest, reply: StoreReply) -> bool:
        """Take an answer. Returns whether there may be more to ask at once, else after a pause."""
        if request.operation == "check":
            return self._checked(request, reply)
        (key,) = request.keys
        if not reply.error:
            self._let_go([key])
        elif key not in self._replaced:  # whoever joins is told why it cannot
            self._replaced.add(key)
            self._kept[key] = unpublishable(f"the coordinator does not keep it: {reply.error}")
        else:
            warnings.warn(f"no worker can join any more: {reply.error}", UnisonoWarning, stacklevel=2)
            self._let_go([key])
        return True

    def _checked(self, request: StoreRequest, reply: StoreReply) -> bool:
        if reply.value == "1":
            self._let_go(request.keys)
            return True
        self._checks = False
        return self._tells

    def _let_go(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._kept.pop(key, None)
            self._replaced.discard(key)
        self._checks = self._checks and bool(self._kept)


AGAIN_S = 1.0
"""After a question that the coordinator did not answer, or values that are not yet there."""

Ask = Callable[[StoreRequest], StoreReply]
"""Asks the coordinator's store; raises :class:`LaunchError` if no answer comes."""


class Publisher:
    """A backlog, and a thread that works it off. Nobody else waits: the thread asks again until it is answered.

    Args:
        ask: the coordinator's store.
        again_s: the pause after a question that was not answered, or values that are not yet there.
        many: the number of values, as in :class:`Backlog`.
    """

    def __init__(self, ask: Ask, again_s: float = AGAIN_S, many: int = MANY) -> None:
        self._ask, self._again_s = ask, again_s
        self._backlog = Backlog(many)
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def wait(self, most: int, timeout_s: float) -> bool:
        """Wait until the coordinator has all values but so many at most; False if it takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._backlog) <= most, timeout_s)

    def publish(self, key: str, text: str) -> None:
        """Keep a value, the same on all members, until the coordinator has it."""
        with self._changed:
            self._backlog.publish(key, text)
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._live, name="unisono-publisher", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def lead(self, tells: bool) -> None:
        """Whether this member tells the coordinator from now on. What it has kept another one may have told."""
        with self._changed:
            self._backlog.lead(tells)
            self._changed.notify_all()

    def close(self) -> None:
        """Tell nothing more; the others have what is not there."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    # -- on a thread

    def _live(self) -> None:
        while (request := self._next()) is not None:
            try:
                reply = self._ask(request)
            except LaunchError:  # it is gone for a while, or for good: then this is closed soon
                self._pause()
                continue
            with self._changed:
                goes_on = self._backlog.answered(request, reply)
                self._changed.notify_all()
            if not goes_on:
                self._pause()

    def _next(self) -> StoreRequest | None:
        """What there is to ask; None when there is nothing to ask any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._backlog.next() is not None)
            return None if self._is_closed else self._backlog.next()

    def _pause(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed, self._again_s)
