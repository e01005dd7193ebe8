"""From one state to the next: what an event does, and what follows from the state that it makes."""

from dataclasses import replace

from unisono.membership.messages import JobOver, NewGeneration, Seat, Start
from unisono.membership.state.arrival import (
    are_steady,
    arrival,
    exclude_unconnected,
    holds_state,
    is_unbalanced,
    newcomer,
    newest,
    split_for,
    survivor,
)
from unisono.membership.state.change import Change
from unisono.membership.state.deadline import excused, hangs
from unisono.membership.state.event import Action, Event, Forget
from unisono.membership.state.events import hear
from unisono.membership.state.reach import keep_in_reach
from unisono.membership.state.state import Signs, State, Worker


def step(state: State, event: Event, now: float) -> tuple[State, tuple[Action, ...]]:
    """What becomes of a state by an event.

    Args:
        state: before it.
        event: the event.
        now: its time in seconds, not before the last event.

    Returns:
        the state after it, and what is to be done, in this order, once the state is where it outlasts the
        coordinator.
    """
    change = Change(excused(state, now), now)
    hear(change, event)
    settle(change)
    return change.state, tuple(change.actions)


LONGEST_DELAY_S = 30.0


def settle(change: Change) -> None:
    """Do what the state calls for."""
    for rule in (_give_up, keep_in_reach, _finish, _regroup, _dismiss, _start, _form, _announce, _close):
        if change.state.over is None:
            rule(change)


def _give_up(change: Change) -> None:
    """Whoever hangs is lost."""
    for worker in change.state.members:
        if hangs(change.state, worker):
            pulse = worker.signs.pulse
            where = "a collective call" if pulse.doing == "call" else "the script's own code, and others wait for it"
            change.lose(
                worker, f"it hangs: no progress for {pulse.still_s:.0f} s in {where} (see the stacks in its log)"
            )


def _finish(change: Change) -> None:
    """Whoever has finished has all that training comes to: the job is done when nobody is still on the way."""
    finished = change.state.finished
    if not finished or change.state.members:
        return
    if len({worker.digest for worker in finished}) > 1:
        found = ", ".join(f"{worker.id} {worker.digest[:12]}" for worker in finished)
        change.fail(f"the workers have finished with different weights: {found}")
    else:
        main = next(iter(change.state.ranks), "")
        names = tuple(worker.id for worker in finished)
        change.end("done", JobOver(digest=finished[0].digest, main=main, finished=names))


def _regroup(change: Change) -> None:
    """Mint the next generation when all members that are left have arrived.

    Somebody comes or goes only where all stand at one boundary; elsewhere the survivors go on as they are, to the
    next boundary. Who computes wrong results goes wherever the others stand.
    """
    minted, members = change.state.minted, change.state.members
    if minted is None or any(member.phase != "arrived" or not member.signs.connected for member in members):
        return
    faulty = [member for member in members if member.is_faulty]
    members = tuple(member for member in members if not member.is_faulty)
    holders = [member for member in members if holds_state(member, minted)]
    if not holders:
        _start_over(change)
        return
    steady = are_steady(holders) and not change.state.finished
    if steady and all(member.leaving for member in members):
        _preempt(change, holders)
        return
    excluded = exclude_unconnected(change, minted, holders)
    members = tuple(member for member in members if member.id not in excluded)
    size = change.state.size
    staying = [member for member in members if not member.leaving][:size] if steady else []
    if not any(member in holders for member in staying):
        staying = list(members)  # who holds the weights goes once somebody else has them
    source = newest(staying, holders)
    loop = arrival(staying[source]).loop
    joiners = [worker for worker in _ready(change.state) if worker.loop == loop and not worker.leaving]
    joiners = joiners[: max(0, size - len(staying))] if steady else []
    agents = change.state.agents
    seats = [survivor(member, agents[member.agent], member in holders) for member in staying]
    seats += [newcomer(joiner, agents[joiner.agent], joins=True) for joiner in joiners]
    _mint(change, seats, source, loop)
    for member in faulty:
        change.remove(member, "it computes wrong results")
    for member in members:
        if member not in staying:
            why = "it was asked to leave" if member.leaving else f"the job goes on with {size} workers"
            change.remove(member, why)


def _ready(state: State) -> list[Worker]:
    """Candidates that can be taken in, first come, first served."""
    ready = (worker for worker in state.candidates if worker.phase == "ready" and worker.signs.connected)
    return sorted((worker for worker in ready if not state.agents[worker.agent].untried), key=lambda one: one.turn)


def _preempt(change: Change, holders: list[Worker]) -> None:
    for member in change.state.members:  # a joiner that was still to receive the weights must not write them
        change.remove(member, "all were asked to leave", preempted=member in holders)
    change.set(preempting=True, minted=None, due_since=None, arrival=None, lost=(), broken=False)


def _start_over(change: Change) -> None:
    """Nobody is left who holds the weights: new workers go on from the newest checkpoint."""
    change.note("starts over", generation=change.state.generation, because=change.state.blame)
    for worker in change.state.members + change.state.candidates:
        if worker.phase != "asked":  # it stands where only those that are lost could have helped it
            change.remove(worker, "all others are lost, and the job starts over")
    change.set(minted=None, loop=None, due_since=None, arrival=None, lost=(), broken=False)
    change.actions.append(Forget())


