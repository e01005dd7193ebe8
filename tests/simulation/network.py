"""Which hosts reach each other."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain, combinations
from random import Random

Pair = tuple[str, str]


class Network:
    """Between hosts, for connections that are made anew: those that stand are not touched.

    Attributes:
        lost: of whom to whom packets are lost.
        secret: pairs of which each reaches the other's agent, but their workers do not connect.
    """

    def __init__(self) -> None:
        self.lost: set[Pair] = set()
        self.secret: set[frozenset[str]] = set()

    def reaches(self, one: str, other: str) -> bool:
        """Whether a connection from one host to another can be made."""
        return one == other or (one, other) not in self.lost

    def connects(self, hosts: Collection[str]) -> bool:
        """Whether workers on these hosts can form a generation."""
        pairs = list(combinations(sorted(set(hosts)), 2))
        return all(
            self.reaches(one, other) and self.reaches(other, one) and frozenset((one, other)) not in self.secret
            for one, other in pairs
        )

    def part(self, chance: Random, hosts: list[str]) -> set[str]:
        """Some hosts reach some others no more, in one direction or in both. Returns those concerned."""
        chance.shuffle(hosts)
        cut = chance.randint(1, len(hosts) - 1)
        here, there = hosts[:cut], hosts[cut:]
        if chance.random() < 0.5:
            here, there = here[:1], there[:1]
        kind = chance.choice(("secret", "one way", "both ways", "both ways"))
        for one in here:
            for other in there:
                if kind == "secret":
                    self.secret.add(frozenset((one, other)))
                    continue
                self.lost.add((one, other))
                if kind == "both ways":
                    self.lost.add((other, one))
        return {*here, *there}

    def heal(self, chance: Random) -> None:
        """One of the pairs reaches each other again."""
        pairs = sorted({tuple(sorted(pair)) for pair in (*self.lost, *self.secret)})
        if pairs:
            one, other = chance.choice(pairs)
            self.lost -= {(one, other), (other, one)}
            self.secret.discard(frozenset((one, other)))

    def largest(self, rooms: dict[str, int]) -> int:
        """The most room that hosts have that all reach each other."""
        sets = chain.from_iterable(combinations(sorted(rooms), size) for size in range(1, len(rooms) + 1))
        return max((sum(rooms[name] for name in each) for each in sets if self.connects(each)), default=0)
