"""The majority of states: whether all workers hold the same one, and which ones do not."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from enum import Enum

from unisono.train.group.membership import StateTransfer


class Verdict(Enum):
    """The verdict on the workers' states, from their digests."""

    RIGHT = "all hold the same"
    HEALING = "most hold the same"
    WRONG = "nobody can say who is right"


def verdict(held: Sequence[Hashable]) -> Verdict:
    """Judge the digests of what workers hold, by rank."""
    if len(set(held)) <= 1:
        return Verdict.RIGHT
    return Verdict.WRONG if healing(held) is None else Verdict.HEALING


def healing(held: Sequence[Hashable]) -> StateTransfer | None:
    """Return who gives whom the right state, where some workers hold another one than most do.

    ``held`` are digests by rank. Return None if no state is held by more than half of the workers.
    """
    right, votes = Counter(held).most_common(1)[0]
    if 2 * votes <= len(held):
        return None
    return StateTransfer(
        source=held.index(right), acts=[int(digest == right) for digest in held], joiners=frozenset(), seconds={}
    )


def trusted(transfer: StateTransfer, held: Mapping[int, Hashable]) -> StateTransfer | None:
    """Return who gives whom the state when some workers lack it.

    A worker that holds another state than most counts as behind. ``transfer`` is from the workers that have come
    furthest, any of which may hold a wrong state. ``held`` are digests by rank, empty if states are not compared.
    Return None if no majority holds the same.
    """
    if len(set(held.values())) <= 1:
        return transfer
    ranks, repair = list(held), healing(list(held.values()))
    if repair is None:
        return None
    outvoted = {ranks[number] for number in repair.behind}
    acts = [-1 if rank in outvoted else acts for rank, acts in enumerate(transfer.acts)]
    return replace(transfer, source=ranks[repair.source], acts=acts)
