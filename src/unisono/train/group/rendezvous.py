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
from unisono.train.group.one_voice import NEXT_ADDRESS

PATIENCE_S = 30.0
"""For a file that another host has written: networks of files may show it late."""

LOOK_S = 0.1

CURES = (
    "make keys once with `unisono keys keys.pem`, copy the file to each host, and set UNISONO_DATA_KEYS to its path; "
    "or let gradients travel in plain text, in a network that only this job's hosts are in: "
    "unisono.init(communication={'insecure_data': True}), or UNISONO_INSECURE_DATA=1"
)


def shared_keys(
    folder: Path, rank: int, workers: int, board: RendezvousStore, scope: str, patience_s: float = PATIENCE_S
) -> NetworkKeys:
    """Keys that rank 0 makes, in a file that only this user can read, until all have read it. Collective.

    Everybody may read the store in which workers of fixed number meet: so it has the file's path and digest alone.

    Args:
        folder: a folder that the hosts share.
        rank: this worker's rank.
        workers: the number of workers.
        board: a store of these workers.
        scope: a name for those that meet.
        patience_s: the seconds in which a file may appear on another host.

    Raises:
        JobError: a host cannot write or read the file; says what to do.
        LaunchError: another worker did not appear.
    """
    if rank == 0:
        return _told(folder, workers, board, scope)
    told = board.read("keys")
    try:
        keys = _found(*_path_from(told), scope, patience_s)
    except JobError:
        board.post(f"has/{rank}", b"no")
        raise
    board.post(f"has/{rank}", b"yes")
    return keys


def _told(folder: Path, workers: int, board: RendezvousStore, scope: str) -> NetworkKeys:
    path = folder.absolute() / f".keys-{secrets.token_hex(8)}.pem"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        write_keys(path)
    except JobError:
        board.post("keys", b"{}")  # nobody waits for them
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


def _path_from(told: bytes) -> tuple[Path, str]:
    with suppress(Unreadable):
        match parse_json(told):
            case [str(path), str(digest)]:
                return Path(path), digest
    raise JobError("rank 0 does not tell where the keys of the network between the workers are: see its error")


def _found(path: Path, digest: str, scope: str, patience_s: float) -> NetworkKeys:
    until = time.monotonic() + patience_s
    while not path.exists() and time.monotonic() < until:
        time.sleep(LOOK_S)
    try:
        # Others can change the path: what is not this user's is not even opened.
        is_told = path.stat().st_uid == os.geteuid() and sha256(path.read_bytes()).hexdigest() == digest
    except OSError as error:
        raise JobError(
            f"workers of several hosts speak TLS, and host {platform.node()} cannot read the keys that rank 0 has put "
            f"into {path.parent} ({error.strerror}): hosts that share no files need them beforehand. So {CURES}"
        ) from error
    if not is_told:
        raise JobError(f"{path} holds other keys than those of rank 0, or belongs to somebody else: {CURES}")
    return keys_from(path, scope)


RUNS = Path("runs")
"""Where run folders are, unless somebody says otherwise."""

_meetings = itertools.count(1)


class Rendezvous(ABC):
    """The rendezvous of the workers of one generation.

    Attributes:
        environment: this worker's rank, world size and place among the hosts.
        timeout_s: the longest wait for the other workers, in seconds.
    """

    environment: Environment
    timeout_s: float

    @abstractmethod
    def store(self) -> dist.Store:
        """A key-value store that only this generation uses."""

    @abstractmethod
    def peers(self) -> Peers:
        """Connections to the other workers of this host, which are neighbours in the roster. Once."""

    def plain_keys(self) -> NetworkKeys:
        """A secret that the first of them makes, for a network that others may read."""
        return self._from_first(NetworkKeys.plain)

    def host_keys(self) -> NetworkKeys:
        """What tells these workers, on Unix sockets of one host, from those of this user's other jobs.

        The kernel keeps other users out, so it has to be no secret.
        """
        return self.plain_keys()

    @abstractmethod
    def private_keys(self) -> NetworkKeys:
        """Keys with which they speak TLS.

        Raises:
            JobError: there are none; says what to do.
        """

    def _from_first(self, make: Callable[[], NetworkKeys]) -> NetworkKeys:
        board = TorchRendezvousStore(dist.PrefixStore("keys", self.store()), self.timeout_s)
        if self.environment.rank == 0:
            made = make()
            board.post("network", made.packed())
            return made
        return NetworkKeys.unpacked(board.read("network"))


