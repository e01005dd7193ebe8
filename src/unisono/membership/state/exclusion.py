"""Who goes when members could not connect, so that the next generation is another one."""

from collections.abc import Sequence

from unisono.membership.messages import Minted
from unisono.membership.state.arrival import arrival
from unisono.membership.state.change import Change
from unisono.membership.state.state import CANDIDATE, MEMBER, State, Worker

MOST_UNFORMED = 2
"""Generations that may fail to form because of a worker, as it seems, before it is excluded."""


def exclude_unconnected(change: Change, minted: Minted, holders: Sequence[Worker]) -> frozenset[str]:
    """Exclude members whose hosts are left out, and those because of whom, it seems, no generation forms.

    Args:
        change: all members have arrived.
        minted: the generation that ends.
        holders: its members that hold the weights. At least one of them stays.

    Returns:
        who is excluded.
    """
    out = [member for member in change.state.members if change.state.agents[member.agent].left_out]
    if _has_formed(change.state, minted, holders):
        change.set(unformed=0)
    elif _is_whole(change.state, minted):
        change.note("not formed", generation=minted.generation, workers=[seat.worker for seat in minted.roster])
        out += [] if out else _suspects(change, minted)
    for worker in out:
        agent = change.state.agents[worker.agent]
        if not agent.left_out:
            change.put_agent(agent, given_up=agent.given_up + 1)
        change.exclude(worker, agent.left_out or _why(minted))
    return frozenset(worker.id for worker in out)


def _has_formed(state: State, minted: Minted, holders: Sequence[Worker]) -> bool:
    base = minted.roster[minted.source].acts
    all_formed = {seat.worker for seat in minted.roster} <= set(state.formed)
    return all_formed or any(arrival(holder).acts > base for holder in holders)


def _is_whole(state: State, minted: Minted) -> bool:
    """Whether nobody was lost, which would explain it, and there was somebody to connect with."""
    found = [state.workers.get(seat.worker) for seat in minted.roster]
    return len(found) > 1 and all(worker is not None and worker.phase in (*CANDIDATE, *MEMBER) for worker in found)


def _suspects(change: Change, minted: Minted) -> list[Worker]:
    """The joiners, or if there are none the member that came last; nobody the first time."""
    workers = [change.state.workers[seat.worker] for seat in minted.roster]
    joiners = [worker for worker, seat in zip(workers, minted.roster, strict=True) if seat.joins]
    if joiners:
        counted = [change.put(joiner, unformed=joiner.unformed + 1) for joiner in joiners]
        return [joiner for joiner in counted if joiner.unformed >= MOST_UNFORMED]
    change.set(unformed=(change.state.unformed + 1) % MOST_UNFORMED)
    del workers[minted.source]
    return [] if change.state.unformed else [max(workers, key=lambda worker: int(worker.id.removeprefix("w")))]


def _why(minted: Minted) -> str:
    return (
        f"generation {minted.generation} did not form with it, nor did one before, and nobody was lost: see the "
        f"workers' logs. Its place stays empty until somebody resizes the job"
    )
