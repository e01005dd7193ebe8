"""The owners of what is worked out once, for all: which member works out what."""

from collections.abc import Sequence


def owners_of(costs: Sequence[float], members: int) -> list[int]:
    """Who works out what, so that all are done at about the same time. The dearest first, each to whoever has least.

    At most 4/3 of the least possible time (R. L. Graham, Bounds on multiprocessing timing anomalies, 1969).

    Args:
        costs: the cost of each piece of work, in any unit.
        members: their number.

    Returns:
        the member that owns each piece, from 0. Equal costs go by the order of the pieces, and of the members.
    """
    loads, owners = [0.0] * members, [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda each: (-costs[each], each)):
        owner = min(range(members), key=lambda each: (loads[each], each))
        owners[number] = owner
        loads[owner] += costs[number]
    return owners