def _dismiss(change: Change) -> None:
    """Remove candidates that are not needed."""
    for worker in change.state.candidates:
        if worker.leaving or change.state.preempting:
            change.remove(worker, "it was asked to leave")
    surplus = max(0, len(change.state.staying) - change.state.size)
    for worker in change.state.candidates[::-1][:surplus]:
        change.remove(worker, f"the job goes on with {change.state.size} workers")


def _start(change: Change) -> None:
    """Ask for as many workers as are missing, where there is room."""
    _reopen(change)
    state = change.state
    if state.stopping or state.preempting or state.finished:
        return
    missing = state.size - state.unreplaced - len(state.staying)
    delay_s = 0.0 if state.quick < 2 else min(LONGEST_DELAY_S, 0.5 * 2.0 ** min(state.quick - 2, 30))
    signs = Signs(at=change.now, started=change.now + delay_s, since=change.now)
    for agent in state.agents.values():
        room = agent.places - len(change.workers_of(agent.id))
        count = min(missing, room)
        if count <= 0 or agent.untried or not agent.signs.connected:
            continue
        last = change.state.last_worker
        names = tuple(f"w{number}" for number in range(last + 1, last + 1 + count))
        new = {name: Worker(name, agent.id, host=agent.host, signs=signs) for name in names}
        change.set(workers={**change.state.workers, **new}, last_worker=last + count)
        change.tell_agent(agent.id, Start(workers=names, delay_s=delay_s))
        change.note("asked for", workers=list(names), host=agent.host, delay_s=delay_s)
        missing -= count


def _reopen(change: Change) -> None:
    """Places of workers that were asked to leave are filled again when training could not even begin without."""
    state = change.state
    if state.minted is None and sum(agent.places for agent in state.agents.values()) < state.settings.smallest:
        for agent in state.agents.values():
            change.put_agent(agent, given_up=0)


def _form(change: Change) -> None:
    """Mint a first generation, when enough are ready and nobody is awaited."""
    state, needed = change.state, change.state.settings.smallest
    if state.minted is not None or state.preempting or state.stopping:
        return
    if 0 < state.shards < needed:
        change.fail(f"at least {needed} workers are to train, but the job has only {state.shards} shards")
        return
    ready = [worker for worker in state.candidates if worker in _ready(state)]
    if len(ready) >= needed and len(ready) == len(state.candidates):
        seats = [newcomer(worker, state.agents[worker.agent], joins=False) for worker in ready]
        _mint(change, seats, source=0, loop=None)
    elif len(state.candidates) < needed and state.size - state.unreplaced < needed:
        change.fail(f"no restarts are left, and fewer than the {needed} workers needed; lost last: {state.blame}")


def _mint(change: Change, seats: list[Seat], source: int, loop: int | None) -> None:
    before, number = change.state, change.state.generation + 1
    split = split_for(before.shards, [before.workers[seat.worker] for seat in seats])
    minted = NewGeneration(
        generation=number,
        roster=tuple(seats),
        bounds=split.bounds,
        source=source,
        loop=loop,
        departures=before.departures,
    )
    change.actions.append(Forget(number))
    for seat in seats:
        worker = before.workers[seat.worker]
        signs = replace(worker.signs, at=change.now, pulse=worker.signs.pulse.model_copy(update={"still_s": 0.0}))
        change.tell(change.put(worker, phase="working", arrived=None, signs=signs), minted)
    change.set(generation=number, minted=minted, minted_at=change.now, loop=loop, due_since=None, arrival=None)
    change.set(lost=(), broken=False, formed=(), seconds={}, turns_seen=before.last_turn)
    change.note(
        "minted",
        generation=number,
        workers=[seat.worker for seat in seats],
        joined=[seat.worker for seat in seats if seat.joins or before.minted is None],
        lost=[name for name in before.lost if name not in {worker.id for worker in before.candidates}],
        source=seats[source].worker,
        shards=[len(split.of(rank)) for rank in range(split.workers)],
        seconds=0.0 if before.due_since is None else round(change.now - before.due_since, 3),
    )


def _announce(change: Change) -> None:
    """A new generation is due when somebody wants in or out, there are too many, or shards could be split better."""
    members = change.state.members
    if not members or change.state.finished:
        return
    staying = [member for member in members if not member.leaving]
    joins = any(_is_wanted(change.state, worker) for worker in _ready(change.state))
    if len(staying) < len(members) or len(staying) > change.state.size or joins or is_unbalanced(change.state):
        change.call_members()


def _is_wanted(state: State, joiner: Worker) -> bool:
    """Whether the members should stop for a joiner, which is probably in the same loop."""
    if joiner.loop is None or state.loop is None or joiner.loop == state.loop:
        return joiner.loop is not None
    # It goes past a loop once that is over, so it may know better. If it did not, they do not stop for it again.
    return joiner.loop > state.loop and joiner.turn > state.turns_seen


def _close(change: Change) -> None:
    """Let go who was asked to leave: the whole job, or an agent."""
    state, agents = change.state, change.state.agents.values()
    everybody = state.preempting or state.stopping or (bool(agents) and all(agent.leaving for agent in agents))
    if everybody and not state.workers:
        change.end("preempted", JobOver(preempted=True, reason="all were asked to leave"))
        return
    for agent in agents:
        if agent.leaving and not agent.left and not change.workers_of(agent.id):
            change.put_agent(agent, left=True)
            change.tell_agent(agent.id, JobOver(preempted=True, reason="this agent was asked to leave"))
            change.note("agent left", agent=agent.id, host=agent.host)
