"""How shards are split among workers of different speed."""

from collections.abc import Sequence
from statistics import median

from unisono.membership.state.state import State, Worker
from unisono.plan.split import Split

WORTH = 1.2
"""An uneven split has to be faster than an even one, or than the present one, by this factor."""

SETTLED_S = 5.0
"""How long a split stays before it is judged, in seconds: speeds are known only after some steps."""


def split_for(shards: int, workers: Sequence[Worker]) -> Split:
    """The split for these workers: even, unless they are known to differ by much.

    Args:
        shards: of the job.
        workers: in the order of ranks. Who is new is taken to be like the others.
    """
    even = Split.even(shards, len(workers))
    known = [worker.signs.pulse.shard_s for worker in workers if worker.signs.pulse.shard_s > 0]
    if not known:
        return even
    seconds = [worker.signs.pulse.shard_s or median(known) for worker in workers]
    uneven = Split.by_speed(shards, seconds)
    return uneven if even.seconds(seconds) > WORTH * uneven.seconds(seconds) else even


def is_unbalanced(state: State) -> bool:
    """Whether the members should stop for a better split of the shards."""
    minted, members = state.minted, state.members
    if minted is None or state.now < state.minted_at + SETTLED_S or len(members) < len(minted.roster):
        return False
    seconds = [member.signs.pulse.shard_s for member in members]
    if not all(seconds):
        return False
    better = split_for(state.shards, members)
    return Split(minted.bounds).seconds(seconds) > WORTH * better.seconds(seconds)
