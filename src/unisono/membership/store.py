"""The coordinator's key-value store as torch's process groups want it."""

import base64
from collections.abc import Sequence
from datetime import timedelta
from typing import Literal, Protocol
from urllib.parse import urlsplit

import torch.distributed as dist

from unisono.errors import LaunchError
from unisono.membership.messages import StoreReply, StoreRequest

Operation = Literal["set", "get", "wait", "add", "compare_set", "delete", "check"]
Text = str | bytes


class Asks(Protocol):
    """The way of a worker to the coordinator: a :class:`~unisono.membership.client.Line`, or another one's."""

    @property
    def url(self) -> str:
        """The coordinator's URL."""

    @property
    def local_address(self) -> str:
        """The address of this host on the connection to the coordinator."""

    @property
    def kept(self) -> list[object]:
        """Objects that have to live as long as the way."""

    def request(self, request: StoreRequest) -> StoreReply:
        """Ask the key-value store, and wait."""


class CoordinatorStore(dist.Store):
    """A ``torch.distributed`` store over a worker's connection to the coordinator.

    Give it to process groups inside a ``PrefixStore`` whose prefix says how long the keys live: ``run`` for the whole
    job, or ``g3`` for as long as there is generation 3.

    Every method raises ``torch.distributed.DistStoreError`` when a key does not come in time or the coordinator does
    not answer.

    Args:
        line: the connection to the coordinator.
        timeout: the time for which ``get`` and ``wait`` wait for a key.
    """

    timeout: timedelta  # a property of torch's

    def __init__(self, line: Asks, timeout: timedelta = timedelta(minutes=5)) -> None:
        super().__init__()
        self._line = line
        line.kept.append(self)  # whatever torch makes with a store keeps the C++ half of it alone
        self.set_timeout(timeout)

    @property
    def host(self) -> str:
        """Where the coordinator listens, as ``TCPStore`` says it: workers that reach it on loopback share a host."""
        return urlsplit(self._line.url).hostname or ""

    @property
    def interface(self) -> str:
        """The address of this host on the network on which it reaches the coordinator."""
        return self._line.local_address

    def set(self, key: Text, value: Text) -> None:
        """Give a key a value."""
        self._ask("set", [key], value=_encode(value))

    def get(self, key: Text) -> bytes:
        """The value of a key, as soon as it has one."""
        return base64.b64decode(self._ask("get", [key], timeout=self.timeout).value)

    def add(self, key: Text, value: int) -> int:
        """Add to the whole number of a key, which is 0 at first; the sum is returned."""
        return int(self._ask("add", [key], value=str(value)).value)

    def compare_set(self, key: Text, expected_value: Text, desired_value: Text) -> bytes:
        """Give a key a value if it has the expected one, or none and that is expected; its value is returned."""
        found = self._ask("compare_set", [key], value=_encode(desired_value), expected=_encode(expected_value))
        return base64.b64decode(found.value)

    def delete_key(self, key: Text) -> bool:
        """Drop a key; whether it was there."""
        return self._ask("delete", [key]).value == "1"

    deleteKey = delete_key  # noqa: N815 - torch's C++ calls it so

    def check(self, keys: Sequence[Text]) -> bool:
        """Whether all of these keys are there."""
        return not keys or self._ask("check", keys).value == "1"

    def wait(self, keys: Sequence[Text], timeout: timedelta | None = None) -> None:
        """Wait until all of these keys are there."""
        if keys:
            self._ask("wait", keys, timeout=self.timeout if timeout is None else timeout)

    def _ask(
        self,
        operation: Operation,
        keys: Sequence[Text],
        value: str = "",
        expected: str = "",
        timeout: timedelta = timedelta(0),
    ) -> StoreReply:
        request = StoreRequest(
            id=0,
            operation=operation,
            keys=tuple(_text(key) for key in keys),
            value=value,
            expected=expected,
            timeout_s=timeout.total_seconds(),
        )
        try:
            reply = self._line.request(request)
        except LaunchError as error:
            raise dist.DistStoreError(str(error)) from error
        if reply.error:
            raise dist.DistStoreError(f"{operation}: {reply.error}")
        return reply


def _text(key: Text) -> str:
    return key if isinstance(key, str) else key.decode()


def _encode(value: Text) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else value).decode()
