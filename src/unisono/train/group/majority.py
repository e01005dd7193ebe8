"""The majority of states: whether all workers hold the same one, and which ones do not."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from enum import Enum

from unisono.train.group.control import Flags
from unisono.train.group.membership import StateTransfer


class Verdict(Enum):
    """The verdict on the workers' states, from their digests."""

    RIGHT = "all hold the same"
    HEALING = "most hold the same"
    WRONG = "nobody can say who is right"


def judged(flags: Sequence[Flags]) -> Verdict:
    """What workers hold, by what each said in a control word."""
    if any(each.flipped for each in flags):
        return Verdict.WRONG
    return verdict([each.digest for each in flags])


def verdict(held: Sequence[Hashable]) -> Verdict:
    """What workers hold, by rank."""
    if len(set(held)) <= 1:
        return Verdict.RIGHT
    return Verdict.WRONG if healing(held) is None else Verdict.HEALING


def healing(held: Sequence[Hashable]) -> StateTransfer | None:
    """Who gives whom the right state, where some workers hold another one than most do.

    Args:
        held: digests, by rank.

    Returns:
        nothing if no state is held by more than half of the workers.
    """
    right, votes = Counter(held).most_common(1)[0]
    if 2 * votes <= len(held):
        return None
    return StateTransfer(
        source=held.index(right), acts=[int(one == right) for one in held], joiners=frozenset(), seconds={}
    )


def trusted(transfer: StateTransfer, held: Mapping[int, Hashable]) -> StateTransfer | None:
    """Who gives whom the state when some workers lack it.

    Args:
        transfer: the state transfer from those that have come furthest, any of which may hold a wrong state.
        held: digests of their states, by rank; empty if states are not compared.

    Returns:
        nothing if no majority of them holds the same. Whoever holds another state than most lacks theirs.
    """
    if len(set(held.values())) <= 1:
        return transfer
    ranks, found = list(held), healing(list(held.values()))
    if found is None:
        return None
    odd = {ranks[number] for number in found.behind}
    acts = [-1 if rank in odd else acts for rank, acts in enumerate(transfer.acts)]
    return replace(transfer, source=ranks[found.source], acts=acts)
