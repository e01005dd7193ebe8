"""The end of a generation: who has come furthest, who is excluded, and how shards are split."""

from collections.abc import Mapping, Sequence, Set
from statistics import median

from unisono.membership.messages import Arrived
from unisono.membership.state.roster import MintedGeneration, Seat
from unisono.membership.state.rows import CANDIDATE, MEMBER, Agent, Worker
from unisono.membership.state.state import State
from unisono.membership.state.state_update import StateUpdate
from unisono.plan.split import Split

Arrivals = Mapping[str, Arrived]
"""By member, how it has arrived."""


def holders_among(members: Sequence[Worker], current: MintedGeneration, arrivals: Arrivals) -> list[Worker]:
    """Members that have a state to go on from: they are no joiners that were still to receive it."""
    joiners = {seat.worker for seat in current.roster if seat.joins}
    least = max(1, current.roster[current.source].acts)
    return [member for member in members if member.id not in joiners or least <= arrivals[member.id].acts]


def are_steady(holders: Sequence[Worker], arrivals: Arrivals) -> bool:
    """Whether all stand at one and the same boundary."""
    found = _different([arrivals[member.id] for member in holders])
    places = {(each.acts, each.loop) for each in found}
    return len(places) == 1 and all(each.at_boundary for each in found)


def _different(arrived: Sequence[Arrived]) -> list[Arrived]:
    """Each message once: those that arrive together have the same."""
    return [*{id(each): each for each in arrived}.values()]


def newest(staying: Sequence[Worker], holding: Set[str], arrivals: Arrivals) -> int:
    """The first rank, among those that stay, whose state is the newest."""
    acts = [arrivals[member.id].acts if member.id in holding else -1 for member in staying]
    return acts.index(max(acts))


def survivor(member: Worker, agent: Agent, found: Arrived, holds: bool) -> Seat:
    """The place of a member that has arrived in the next roster."""
    acts = found.acts if holds else 0
    return Seat(member.id, member.host, found.address, acts, not holds, agent.id, agent.probes)


def newcomer(worker: Worker, agent: Agent, joins: bool) -> Seat:
    """The place of a worker that was in none."""
    return Seat(worker.id, worker.host, worker.address, 0, joins, agent.id, agent.probes)


# How shards are split among workers of different speed.

WORTH = 1.2
"""An uneven split has to be faster than an even one, or than the present one, by this factor."""

SETTLED_S = 5.0
"""How long a split stays before it is judged, in seconds: speeds are known only after some steps."""


def split_for(shards: int, workers: Sequence[Worker]) -> Split:
    """The split for these workers: even, unless they are known to differ by much.

    Args:
        shards: the job's number of shards.
        workers: the workers by rank. New ones are taken to be like the others.
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
    current, members = state.minted, state.members
    if current is None or len(members) < len(current.roster):
        return False
    seconds = [member.signs.pulse.shard_s for member in members]
    if not all(seconds):
        return False
    better = split_for(state.shards, members)
    return Split(current.bounds).seconds(seconds) > WORTH * better.seconds(seconds)


# Who goes when members could not connect, so that the next generation is another one.

MOST_UNFORMED = 2
"""Generations that may fail to form because of a worker, as it seems, before it is excluded."""


def exclude_unconnected(update: StateUpdate, current: MintedGeneration, holders: Sequence[Worker]) -> frozenset[str]:
    """Exclude members whose hosts are left out, and those because of whom, it seems, no generation forms.

    Args:
        update: all members have arrived.
        current: the generation that ends.
        holders: its members that hold the weights. At least one of them stays.

    Returns:
        who is excluded.
    """
    agents = update.state.agents
    out = [member for member in update.state.members if agents[member.agent].left_out] if agents.count("out") else []
    if _has_formed(update.state, current, holders):
        update.set(unformed=0)
    elif _is_whole(update.state, current):
        update.note("not formed", generation=current.generation, workers=[seat.worker for seat in current.roster])
        out += [] if out else _suspects(update, current)
    for worker in out:
        agent = update.state.agents[worker.agent]
        if not agent.left_out:
            update.put_agent(agent, given_up=agent.given_up + 1)
        update.exclude(worker, agent.left_out or _why(current))
    return frozenset(worker.id for worker in out)


def _has_formed(state: State, current: MintedGeneration, holders: Sequence[Worker]) -> bool:
    base = current.roster[current.source].acts
    return state.formed or any(state.arrivals[holder.id].acts > base for holder in holders)


def _is_whole(state: State, current: MintedGeneration) -> bool:
    """Whether nobody was lost, which would explain it, and there was somebody to connect with."""
    found = [state.workers.get(seat.worker) for seat in current.roster]
    return len(found) > 1 and all(worker is not None and worker.phase in (*CANDIDATE, *MEMBER) for worker in found)


def _suspects(update: StateUpdate, current: MintedGeneration) -> list[Worker]:
    """The joiners, or if there are none the member that came last; nobody the first time."""
    workers = [update.state.workers[seat.worker] for seat in current.roster]
    joiners = [worker for worker, seat in zip(workers, current.roster, strict=True) if seat.joins]
    if joiners:
        counted = [update.put(joiner, unformed=joiner.unformed + 1) for joiner in joiners]
        return [joiner for joiner in counted if joiner.unformed >= MOST_UNFORMED]
    update.set(unformed=(update.state.unformed + 1) % MOST_UNFORMED)
    del workers[current.source]
    return [] if update.state.unformed else [max(workers, key=lambda worker: int(worker.id.removeprefix("w")))]


def _why(current: MintedGeneration) -> str:
    return (
        f"generation {current.generation} did not form with it, nor did one before, and nobody was lost: see the "
        f"workers' logs. Its place stays empty until somebody resizes the job"
    )
