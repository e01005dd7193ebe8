"""How the workers of a generation find each other."""

import itertools
from abc import ABC, abstractmethod

import torch.distributed as dist

from unisono.membership.environment import Environment
from unisono.membership.rendezvous import Noticeboard, open_store
from unisono.reduce.peers import Peers, meet

_meetings = itertools.count(1)


class Meeting(ABC):
    """Where the workers of one generation meet.

    Attributes:
        environment: where this worker stands in the generation.
    """

    environment: Environment

    @abstractmethod
    def store(self) -> dist.Store:
        """A key-value store that only this generation uses."""

    @abstractmethod
    def peers(self) -> Peers:
        """Connections to the other workers of this host, which are neighbours in the roster. Once."""


class FixedMeeting(Meeting):
    """Of workers that were started together, over their launcher's rendezvous. All make theirs in the same order.

    Args:
        environment: where this worker stands.
        timeout_s: how long to wait for the others.
    """

    def __init__(self, environment: Environment, timeout_s: float) -> None:
        self.environment = environment
        self._timeout_s = timeout_s
        self._scope = f"unisono/{next(_meetings)}"

    def store(self) -> dist.Store:
        """The launcher's, or rank 0's."""
        return dist.PrefixStore(self._scope, open_store(self.environment, self._timeout_s))

    def peers(self) -> Peers:
        """They post where they can be called."""
        here = self.environment
        board = Noticeboard(dist.PrefixStore(f"host/{here.rank - here.local_rank}", self.store()), self._timeout_s)
        meeting = f"{self._scope} at port {here.rendezvous.port if here.rendezvous is not None else 0}"
        return meet(here.local_rank, here.local_world_size, board, self._timeout_s, meeting)