class FixedRendezvous(Rendezvous):
    """The rendezvous of workers that were started together: the launcher's own. All workers make theirs in one order.

    Args:
        environment: this worker's rank, world size and place among the hosts.
        timeout_s: the longest wait for the other workers, in seconds.
        process: the place of this process among all, where only some of them meet; by default all do.
        scope: a name for those that meet.
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
        """The launcher's, or rank 0's."""
        return dist.PrefixStore(self._scope, open_store(self._process, self.timeout_s))

    def peers(self) -> Peers:
        """They post where they can be called. Others can read and change that: so they are told by their purpose."""
        here = self.environment
        addresses = TorchRendezvousStore(
            dist.PrefixStore(f"host/{here.rank - here.local_rank}", self.store()), self.timeout_s
        )
        return meet(here.local_rank, here.local_world_size, addresses, self.timeout_s, self._purpose)

    def host_keys(self) -> NetworkKeys:
        """Others can read the store, and change what stands there: so nothing comes from it."""
        return NetworkKeys(self._purpose)

    def private_keys(self) -> NetworkKeys:
        """From the file that the person has copied to all hosts, or in a folder that the hosts share."""
        if self._keys is not None:
            return keys_from(self._keys, self._scope)
        here, board = self.environment, TorchRendezvousStore(dist.PrefixStore("keys", self.store()), self.timeout_s)
        return shared_keys(self._folder, here.rank, here.world_size, board, self._scope)


class ElasticRendezvous(Rendezvous):
    """The rendezvous of a new generation's workers.

    Args:
        new: the generation.
        rank: this worker's rank.
        host: the name of its host.
        listener: this worker's listener, whose address the others know.
        store: the coordinator's key-value store.
        timeout_s: the longest wait for another worker, in seconds.
        device: the place of this device among those of the worker: those of the same place meet.
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
        neighbours = [_of_device(one, device) for one in new.here]
        mine = next(one for one in neighbours if one.rank == rank)
        self._here, self._device = _within_call(mine, neighbours), device
        self._place = self._here.index(mine)
        self._generation, self._listener, self._store = new.generation, listener, store
        self.timeout_s = timeout_s
        self.environment = Environment("unisono", rank, len(new.acts), self._place, len(self._here), host)

    def store(self) -> dist.Store:
        """The coordinator's."""
        return dist.PrefixStore(f"g{self._generation}/device-{self._device}", self._store)

    def peers(self) -> Peers:
        """At the listeners whose addresses came with the roster."""
        lower = (address_from(one.address) for one in self._here[: self._place])
        workers = " ".join(one.worker for one in self._here)
        purpose = f"generation {self._generation} of {workers}, device {self._device}"
        return self._listener.gather(self._place, len(self._here), lower, purpose)

    def private_keys(self) -> NetworkKeys:
        """The first of them makes new ones, and the coordinator hands them out."""
        keys = self._from_first(NetworkKeys.private)
        if not keys.pem:
            raise JobError(
                f"rank {self.environment.rank} on host {self.environment.host}: rank 0 lets workers of several hosts "
                f"speak plain text, and this one does not: give --insecure-data to all of them, or to none"
            )
        return keys


def _of_device(worker: Neighbour, device: int) -> Neighbour:
    """A neighbour as devices of one place see it."""
    addresses = worker.address.split(NEXT_ADDRESS)
    return worker.model_copy(update={"address": addresses[device] if device < len(addresses) else ""})


def _within_call(mine: Neighbour, neighbours: Sequence[Neighbour]) -> list[Neighbour]:
    # Hosts may have one name, for instance containers of one image: the addresses of their listeners tell.
    here = address_from(mine.address)
    return [one for one in neighbours if is_within_call(here, address_from(one.address))]
