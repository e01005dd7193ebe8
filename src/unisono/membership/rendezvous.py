"""The rendezvous of workers: the stores over which they find each other, and the process groups that they form."""

import base64
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

import torch.distributed as dist

from unisono.errors import LaunchError
from unisono.membership.environment import Environment, RendezvousAddress
from unisono.membership.messages import StoreReply, StoreRequest
from unisono.membership.probe import data_address
from unisono.plan.split import Split

Operation = Literal["set", "get", "wait", "add", "compare_set", "delete", "check"]
Text = str | bytes


class StoreClient(Protocol):
    """A worker's connection to the coordinator, by which it reaches the store; that of another device of it will do."""

    @property
    def url(self) -> str:
        """The coordinator's URL."""

    @property
    def local_address(self) -> str:
        """The address of this host on the connection to the coordinator."""

    @property
    def kept(self) -> list[object]:
        """Objects that have to live as long as the connection."""

    def request(self, request: StoreRequest) -> StoreReply:
        """Send a request to the key-value store, and wait for the reply."""


class CoordinatorStore(dist.Store):
    """A ``torch.distributed`` store over a worker's connection to the coordinator.

    Give it to process groups inside a ``PrefixStore`` whose prefix says how long the keys live: ``run`` for the whole
    job, or ``g3`` for as long as there is generation 3.

    Every method raises ``torch.distributed.DistStoreError`` when a key does not come in time or the coordinator does
    not answer.
    """

    timeout: timedelta  # a property of torch's

    def __init__(self, connection: StoreClient, timeout: timedelta = timedelta(minutes=5)) -> None:
        super().__init__()
        self._connection = connection
        connection.kept.append(self)  # torch's objects that use a store keep only the C++ half of it alive
        self.set_timeout(timeout)

    @property
    def host(self) -> str:
        """The coordinator's host, as ``TCPStore`` has it: workers that reach it on loopback share a host."""
        return urlsplit(self._connection.url).hostname or ""

    @property
    def interface(self) -> str:
        """The address of this host on the network on which it reaches the coordinator."""
        return self._connection.local_address

    def set(self, key: Text, value: Text) -> None:
        """Set the value of a key."""
        self._request("set", [key], value=_encode(value))

    def get(self, key: Text) -> bytes:
        """Wait until a key has a value, and return it."""
        return base64.b64decode(self._request("get", [key], timeout=self.timeout).value)

    def add(self, key: Text, value: int) -> int:
        """Add to the whole number of a key, which is 0 at first. Returns the sum."""
        return int(self._request("add", [key], value=str(value)).value)

    def compare_set(self, key: Text, expected_value: Text, desired_value: Text) -> bytes:
        """Set the value of a key if it has the expected value, or none and that is expected. Returns its value then."""
        reply = self._request("compare_set", [key], value=_encode(desired_value), expected=_encode(expected_value))
        return base64.b64decode(reply.value)

    def delete_key(self, key: Text) -> bool:
        """Drop a key. Returns whether it was there."""
        return self._request("delete", [key]).value == "1"

    deleteKey = delete_key  # noqa: N815 - torch's C++ calls it by this name

    def check(self, keys: Sequence[Text]) -> bool:
        """Whether all of these keys are there."""
        return not keys or self._request("check", keys).value == "1"

    def wait(self, keys: Sequence[Text], timeout: timedelta | None = None) -> None:
        """Wait until all of these keys are there."""
        if keys:
            self._request("wait", keys, timeout=self.timeout if timeout is None else timeout)

    def _request(
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
            reply = self._connection.request(request)
        except LaunchError as error:
            raise dist.DistStoreError(str(error)) from error
        if reply.error:
            raise dist.DistStoreError(f"{operation}: {reply.error}")
        return reply


def _text(key: Text) -> str:
    return key if isinstance(key, str) else key.decode()


def _encode(value: Text) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else value).decode()


# A generation, and which shards each worker computes in it.


@dataclass(frozen=True, slots=True)
class Generation:
    """A generation as one of its workers sees it.

    Attributes:
        number: 1, 2, 3 …, never reused within a run.
        split: the shards of each worker; a worker that only serves has none.
        departures: workers that were lost or left on notice before it, in the whole job.
    """

    number: int
    rank: int
    split: Split
    departures: int = 0

    @property
    def world_size(self) -> int:
        """The number of workers."""
        return self.split.workers


# How the workers of a generation find each other and form a process group.

LONGEST_NOTICE = 4096
"""The most characters of a posted value that are read."""

