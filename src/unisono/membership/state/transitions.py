"""The transitions from one state to the next: the effect of an event, and what follows from it."""

from dataclasses import replace

from unisono.membership.agent_messages import Start
from unisono.membership.messages import JobOver, NewGeneration, Seat
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
from unisono.membership.state.deadline import excused, hangs
from unisono.membership.state.event import Action, Event, Forget
from unisono.membership.state.events import hear
from unisono.membership.state.reach import keep_in_reach
from unisono.membership.state.state import Signs, State, Worker
from unisono.membership.state.state_update import StateUpdate


def step(state: State, event: Event, now: float) -> tuple[State, tuple[Action, ...]]:
    """What becomes of a state by an event.

    Args:
        state: the state before the event.
        event: the event.
        now: the time of the event in seconds, not before that of the last event.

    Returns:
        the state after it, and what is to be done, in this order, once the state is where it outlasts the
        coordinator.
    """
    update = StateUpdate(excused(state, now), now)
    hear(update, event)
    settle(update)
    return update.state, tuple(update.actions)


LONGEST_DELAY_S = 30.0


def settle(update: StateUpdate) -> None:
    """Do what the state calls for."""
    for rule in (_give_up, keep_in_reach, _finish, _regroup, _dismiss, _start, _form_first, _announce, _close):
        if update.state.over is None:
            rule(update)


def _give_up(update: StateUpdate) -> None:
    """Whoever hangs is lost."""
    for worker in update.state.members:
        if hangs(update.state, worker):
            pulse = worker.signs.pulse
            where = "a collective call" if pulse.doing == "call" else "the script's own code, and others wait for it"
            update.lose(
                worker, f"it hangs: no progress for {pulse.still_s:.0f} s in {where} (see the stacks in its log)"
            )


def _finish(update: StateUpdate) -> None:
    """Whoever has finished has all that training comes to: the job is done when nobody is still on the way."""
    finished = update.state.finished
    if not finished or update.state.members:
        return
    if len({worker.digest for worker in finished}) > 1:
        found = ", ".join(f"{worker.id} {worker.digest[:12]}" for worker in finished)
        update.fail(f"the workers have finished with different weights: {found}")
    else:
        main = next(iter(update.state.ranks), "")
        names = tuple(worker.id for worker in finished)
        update.end("done", JobOver(digest=finished[0].digest, main=main, finished=names))


def _regroup(update: StateUpdate) -> None:
    """Form the next generation when all members that are left have arrived.

    Somebody comes or goes only where all stand at one boundary; elsewhere the survivors go on as they are, to the
    next boundary. Who computes wrong results goes wherever the others stand.
    """
    current, members = update.state.minted, update.state.members
    if current is None or any(member.phase != "arrived" or not member.signs.connected for member in members):
        return
    faulty = [member for member in members if member.is_faulty]
    members = tuple(member for member in members if not member.is_faulty)
    holders = [member for member in members if holds_state(member, current)]
    if not holders:
        _start_over(update)
        return
    steady = are_steady(holders) and not update.state.finished
    if steady and all(member.leaving for member in members):
        _preempt(update, holders)
        return
    excluded = exclude_unconnected(update, current, holders)
    members = tuple(member for member in members if member.id not in excluded)
    size = update.state.size
    staying = [member for member in members if not member.leaving][:size] if steady else []
    if not any(member in holders for member in staying):
        staying = list(members)  # who holds the weights goes once somebody else has them
    source = newest(staying, holders)
    loop = arrival(staying[source]).loop
    joiners = [worker for worker in _ready(update.state) if worker.loop == loop and not worker.leaving]
    joiners = joiners[: max(0, size - len(staying))] if steady else []
    agents = update.state.agents
    seats = [survivor(member, agents[member.agent], member in holders) for member in staying]
    seats += [newcomer(joiner, agents[joiner.agent], joins=True) for joiner in joiners]
    _form(update, seats, source, loop)
    for member in faulty:
        update.remove(member, "it computes wrong results")
    for member in members:
        if member not in staying:
            why = "it was asked to leave" if member.leaving else f"the job goes on with {size} workers"
            update.remove(member, why)


def _ready(state: State) -> list[Worker]:
    """Candidates that can be taken in, first come, first served."""
    ready = (worker for worker in state.candidates if worker.phase == "ready" and worker.signs.connected)
    return sorted((worker for worker in ready if not state.agents[worker.agent].untried), key=lambda one: one.turn)


def _preempt(update: StateUpdate, holders: list[Worker]) -> None:
    for member in update.state.members:  # a joiner that was still to receive the weights must not write them
        update.remove(member, "all were asked to leave", preempted=member in holders)
    update.set(preempting=True, minted=None, due_since=None, arrival=None, lost=(), broken=False)


def _start_over(update: StateUpdate) -> None:
    """Nobody is left who holds the weights: new workers go on from the newest checkpoint."""
    update.note("starts over", generation=update.state.generation, because=update.state.blame)
    for worker in update.state.members + update.state.candidates:
        if worker.phase != "asked":  # it stands where only those that are lost could have helped it
            update.remove(worker, "all others are lost, and the job starts over")
    update.set(minted=None, loop=None, due_since=None, arrival=None, lost=(), broken=False)
    update.actions.append(Forget())


