"""How the workers of a generation find each other."""

import itertools
import json
import os
import platform
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import torch.distributed as dist

from unisono.errors import JobError, Unreadable
from unisono.membership.environment import Environment
from unisono.membership.messages import Neighbour, NewGeneration
from unisono.membership.rendezvous import TorchRendezvousStore, open_store
from unisono.received import parse_json
from unisono.reduce.data_network import NetworkKeys, keys_from, write_keys
from unisono.reduce.peers import PeerListener, Peers, RendezvousStore, address_from, is_within_call, meet
from unisono.train.group.device_messages import NEXT_ADDRESS

PATIENCE_S = 30.0
"""Seconds to wait for a file of another host: network file systems may show it late."""

LOOK_S = 0.1
"""Seconds between two looks for that file."""

CURES = (
    "make keys once with `unisono keys keys.pem`, copy the file to each host, and set UNISONO_DATA_KEYS to its path; "
    "or let gradients travel in plain text, in a network that only this job's hosts are in: "
    "unisono.init(communication={'insecure_data': True}), or UNISONO_INSECURE_DATA=1"
)


def shared_keys(
    folder: Path, rank: int, workers: int, board: RendezvousStore, scope: str, patience_s: float = PATIENCE_S
) -> NetworkKeys:
    """Share keys that rank 0 makes, through a file that only this user can read. Collective.

    Everybody may read the store in which workers of fixed number meet. So it holds the file's path and digest only. The
    file is removed when all workers have read it. ``folder`` is one that hosts share; within ``patience_s`` seconds a
    file may appear on another host. ``scope`` names the workers that meet.

    Raises:
        JobError: a host cannot write or read the file; says what to do.
        LaunchError: another worker did not appear.
    """
    if rank == 0:
        return _publish_keys(folder, workers, board, scope)
    announcement = board.read("keys")
    try:
        keys = _read_keys(*_path_from(announcement), scope, patience_s)
    except JobError:
        board.post(f"has/{rank}", b"no")
        raise
    board.post(f"has/{rank}", b"yes")
    return keys


def _publish_keys(folder: Path, workers: int, board: RendezvousStore, scope: str) -> NetworkKeys:
    path = folder.absolute() / f".keys-{secrets.token_hex(8)}.pem"
    with suppress(OSError):  # writing the keys says what is wrong
        folder.mkdir(parents=True, exist_ok=True)
    try:
        write_keys(path)
    except JobError:
        board.post("keys", b"{}")  # so that no worker waits for keys
        raise
    try:
        board.post("keys", json.dumps([str(path), sha256(path.read_bytes()).hexdigest()]).encode())
        without = [rank for rank in range(1, workers) if board.read(f"has/{rank}") != b"yes"]
        if without:
            raise JobError(
                f"workers of several hosts speak TLS, and rank {without[0]} cannot read the keys that rank 0 on host "
                f"{platform.node()} has put into {folder.absolute()}: {CURES}"
            )
        return keys_from(path, scope)
    finally:
        with suppress(OSError):
            path.unlink()


def _path_from(announcement: bytes) -> tuple[Path, str]:
    with suppress(Unreadable):
        match parse_json(announcement):
            case [str(path), str(digest)]:
                return Path(path), digest
    raise JobError("rank 0 does not tell where the keys of the network between the workers are: see its error")


def _read_keys(path: Path, digest: str, scope: str, patience_s: float) -> NetworkKeys:
    deadline = time.monotonic() + patience_s
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    try:
        # Others can put a file of theirs at the path: it is not even opened.
        is_announced = path.stat().st_uid == os.geteuid() and sha256(path.read_bytes()).hexdigest() == digest
    except OSError as error:
        raise JobError(
            f"workers of several hosts speak TLS, and host {platform.node()} cannot read the keys that rank 0 has put "
            f"into {path.parent} ({error.strerror}): hosts that share no files need them beforehand. So {CURES}"
        ) from error
    if not is_announced:
        raise JobError(f"{path} holds other keys than those of rank 0, or belongs to somebody else: {CURES}")
    return keys_from(path, scope)


RUNS = Path("runs")
"""The default folder of run folders."""

_meetings = itertools.count(1)


class Rendezvous(ABC):
    """The rendezvous of the workers of one generation."""

    environment: Environment
    timeout_s: float

    @abstractmethod
    def store(self) -> dist.Store:
        """Return a key-value store that only this generation uses."""

    @abstractmethod
    def peers(self) -> Peers:
        """Connect with the other workers of this host, which have neighbouring ranks. Called once."""

    def plain_keys(self) -> NetworkKeys:
        """Return a secret that rank 0 makes, for a network that others may read."""
        return self._from_first(NetworkKeys.plain)

    def host_keys(self) -> NetworkKeys:
        """Return keys that tell these workers, on Unix sockets of one host, from those of this user's other jobs.

        They need not be secret: the kernel keeps other users out.
        """
        return self.plain_keys()

    @abstractmethod
    def private_keys(self) -> NetworkKeys:
        """Return keys with which these workers speak TLS.

        Raises:
            JobError: there are none; says what to do.
        """

    def _from_first(self, make: Callable[[], NetworkKeys]) -> NetworkKeys:
        board = TorchRendezvousStore(dist.PrefixStore("keys", self.store()), self.timeout_s)
        if self.environment.rank == 0:
            keys = make()
            board.post("network", keys.packed())
            return keys
        return NetworkKeys.unpacked(board.read("network"))


