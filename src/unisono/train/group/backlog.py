"""Which published values the coordinator lacks, and what to ask it next."""

import warnings
from collections.abc import Iterable
from itertools import islice

from unisono.errors import UnisonoWarning
from unisono.membership.messages import StoreReply, StoreRequest
from unisono.train.group.published import unpublishable

MANY = 256
"""Values that are asked for at once, and that a member keeps before it asks which of them are there."""


class Backlog:
    """Every member keeps what was published until it knows that the coordinator has it; one of them tells it.

    When that one is lost, the next one tells all that is not there yet. Nothing here waits: whoever asks the
    coordinator wants to know the :meth:`next` request, and says what was :meth:`answered`.
    """

    def __init__(self) -> None:
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
        if not self._kept or not (self._tells or len(self._kept) > MANY):
            return None
        if self._checks or not self._tells:
            return StoreRequest(id=0, operation="check", keys=tuple(islice(self._kept, MANY)))
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