def _dismiss(update: StateUpdate) -> None:
    """Remove candidates that are not needed."""
    for worker in update.state.candidates:
        if worker.leaving or update.state.preempting:
            update.remove(worker, "it was asked to leave")
    surplus = max(0, len(update.state.staying) - update.state.size)
    for worker in update.state.candidates[::-1][:surplus]:
        update.remove(worker, f"the job goes on with {update.state.size} workers")


def _start(update: StateUpdate) -> None:
    """Ask for as many workers as are missing, where there is room."""
    _reopen(update)
    state = update.state
    if state.stopping or state.preempting or state.finished:
        return
    missing = state.size - state.unreplaced - len(state.staying)
    delay_s = 0.0 if state.quick < 2 else min(LONGEST_DELAY_S, 0.5 * 2.0 ** min(state.quick - 2, 30))
    signs = Signs(at=update.now, started=update.now + delay_s, since=update.now)
    for agent in state.agents.values():
        room = agent.places - len(update.workers_of(agent.id))
        count = min(missing, room)
        if count <= 0 or agent.untried or not agent.signs.connected:
            continue
        last = update.state.last_worker
        names = tuple(f"w{number}" for number in range(last + 1, last + 1 + count))
        new = {name: Worker(name, agent.id, host=agent.host, signs=signs) for name in names}
        update.set(workers={**update.state.workers, **new}, last_worker=last + count)
        update.tell_agent(agent.id, Start(workers=names, delay_s=delay_s))
        update.note("asked for", workers=list(names), host=agent.host, delay_s=delay_s)
        missing -= count


def _reopen(update: StateUpdate) -> None:
    """Places of workers that were asked to leave are filled again when training could not even begin without."""
    state = update.state
    if state.minted is None and sum(agent.places for agent in state.agents.values()) < state.settings.smallest:
        update.fill_again()


def _form_first(update: StateUpdate) -> None:
    """Form a first generation, when enough are ready and nobody is awaited."""
    state, needed = update.state, update.state.settings.smallest
    if state.minted is not None or state.preempting or state.stopping:
        return
    if 0 < state.shards < needed:
        update.fail(f"at least {needed} workers are to train, but the job has only {state.shards} shards")
        return
    ready = [worker for worker in state.candidates if worker in _ready(state)]
    if len(ready) >= needed and len(ready) == len(state.candidates):
        seats = [newcomer(worker, state.agents[worker.agent], joins=False) for worker in ready]
        _form(update, seats, source=0, loop=None)
    elif len(state.candidates) < needed and state.size - state.unreplaced < needed:
        update.fail(f"no restarts are left, and fewer than the {needed} workers needed; lost last: {state.blame}")


def _form(update: StateUpdate, seats: list[Seat], source: int, loop: int | None) -> None:
    before, number = update.state, update.state.generation + 1
    split = split_for(before.shards, [before.workers[seat.worker] for seat in seats])
    new = NewGeneration(
        generation=number,
        roster=tuple(seats),
        bounds=split.bounds,
        source=source,
        loop=loop,
        departures=before.departures,
    )
    update.actions.append(Forget(number))
    for seat in seats:
        worker = before.workers[seat.worker]
        signs = replace(worker.signs, at=update.now, pulse=worker.signs.pulse.model_copy(update={"still_s": 0.0}))
        update.tell(update.put(worker, phase="working", arrived=None, signs=signs), new)
    update.set(generation=number, minted=new, minted_at=update.now, loop=loop, due_since=None, arrival=None)
    update.set(lost=(), broken=False, formed=(), seconds={}, turns_seen=before.last_turn)
    update.note(
        "minted",
        generation=number,
        workers=[seat.worker for seat in seats],
        joined=[seat.worker for seat in seats if seat.joins or before.minted is None],
        lost=[name for name in before.lost if name not in {worker.id for worker in before.candidates}],
        source=seats[source].worker,
        shards=[len(split.of(rank)) for rank in range(split.workers)],
        seconds=0.0 if before.due_since is None else round(update.now - before.due_since, 3),
    )


def _announce(update: StateUpdate) -> None:
    """A new generation is due when somebody wants in or out, there are too many, or shards could be split better."""
    members = update.state.members
    if not members or update.state.finished:
        return
    staying = [member for member in members if not member.leaving]
    joins = any(_is_wanted(update.state, worker) for worker in _ready(update.state))
    if len(staying) < len(members) or len(staying) > update.state.size or joins or is_unbalanced(update.state):
        update.call_members()


def _is_wanted(state: State, joiner: Worker) -> bool:
    """Whether the members should stop for a joiner, which is probably in the same loop."""
    if joiner.loop is None or state.loop is None or joiner.loop == state.loop:
        return joiner.loop is not None
    # It goes past a loop once that is over, so it may know better. If it did not, they do not stop for it again.
    return joiner.loop > state.loop and joiner.turn > state.turns_seen


def _close(update: StateUpdate) -> None:
    """Let go who was asked to leave: the whole job, or an agent."""
    state, agents = update.state, update.state.agents.values()
    everybody = state.preempting or state.stopping or (bool(agents) and all(agent.leaving for agent in agents))
    if everybody and not state.workers:
        update.end("preempted", JobOver(preempted=True, reason="all were asked to leave"))
        return
    for agent in agents:
        if agent.leaving and not agent.left and not update.workers_of(agent.id):
            update.put_agent(agent, left=True)
            update.tell_agent(agent.id, JobOver(preempted=True, reason="this agent was asked to leave"))
            update.note("agent left", agent=agent.id, host=agent.host)