_stores: dict[tuple[str, int], dist.Store] = {}


def open_store(environment: Environment, timeout_s: float) -> dist.Store:
    """The key-value store over which the workers exchange their addresses.

    Under ``unisono run`` rank 0 serves it on the socket that the launcher opened on loopback; under torchrun the agent
    serves it; elsewhere rank 0 listens on the rendezvous address. It stays open until the process ends, since a script
    may start several runs one after the other.

    Raises:
        LaunchError: rank 0 could not be reached in ``timeout_s`` seconds; names the address.
    """
    rendezvous = environment.rendezvous
    assert rendezvous is not None, "a single worker needs no store"
    address = (rendezvous.address, rendezvous.port)
    if address not in _stores:
        _stores[address] = _connect(environment, rendezvous, timeout_s)
    return _stores[address]


def _connect(environment: Environment, rendezvous: RendezvousAddress, timeout_s: float) -> dist.Store:
    serves = environment.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    options: dict[str, Any] = {"master_listen_fd": rendezvous.store_fd} if rendezvous.store_fd is not None else {}
    try:
        return dist.TCPStore(
            rendezvous.address,
            rendezvous.port,
            environment.world_size,
            serves,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            **options,
        )
    except (RuntimeError, ValueError) as error:
        address = f"{rendezvous.address}:{rendezvous.port}"
        raise LaunchError(
            f"rank {environment.rank} of {environment.world_size} could not "
            f"{'listen on' if serves else 'reach rank 0 at'} {address} ({str(error).splitlines()[0]}). "
            f"Check that rank 0 runs, that the address is right and that the port is free"
        ) from error


class TorchRendezvousStore:
    """The store in which the workers of a generation post their addresses.

    Args:
        store: a store that all of them, and no other process, can read and write.
        timeout_s: the seconds to wait for a posted value.
    """

    def __init__(self, store: dist.Store, timeout_s: float) -> None:
        self._store = dist.PrefixStore("board", store)
        self._timeout = timedelta(seconds=timeout_s)

    def post(self, name: str, value: bytes) -> None:
        """Post a value for the other workers."""
        self._store.set(name, value.hex())

    def read(self, name: str) -> bytes:
        """Wait until another worker has posted a value, and return it.

        Raises:
            LaunchError: no worker has posted it in time, or it is not readable.
        """
        try:
            self._store.wait([name], self._timeout)
            return bytes.fromhex(self._store.get(name)[:LONGEST_NOTICE].decode("ascii"))
        except ValueError as error:
            raise LaunchError(f"the store holds no address of a worker under the name {name}: {error}") from error
        except RuntimeError as error:
            waited = self._timeout.total_seconds()
            raise LaunchError(f"another worker did not appear within {waited:g} s: {error}") from error


def form_group(store: dist.Store, generation: Generation, backend: str, timeout_s: float) -> Any:
    """A process group of this generation's workers: ``ProcessGroupGloo`` or ``ProcessGroupNCCL``.

    It belongs to the caller alone: torch's default group stays untouched.

    Raises:
        LaunchError: the others did not appear within ``timeout_s`` seconds.
    """
    scoped = dist.PrefixStore("group", store)
    timeout = timedelta(seconds=timeout_s)
    try:
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return dist.ProcessGroupNCCL(scoped, generation.rank, generation.world_size, options)
        return _gloo(scoped, generation, timeout)
    except RuntimeError as error:
        raise LaunchError(
            f"rank {generation.rank} could not connect to the other {generation.world_size - 1} workers within "
            f"{timeout_s:g} s: {str(error).splitlines()[0]}"
        ) from error


def _gloo(store: dist.Store, generation: Generation, timeout: timedelta) -> Any:
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [_gloo_device(store)]
    return dist.ProcessGroupGloo(store, generation.rank, generation.world_size, options)


def _gloo_device(store: dist.Store) -> Any:
    # Workers that meet on loopback live on one host: nothing of theirs needs to listen elsewhere.
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if getattr(store, "host", None) in ("127.0.0.1", "localhost", "::1"):
        return dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface)
    # The other hosts are reached on the network on which this host reaches the coordinator.
    if address := getattr(store, "interface", ""):
        return dist.ProcessGroupGloo.create_device(hostname=address)
    return dist.ProcessGroupGloo.create_default_device()


def own_address(store: dist.Store) -> str:
    """The address at which workers of other hosts reach this one, on the network that :func:`form_group` uses."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return data_address(getattr(store, "host", None) or "", getattr(store, "interface", ""))
