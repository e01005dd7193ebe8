"""The forming of a new generation of an elastic job."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

import torch.distributed as dist

from unisono.errors import JobError, WorkerLost
from unisono.membership.environment import Environment
from unisono.membership.messages import Neighbour, NewGeneration, Unreached
from unisono.reduce.data_network import NetworkKeys
from unisono.reduce.peers import PeerListener, Peers, address_from, is_within_call
from unisono.train.group.one_voice import NEXT_ADDRESS
from unisono.train.group.rendezvous import Rendezvous
from unisono.train.group.workers import Workers


class Forming:
    """The forming of one generation. Any thread can have the main thread wait no longer.

    Attributes:
        unreached: hosts of the generation to which this worker cannot connect.
    """

    def __init__(self) -> None:
        self.unreached: tuple[Unreached, ...] = ()
        self._found: Future[Workers] = Future()

    def connect(self, form: Callable[[], Workers]) -> Workers:
        """Connect, on a thread of its own: nothing else wakes whoever waits for a host that has vanished.

        Raises:
            WorkerLost: it was given up.
        """
        threading.Thread(target=self._connect, args=(form,), name="unisono-connect", daemon=True).start()
        return self._found.result()

    def give_up(self, why: str) -> None:
        """Nobody waits for the others any more."""
        with suppress(InvalidStateError):
            self._found.set_exception(WorkerLost(why))

    def not_reached(self, unreached: tuple[Unreached, ...]) -> None:
        """Give up hosts that this one does not reach: the transport itself would wait much longer."""
        self.unreached = unreached
        words = "; ".join(f"{each.agent}: {each.why}" for each in unreached)
        self.give_up(f"hosts of the generation are out of reach ({words})")

    def _connect(self, form: Callable[[], Workers]) -> None:
        try:
            workers = form()
        except Exception as error:  # noqa: BLE001 (raised by whoever waits)
            with suppress(InvalidStateError):
                self._found.set_exception(error)
            return
        try:
            self._found.set_result(workers)
        except InvalidStateError:  # nobody waits any more
            workers.close()


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
