"""How the workers of a generation find each other."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from unisono.membership.environment import Environment
from unisono.membership.rendezvous import TorchRendezvousStore, open_store
from unisono.reduce.data_network import NetworkKeys, keys_from
from unisono.reduce.peers import Peers, meet
from unisono.train.group.shared_keys import shared_keys

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
