"""A generation's roster, and the message about it to each of its workers."""

from collections import defaultdict
from collections.abc import Container, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise
from typing import NamedTuple

from unisono.membership.messages import Neighbour, NewGeneration, Ranks, Target


class Seat(NamedTuple):
    """A worker's place in a roster.

    Attributes:
        address: the address at which workers of its host reach it.
        acts: the number of collective calls that it has completed; 0 for a joiner.
        probes: the address at which that agent answers probes; empty if it does not.
    """

    worker: str
    host: str
    address: str = ""
    acts: int = 0
    joins: bool = False
    agent: str = ""
    probes: str = ""


@dataclass(frozen=True, slots=True)
class MintedGeneration:
    """A generation. Each of its workers is sent the part of this that it needs.

    Attributes:
        roster: its workers, in the order of ranks.
        bounds: the shards of each worker: rank r computes those from ``bounds[r]`` to ``bounds[r + 1]``.
        source: the rank whose state is the newest; all that are behind take it.
        loop: the number of the loop that its members are in; None before the first.
        departures: members that were lost or left on notice so far, in the whole job.
    """

    generation: int
    roster: tuple[Seat, ...]
    bounds: tuple[int, ...]
    source: int
    loop: int | None = None
    departures: int = 0

    def message_for(self, worker: str) -> NewGeneration:
        """The message to a worker that does not know the generation before, or that may have missed this one."""
        seat = next(seat for seat in self.roster if seat.worker == worker)
        hosts = self._hosts_except(seat.agent) if worker in self._probers() else ()
        return self._common_message().model_copy(update={"here": self._neighbours()[seat.host], "hosts": hosts})

    def messages(
        self, before: "MintedGeneration | None", survivors: Container[str]
    ) -> Iterator[tuple[tuple[str, ...], NewGeneration]]:
        """The messages to all workers. Workers of a host get the same, except the one that probes for their host.

        Survivors know the generation before, so their messages name only the hosts that are new or gone.
        """
        probers, hosts, common = self._probers(), self._hosts(), self._common_message()
        old_hosts, old_probers = ({}, {}) if before is None else (before._hosts(), before._probers())
        new_hosts = tuple(target for agent, target in hosts.items() if old_hosts.get(agent) != target)
        gone = tuple(agent for agent in old_hosts if agent not in hosts)
        for here in self._neighbours().values():
            message, names = common.model_copy(update={"here": here}), [neighbour.worker for neighbour in here]
            for prober in filter(probers.__contains__, names):
                update: dict[str, object] = {"hosts": self._hosts_except(probers[prober])}
                if before is not None and prober in old_probers and prober in survivors:
                    update = {"hosts": new_hosts, "gone": gone, "hosts_since": before.generation}
                yield (prober,), message.model_copy(update=update)
            if others := tuple(name for name in names if name not in probers):
                yield others, message

    def _neighbours(self) -> dict[str, tuple[Neighbour, ...]]:
        here: dict[str, list[Neighbour]] = defaultdict(list)
        for rank, seat in enumerate(self.roster):
            here[seat.host].append(_neighbour(rank, seat.worker, seat.address))
        return {host: tuple(neighbours) for host, neighbours in here.items()}

    def _probers(self) -> dict[str, str]:
        """The workers that probe other hosts, with their agents: of each agent that answers probes, the lowest rank."""
        first: dict[str, str] = {}
        for seat in self.roster:
            if seat.agent and seat.probes:
                first.setdefault(seat.agent, seat.worker)
        return {worker: agent for agent, worker in first.items()}

    def _hosts(self) -> dict[str, Target]:
        seats = {seat.agent: seat for seat in self.roster if seat.agent and seat.probes}
        return {name: Target(agent=name, host=seat.host, address=seat.probes) for name, seat in seats.items()}

    def _hosts_except(self, agent: str) -> tuple[Target, ...]:
        return tuple(target for name, target in self._hosts().items() if name != agent)

    def _common_message(self) -> NewGeneration:
        alike = groupby(zip(self.roster, pairwise(self.bounds), strict=True), key=_rank_key)
        ranks = tuple(
            Ranks(workers=len(list(seats)), shards=shards, acts=acts, joins=joins)
            for (shards, acts, joins), seats in alike
        )
        return NewGeneration(
            generation=self.generation, ranks=ranks, source=self.source, loop=self.loop, departures=self.departures
        )


@lru_cache(2**16)
def _neighbour(rank: int, worker: str, address: str) -> Neighbour:
    # Cached over generations, since most workers keep their ranks.
    return Neighbour(rank=rank, worker=worker, address=address)


def _rank_key(seat_and_shards: tuple[Seat, tuple[int, int]]) -> tuple[int, int, bool]:
    seat, (start, stop) = seat_and_shards
    return stop - start, seat.acts, seat.joins
