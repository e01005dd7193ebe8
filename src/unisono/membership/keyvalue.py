"""The key-value store over which process groups form: workers set values, and wait for those that others set."""

import base64
import binascii
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from unisono.membership.messages import StoreReply, StoreRequest

LARGEST_STORE = 64 * 2**20
"""The most bytes of all keys and values together."""

MOST_KEYS = 100_000
SMALL = 1024
"""The most bytes of a value that may use the reserve when the store is full: a notice that another had no room, say."""

RESERVE = 2**21
"""The bytes of the reserve."""

MOST_WAITING = 256
"""The most requests of one worker that may wait."""

_MOST_ANSWERED = 8192  # answers that are kept: a worker repeats a request if its connection broke before the answer
_KEY_OVERHEAD = 64  # bytes that a key costs besides itself and its value
_GENERATION = re.compile(r"g([0-9]{1,18})/")
_WHOLE_NUMBER = re.compile(rb"-?[0-9]{1,19}")
_LARGEST_NUMBER = 2**63 - 1

Answer = tuple[str, StoreReply]
"""A worker, and the reply to it."""

Entry = Mapping[str, Any]
"""A change as a JSON object, for :meth:`KeyValue.restore`."""


class _Refused(ValueError):
    """The reason why a request cannot be served."""


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    """A request that waits for keys."""

    worker: str
    request: StoreRequest
    deadline: float


@dataclass(frozen=True, slots=True)
class Room:
    """The limits on the size of a store, in bytes.

    Attributes:
        store: the bytes of all keys and values together.
        small: the size of a value that may use the reserve when the store is full.
        reserve: the bytes of the reserve.
    """

    store: int = LARGEST_STORE
    small: int = SMALL
    reserve: int = RESERVE


