"""How members arrived, and what follows from it."""

from collections.abc import Sequence

from unisono.membership.messages import Arrived, Minted, Seat
from unisono.membership.state.state import Agent, Worker


def arrival(member: Worker) -> Arrived:
    """How this member has arrived."""
    assert member.arrived is not None
    return member.arrived


def holds_state(member: Worker, minted: Minted) -> bool:
    """Whether it has a state to go on from: it is no joiner that was still to receive it."""
    seat = next(seat for seat in minted.roster if seat.worker == member.id)
    return not seat.joins or max(1, minted.roster[minted.source].acts) <= arrival(member).acts


def are_steady(holders: Sequence[Worker]) -> bool:
    """Whether all stand at one and the same boundary."""
    places = {(arrival(member).acts, arrival(member).loop) for member in holders}
    return len(places) == 1 and all(arrival(member).at_boundary for member in holders)


def newest(staying: Sequence[Worker], holders: Sequence[Worker]) -> int:
    """The first rank, among those that stay, whose state is the newest."""
    ranks = [rank for rank, member in enumerate(staying) if member in holders]
    return max(ranks, key=lambda rank: arrival(staying[rank]).acts)


def survivor(member: Worker, agent: Agent, holds: bool) -> Seat:
    """A member's place in the next roster."""
    found = arrival(member)
    acts = found.acts if holds else 0
    return _seat(member, agent, found.address, acts=acts, joins=not holds)


def newcomer(worker: Worker, agent: Agent, joins: bool) -> Seat:
    """The place of a worker that was in none."""
    return _seat(worker, agent, worker.address, acts=0, joins=joins)


def _seat(worker: Worker, agent: Agent, address: str, acts: int, joins: bool) -> Seat:
    return Seat(
        worker=worker.id,
        host=worker.host,
        address=address,
        acts=acts,
        joins=joins,
        agent=agent.id,
        probes=agent.probes,
    )
