"""Clocks of several hosts, put on one: by what the coordinator's showed, or by exchanges in which all wait for all."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

WINDOW = 50
"""Exchanges from which one look is made, where no coordinator tells its time."""


@dataclass(frozen=True, slots=True)
class Look:
    """A moment at which two clocks were compared.

    Attributes:
        at: the moment on the clock that is to be put right, in nanoseconds.
        ahead: the nanoseconds by which the other clock was ahead.
        within: the nanoseconds by which that may be wrong, up or down.
    """

    at: int
    ahead: int
    within: int


@dataclass(frozen=True, slots=True)
class Correction:
    """The way from one clock to the common one: between two looks, in proportion.

    Attributes:
        looks: the looks, in the order of time; none where the clock is the common one.
    """

    looks: tuple[Look, ...] = ()

    @classmethod
    def of(cls, looks: Iterable[Look]) -> Correction:
        """From looks in any order; of several at one moment, the best."""
        best: dict[int, Look] = {}
        for look in looks:
            if look.at not in best or look.within < best[look.at].within:
                best[look.at] = look
        return cls(tuple(best[at] for at in sorted(best)))

    def __call__(self, at: int) -> int:
        """A moment on the common clock, in nanoseconds."""
        if not self.looks:
            return at
        after = bisect(self.looks, at, key=lambda look: look.at)
        if after in (0, len(self.looks)):
            return at + self.looks[min(after, len(self.looks) - 1)].ahead
        before, behind = self.looks[after - 1], self.looks[after]
        share = (at - before.at) / (behind.at - before.at)
        return at + before.ahead + round(share * (behind.ahead - before.ahead))

    @property
    def within(self) -> int:
        """The nanoseconds by which the median look may be wrong; 0 for the common clock."""
        return sorted(look.within for look in self.looks)[len(self.looks) // 2] if self.looks else 0


Exchange = tuple[int, int]
"""From when to when a worker was in an exchange that nobody leaves before all have come, in nanoseconds."""


def looks_by_exchanges(
    own: Mapping[tuple[int, int], Exchange], others: Mapping[tuple[int, int], Exchange]
) -> list[Look]:
    """What exchanges tell of another clock: whoever has left one has left it after the other has come.

    Args:
        own: the exchanges of a worker whose clock is to be put right, by what tells them from others.
        others: those of a worker with the common clock.
    """
    shared = sorted(own.keys() & others.keys())
    found = []
    for first in range(0, len(shared), WINDOW):
        pairs = [(own[key], others[key]) for key in shared[first : first + WINDOW]]
        most = min(their_end - our_begin for (our_begin, _), (_, their_end) in pairs)
        least = max(their_begin - our_end for (_, our_end), (their_begin, _) in pairs)
        middle = pairs[len(pairs) // 2][0][0]
        found.append(Look(middle, (most + least) // 2, abs(most - least) // 2))
    return found


def corrections(
    looks: Mapping[str, Sequence[Look]], exchanges: Mapping[str, Mapping[tuple[int, int], Exchange]]
) -> dict[str, Correction | None]:
    """What puts each clock on the common one, which is the coordinator's, or without one that of the first host.

    Args:
        looks: the looks of each clock at the coordinator's.
        exchanges: the exchanges of one worker with each clock.

    Returns:
        by clock; None for one of which nothing is known.
    """
    if len(looks) == 1:
        return dict.fromkeys(looks, Correction())
    if all(looks.values()):
        return {clock: Correction.of(found) for clock, found in looks.items()}
    common, *others = looks
    found: dict[str, Correction | None] = {common: Correction()}
    for clock in others:
        told = looks_by_exchanges(exchanges.get(clock, {}), exchanges.get(common, {}))
        found[clock] = Correction.of(told) if told else None
    return found