class KeyValue:
    """Keys with values, and the requests that wait for them. No method blocks; times are arguments, in seconds.

    Keys begin with ``run/``, or with the generation that uses them, as in ``g3/``. The keys of a generation that is
    over are dropped, and cannot be set again.
    """

    def __init__(self, changed: Callable[[Entry], None] = lambda entry: None, room: Room | None = None) -> None:
        self._changed, self._room = changed, room or Room()
        self._values: dict[str, bytes] = {}
        self._size = 0
        self._oldest = 0  # the oldest generation whose keys are kept
        self._waiting: dict[tuple[str, int], _Waiter] = {}
        self._by_missing_key: dict[str, list[_Waiter]] = {}  # by the first key that is missing for them
        self._answered: OrderedDict[tuple[str, int], str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def handle(self, worker: str, request: StoreRequest, now: float) -> list[Answer]:
        """Serve a request, or let it wait. Returns the answers to its worker, and to others that waited for its key."""
        try:
            self._check(request)
            return self._serve(worker, request, now)
        except _Refused as error:
            return [(worker, StoreReply(id=request.id, error=str(error)))]

    def deadline(self) -> float | None:
        """The time of the next timeout; None while no request waits."""
        return min((waiter.deadline for waiter in self._waiting.values()), default=None)

    def expire(self, now: float) -> list[Answer]:
        """Answer the requests whose timeout has come."""
        late = [waiter for waiter in self._waiting.values() if waiter.deadline <= now]
        return [self._give_up(waiter, f"nobody has set it in {waiter.request.timeout_s:g} s") for waiter in late]

    def drop(self, worker: str) -> None:
        """Drop the waiting requests of a worker whose connection is gone. It repeats them on a new connection."""
        for waiter in [waiter for waiter in self._waiting.values() if waiter.worker == worker]:
            self._remove(waiter)

    def forget(self, below: int | None) -> list[Answer]:
        """Drop all keys of generations below ``below``, or with None all keys."""
        self._oldest = max(self._oldest, below or 0)
        for key in [key for key in self._values if below is None or self._is_over(key)]:
            self._put(key, None)
        self._changed({"forgotten": below})
        waiters = [waiter for waiter in self._waiting.values() if any(map(self._is_over, waiter.request.keys))]
        return [self._give_up(waiter, "its generation is over") for waiter in waiters]

    def entries(self) -> Iterator[Entry]:
        """The entries from which :meth:`restore` makes this store again."""
        yield {"forgotten": self._oldest}
        for key, value in self._values.items():
            yield {"key": key, "value": _encode(value)}
        for (worker, number), answer in self._answered.items():
            yield {"answered": answer, "worker": worker, "id": number}

    def restore(self, entry: Entry) -> None:
        """Repeat a change of an earlier store. Entries of other kinds are ignored."""
        if isinstance(below := entry.get("forgotten", ""), int | None):
            self._oldest = max(self._oldest, below or 0)
            for key in [key for key in self._values if below is None or self._is_over(key)]:
                self._put(key, None)
        match entry:
            case {"key": str(key), "value": None}:
                self._put(key, None)
            case {"key": str(key), "value": str(value)}:
                with suppress(_Refused):  # a damaged line is left out
                    self._put(key, _decode(value))
            case {"answered": str(answer), "worker": str(worker), "id": int(number)}:
                self._remember(worker, number, answer)

    # -- one request

    def _check(self, request: StoreRequest) -> None:
        if len(request.keys) > 1 and request.operation not in ("wait", "check"):
            raise _Refused(f"{request.operation} takes one key, not {len(request.keys)}")
        for key in request.keys:
            if not key.startswith("run/") and not _GENERATION.match(key):
                raise _Refused(f"{key[:80]}: keys begin with run/, or with their generation, as in g3/")
            if self._is_over(key):
                raise _Refused(f"{key[:80]}: its generation is over")

    def _serve(self, worker: str, request: StoreRequest, now: float) -> list[Answer]:
        key = request.keys[0]
        match request.operation:
            case "set":
                return self._set(worker, request, key, _decode(request.value), "")
            case "add":
                return self._serve_once(worker, request, lambda: self._add(worker, request, key))
            case "delete":
                return self._serve_once(worker, request, lambda: self._delete(worker, request, key))
            case "compare_set":
                return self._compare_set(worker, request, key)
            case "check":
                return [self._reply(worker, request, str(int(all(name in self._values for name in request.keys))))]
            case "get" | "wait":
                return self._wait(_Waiter(worker, request, now + request.timeout_s))
            case "clock":
                raise _Refused("a store has no clock")

    def _set(self, worker: str, request: StoreRequest, key: str, value: bytes, answer: str) -> list[Answer]:
        more = len(value) - len(self._values[key]) if key in self._values else len(value) + len(key) + _KEY_OVERHEAD
        room = self._room.store + (self._room.reserve if len(value) <= self._room.small else 0)
        if self._size + more > room or (key not in self._values and len(self._values) >= MOST_KEYS):
            raise _Refused("the store is full")
        self._put(key, value)
        self._changed({"key": key, "value": _encode(value)})
        return [self._reply(worker, request, answer), *self._wake(key)]

    def _serve_once(self, worker: str, request: StoreRequest, serve: Callable[[], list[Answer]]) -> list[Answer]:
        """Serve a request that must not be served twice: a worker repeats it if the answer was lost on the way."""
        answer = self._answered.get((worker, request.id))
        if answer is not None:
            return [self._reply(worker, request, answer)]
        answers = serve()
        value = answers[0][1].value
        self._remember(worker, request.id, value)
        self._changed({"answered": value, "worker": worker, "id": request.id})
        return answers

    def _add(self, worker: str, request: StoreRequest, key: str) -> list[Answer]:
        before = self._values.get(key, b"0")
        summand = request.value.encode()
        if not _WHOLE_NUMBER.fullmatch(before) or not _WHOLE_NUMBER.fullmatch(summand):
            raise _Refused(f"{key[:80]}: add needs whole numbers")
        total = int(before) + int(summand)
        if abs(total) > _LARGEST_NUMBER:
            raise _Refused(f"{key[:80]}: {total} has more than 64 bits")
        return self._set(worker, request, key, str(total).encode(), str(total))

    def _delete(self, worker: str, request: StoreRequest, key: str) -> list[Answer]:
        was_there = key in self._values
        if was_there:
            self._put(key, None)
            self._changed({"key": key, "value": None})
        return [self._reply(worker, request, str(int(was_there)))]

    def _compare_set(self, worker: str, request: StoreRequest, key: str) -> list[Answer]:
        # As torch's own stores: an absent key matches only an empty expected value; else the answer is that value.
        value, expected, new = self._values.get(key), _decode(request.expected), _decode(request.value)
        if value == expected or (value is None and not expected):
            return self._set(worker, request, key, new, _encode(new))
        return [self._reply(worker, request, _encode(expected if value is None else value))]

    def _reply(self, worker: str, request: StoreRequest, value: str) -> Answer:
        return worker, StoreReply(id=request.id, value=value)

    # -- waiting

    def _wait(self, waiter: _Waiter) -> list[Answer]:
        request = waiter.request
        if (earlier := self._waiting.get((waiter.worker, request.id))) is not None:
            self._remove(earlier)
        missing = self._first_missing(request)
        if missing is None:
            return [self._answer_waiter(waiter)]
        if request.timeout_s == 0:
            raise _Refused(f"{missing[:80]}: nobody has set it")
        if sum(other.worker == waiter.worker for other in self._waiting.values()) >= MOST_WAITING:
            raise _Refused(f"at most {MOST_WAITING} requests of a worker can wait at once")
        self._waiting[waiter.worker, request.id] = waiter
        self._by_missing_key.setdefault(missing, []).append(waiter)
        return []

    def _wake(self, key: str) -> list[Answer]:
        answers = []
        for waiter in self._by_missing_key.pop(key, ()):
            missing = self._first_missing(waiter.request)
            if missing is not None:
                self._by_missing_key.setdefault(missing, []).append(waiter)
            else:
                del self._waiting[waiter.worker, waiter.request.id]
                answers.append(self._answer_waiter(waiter))
        return answers

    def _answer_waiter(self, waiter: _Waiter) -> Answer:
        request = waiter.request
        value = _encode(self._values[request.keys[0]]) if request.operation == "get" else ""
        return self._reply(waiter.worker, request, value)

    def _give_up(self, waiter: _Waiter, why: str) -> Answer:
        self._remove(waiter)
        missing = self._first_missing(waiter.request) or waiter.request.keys[0]
        return waiter.worker, StoreReply(id=waiter.request.id, error=f"{missing[:80]}: {why}")

    def _remove(self, waiter: _Waiter) -> None:
        del self._waiting[waiter.worker, waiter.request.id]
        for key in waiter.request.keys:
            if waiter in (others := self._by_missing_key.get(key, [])):
                others.remove(waiter)
                if not others:
                    del self._by_missing_key[key]

    def _first_missing(self, request: StoreRequest) -> str | None:
        return next((key for key in request.keys if key not in self._values), None)

    # -- values

    def _put(self, key: str, value: bytes | None) -> None:
        before = self._values.pop(key, None)
        if before is not None:
            self._size -= len(key) + len(before) + _KEY_OVERHEAD
        if value is not None:
            self._values[key] = value
            self._size += len(key) + len(value) + _KEY_OVERHEAD

    def _remember(self, worker: str, number: int, answer: str) -> None:
        self._answered[worker, number] = answer
        while len(self._answered) > _MOST_ANSWERED:
            self._answered.popitem(last=False)

    def _is_over(self, key: str) -> bool:
        generation = _GENERATION.match(key)
        return generation is not None and int(generation[1]) < self._oldest


def _encode(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _Refused("a value is base64") from error