class FixedRendezvous(Rendezvous):
    """The rendezvous of workers that were started together, in the launcher's store.

    All workers make their rendezvous in the same order.

    Args:
        process: the place of this process among all, where only some of them meet; by default all do.
        scope: a name for the workers that meet.
        meeting: the number of the meeting among those of one scope; by default that of all meetings so far.
        keys: a file with a certificate and its key, the same on all hosts; None where hosts share files.
        folder: a folder that hosts share if they share any.
    """

    def __init__(
        self,
        environment: Environment,
        timeout_s: float,
        process: Environment | None = None,
        scope: str = "",
        meeting: int | None = None,
        keys: Path | None = None,
        folder: Path = RUNS,
    ) -> None:
        self.environment, self._process = environment, process or environment
        self.timeout_s, self._keys, self._folder = timeout_s, keys, folder
        self._scope = f"unisono/{next(_meetings) if meeting is None else meeting}{scope}"
        port = environment.rendezvous.port if environment.rendezvous is not None else 0
        self._purpose = f"{self._scope} at port {port}"  # no other job of this host has that now

    def store(self) -> dist.Store:
        """Open the launcher's store, or that of rank 0."""
        return dist.PrefixStore(self._scope, open_store(self._process, self.timeout_s))

    def peers(self) -> Peers:
        """Meet at the addresses that the workers post.

        Others can read and change these, so workers recognise each other by their purpose.
        """
        environment = self.environment
        addresses = TorchRendezvousStore(
            dist.PrefixStore(f"host/{environment.rank - environment.local_rank}", self.store()), self.timeout_s
        )
        return meet(environment.local_rank, environment.local_world_size, addresses, self.timeout_s, self._purpose)

    def host_keys(self) -> NetworkKeys:
        """Make keys of the purpose alone: others can read the store, and change what is in it."""
        return NetworkKeys(self._purpose)

    def private_keys(self) -> NetworkKeys:
        """Read keys from the file that a person has copied to all hosts, or share new ones in a folder."""
        if self._keys is not None:
            return keys_from(self._keys, self._scope)
        environment, board = (
            self.environment,
            TorchRendezvousStore(dist.PrefixStore("keys", self.store()), self.timeout_s),
        )
        return shared_keys(self._folder, environment.rank, environment.world_size, board, self._scope)


class ElasticRendezvous(Rendezvous):
    """The rendezvous of a new generation's workers.

    Args:
        device: the place of this device among those of the worker: devices of the same place meet.
    """

    def __init__(
        self,
        new: NewGeneration,
        rank: int,
        host: str,
        listener: PeerListener,
        store: dist.Store,
        timeout_s: float,
        device: int = 0,
    ) -> None:
        neighbours = [_of_device(neighbour, device) for neighbour in new.here]
        own = next(neighbour for neighbour in neighbours if neighbour.rank == rank)
        self._here, self._device = _within_call(own, neighbours), device
        self._place = self._here.index(own)
        self._generation, self._listener, self._store = new.generation, listener, store
        self.timeout_s = timeout_s
        self.environment = Environment("unisono", rank, len(new.acts), self._place, len(self._here), host)

    def store(self) -> dist.Store:
        """Return the coordinator's store."""
        return dist.PrefixStore(f"g{self._generation}/device-{self._device}", self._store)

    def peers(self) -> Peers:
        """Meet at the addresses that came with the new generation."""
        lower = (address_from(neighbour.address) for neighbour in self._here[: self._place])
        workers = " ".join(neighbour.worker for neighbour in self._here)
        purpose = f"generation {self._generation} of {workers}, device {self._device}"
        return self._listener.gather(self._place, len(self._here), lower, purpose)

    def private_keys(self) -> NetworkKeys:
        """Return new keys that rank 0 makes, and the coordinator hands out."""
        keys = self._from_first(NetworkKeys.private)
        if not keys.pem:
            raise JobError(
                f"rank {self.environment.rank} on host {self.environment.host}: rank 0 lets workers of several hosts "
                f"speak plain text, and this one does not: give --insecure-data to all of them, or to none"
            )
        return keys


def _of_device(worker: Neighbour, device: int) -> Neighbour:
    """Return a neighbour with the address of one of its devices."""
    addresses = worker.address.split(NEXT_ADDRESS)
    return worker.model_copy(update={"address": addresses[device] if device < len(addresses) else ""})


def _within_call(mine: Neighbour, neighbours: Sequence[Neighbour]) -> list[Neighbour]:
    # Several hosts may have the same name, such as containers of one image, so the listeners' addresses decide.
    address = address_from(mine.address)
    return [neighbour for neighbour in neighbours if is_within_call(address, address_from(neighbour.address))]
