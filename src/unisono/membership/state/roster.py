"""A generation's roster, and what each of its workers is told of it."""

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
    """A generation: all of what its workers are told, each of them a part.

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
        """What a worker is told that does not know the generation before, or whose news were lost."""
        seat = next(seat for seat in self.roster if seat.worker == worker)
        hosts = self._hosts_but(seat.agent) if worker in self._speakers() else ()
        return self._to_all().model_copy(update={"here": self._neighbours()[seat.host], "hosts": hosts})

    def messages(
        self, before: "MintedGeneration | None", survivors: Container[str]
    ) -> Iterator[tuple[tuple[str, ...], NewGeneration]]:
        """What workers are told. Those of a host are told the same, but for who speaks for it.

        The survivors come from the generation before, and know it.
        """
        speakers, hosts, to_all = self._speakers(), self._hosts(), self._to_all()
        knew, spoke = ({}, {}) if before is None else (before._hosts(), before._speakers())
        news = tuple(target for agent, target in hosts.items() if knew.get(agent) != target)
        gone = tuple(agent for agent in knew if agent not in hosts)
        for here in self._neighbours().values():
            message, names = to_all.model_copy(update={"here": here}), [neighbour.worker for neighbour in here]
            for speaker in filter(speakers.__contains__, names):
                update: dict[str, object] = {"hosts": self._hosts_but(speakers[speaker])}
                if before is not None and speaker in spoke and speaker in survivors:
                    update = {"hosts": news, "gone": gone, "hosts_since": before.generation}
                yield (speaker,), message.model_copy(update=update)
            if others := tuple(name for name in names if name not in speakers):
                yield others, message

    def _neighbours(self) -> dict[str, tuple[Neighbour, ...]]:
        """By host, the workers there, in the order of ranks."""
        here: dict[str, list[Neighbour]] = defaultdict(list)
        for rank, seat in enumerate(self.roster):
            here[seat.host].append(_neighbour(rank, seat.worker, seat.address))
        return {host: tuple(neighbours) for host, neighbours in here.items()}

    def _speakers(self) -> dict[str, str]:
        """Of each agent that answers probes, the worker of the lowest rank: for its host, it probes the others."""
        first: dict[str, str] = {}
        for seat in self.roster:
            if seat.agent and seat.probes:
                first.setdefault(seat.agent, seat.worker)
        return {worker: agent for agent, worker in first.items()}

    def _hosts(self) -> dict[str, Target]:
        """By agent, the hosts that answer probes."""
        seats = {seat.agent: seat for seat in self.roster if seat.agent and seat.probes}
        return {name: Target(agent=name, host=seat.host, address=seat.probes) for name, seat in seats.items()}

    def _hosts_but(self, agent: str) -> tuple[Target, ...]:
        return tuple(target for name, target in self._hosts().items() if name != agent)

    def _to_all(self) -> NewGeneration:
        """What all of them are told."""
        alike = groupby(zip(self.roster, pairwise(self.bounds), strict=True), key=_what_counts)
        ranks = tuple(
            Ranks(workers=len(list(seats)), shards=shards, acts=acts, joins=joins)
            for (shards, acts, joins), seats in alike
        )
        return NewGeneration(
            generation=self.generation, ranks=ranks, source=self.source, loop=self.loop, departures=self.departures
        )


@lru_cache(2**16)
def _neighbour(rank: int, worker: str, address: str) -> Neighbour:
    """One and the same from generation to generation: most workers keep their ranks."""
    return Neighbour(rank=rank, worker=worker, address=address)


def _what_counts(seat_and_shards: tuple[Seat, tuple[int, int]]) -> tuple[int, int, bool]:
    seat, (start, stop) = seat_and_shards
    return stop - start, seat.acts, seat.joins
