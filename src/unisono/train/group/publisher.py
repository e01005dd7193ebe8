"""Making values known to workers that join later: a member keeps them until the coordinator has them."""

import base64
import json
import threading
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import safetensors.torch

from unisono.checkpoint.codec import flatten, unflatten
from unisono.checkpoint.tensor_bytes import tensors_of
from unisono.errors import CheckpointError, JobError, LaunchError, Unreadable
from unisono.host.tracebacks import warn
from unisono.membership.messages import LARGEST_VALUE, StoreReply, StoreRequest
from unisono.received import parse_object

# Values that members make known to workers that join later, as text.


def packed(value: Any) -> str:
    """Encode a value as text: numbers, text, tensors, and lists and dicts of them.

    A value that cannot be encoded, or is too large, is replaced by the reason, for a worker that asks for it.
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
    """Encode the reason why a value cannot be made known."""
    return _text({"unknown": reason})


def unpacked(text: str) -> Any:
    """Decode what :func:`packed` has encoded.

    Raises:
        JobError: the value could not be made known; says why.
        CheckpointError: the text does not come from :func:`packed`.
    """
    try:
        content = parse_object(_decoded(text))
    except Unreadable as error:
        raise CheckpointError(f"a value that was made known cannot be read: {error}") from error
    match content:
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
"""The most values in one question, and the number that a member keeps before it asks which of them are there."""


class Backlog:
    """The published values that the coordinator may lack. Every member keeps them, and one member sends them.

    When that member is lost, the next one sends what is missing. Nothing here waits: a caller asks the coordinator the
    :meth:`next` request, and passes the reply to :meth:`take_reply`.

    Args:
        many: the number of kept values after which the coordinator is asked which of them it has; also the most keys
            of one request.
    """

    def __init__(self, many: int = MANY) -> None:
        self._many = many
        self._kept: dict[str, str] = {}  # by key, in the order in which they were published
        self._replaced: set[str] = set()  # by the reason why the coordinator does not keep the value
        self._leads = self._checks = False

    def __len__(self) -> int:
        return len(self._kept)

    def publish(self, key: str, text: str) -> None:
        """Keep a value, the same on all members, until the coordinator has it."""
        self._kept[key] = text

    def lead(self, leads: bool) -> None:
        """Say whether this member sends values to the coordinator from now on.

        If it does, it first asks which of its values another member has sent.
        """
        self._checks = bool(self._kept) and (self._checks or not self._leads)
        self._leads = leads

    def next(self) -> StoreRequest | None:
        """Return the next request to the coordinator; None while there is nothing to ask."""
        if not self._kept or not (self._leads or len(self._kept) > self._many):
            return None
        if self._checks or not self._leads:
            return StoreRequest(id=0, operation="check", keys=tuple(islice(self._kept, self._many)))
        key, text = next(iter(self._kept.items()))
        return StoreRequest(id=0, operation="set", keys=(key,), value=text)

    def take_reply(self, request: StoreRequest, reply: StoreReply) -> bool:
        """Take a reply. Returns whether to go on at once, rather than after a pause."""
        if request.operation == "check":
            return self._checked(request, reply)
        (key,) = request.keys
        if not reply.error:
            self._let_go([key])
        elif key not in self._replaced:  # a joiner that asks for the value gets the reason
            self._replaced.add(key)
            self._kept[key] = unpublishable(f"the coordinator does not keep it: {reply.error}")
        else:
            warn(f"no worker can join any more: {reply.error}")
            self._let_go([key])
        return True

    def _checked(self, request: StoreRequest, reply: StoreReply) -> bool:
        if reply.value == "1":
            self._let_go(request.keys)
            return True
        self._checks = False
        return self._leads

    def _let_go(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._kept.pop(key, None)
            self._replaced.discard(key)
        self._checks = self._checks and bool(self._kept)


AGAIN_S = 1.0
"""Seconds of the pause after a question without an answer, or after values were not there yet."""

Ask = Callable[[StoreRequest], StoreReply]
"""Asks the coordinator's store; raises :class:`LaunchError` if no answer comes."""


class Publisher:
    """A backlog, and a thread that works it off. Only the thread waits: it asks again until it has a reply.

    Args:
        again_s: the seconds of the pause after a question without an answer, or after values were not there yet.
    """

    def __init__(self, ask: Ask, again_s: float = AGAIN_S, many: int = MANY) -> None:
        self._ask, self._again_s = ask, again_s
        self._backlog = Backlog(many)
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def wait(self, most: int, timeout_s: float) -> bool:
        """Wait until the coordinator lacks at most ``most`` values; False if that takes too long."""
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

    def lead(self, leads: bool) -> None:
        """Say whether this member sends values to the coordinator from now on."""
        with self._changed:
            self._backlog.lead(leads)
            self._changed.notify_all()

    def close(self) -> None:
        """Send the coordinator nothing more. The other members keep what it lacks."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    # -- on a thread

    def _live(self) -> None:
        while (request := self._next()) is not None:
            try:
                reply = self._ask(request)
            except LaunchError:  # the coordinator is gone for a while, or for good: then this is closed soon
                self._pause()
                continue
            with self._changed:
                is_at_once = self._backlog.take_reply(request, reply)
                self._changed.notify_all()
            if not is_at_once:
                self._pause()

    def _next(self) -> StoreRequest | None:
        """Wait for the next request; None once this is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._backlog.next() is not None)
            return None if self._is_closed else self._backlog.next()

    def _pause(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed, self._again_s)
