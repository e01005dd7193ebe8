"""The transitions from one state to the next: the effect of an event, and what follows from it."""

from collections.abc import Mapping, Sequence, Set
from statistics import median

from rpds import HashTrieSet

from unisono.membership.messages import Arrived, JobOver, Start
from unisono.membership.state.event import Action, Event, Forget, Restarted, Tick
from unisono.membership.state.events import hear
from unisono.membership.state.questions import excused, hangs, next_tick
from unisono.membership.state.reach import forget_agent, keep_in_reach
from unisono.membership.state.roster import MintedGeneration, Seat
from unisono.membership.state.state import CANDIDATE, MEMBER, Agent, Signs, State, Worker, changed
from unisono.membership.state.state_update import StateUpdate
from unisono.membership.state.table import LayeredMap
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
    messages = _different([arrivals[member.id] for member in holders])
    places = {(message.acts, message.loop) for message in messages}
    return len(places) == 1 and all(message.at_boundary for message in messages)


def _different(arrived: Sequence[Arrived]) -> list[Arrived]:
    """Each message once: those that arrive together have the same."""
    return [*{id(message): message for message in arrived}.values()]


def newest(staying: Sequence[Worker], holding: Set[str], arrivals: Arrivals) -> int:
    """The first rank, among those that stay, whose state is the newest."""
    acts = [arrivals[member.id].acts if member.id in holding else -1 for member in staying]
    return acts.index(max(acts))


def survivor(member: Worker, agent: Agent, arrived: Arrived, holds: bool) -> Seat:
    """The place of a member that has arrived in the next roster."""
    acts = arrived.acts if holds else 0
    return Seat(member.id, member.host, arrived.address, acts, not holds, agent.id, agent.probes)


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

    New ones are taken to be like the others.
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

    All members have arrived. At least one of those that hold the weights stays. Whoever is excluded is returned.
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
    workers = [state.workers.get(seat.worker) for seat in current.roster]
    return len(workers) > 1 and all(worker is not None and worker.phase in (*CANDIDATE, *MEMBER) for worker in workers)


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


# A step, and the rules.


def step(state: State, event: Event, now: float) -> tuple[State, tuple[Action, ...]]:
    """The state that an event makes of a state, and the actions that follow.

    Actions are to be done in this order, once the new state is where it outlasts the coordinator. The time is in
    seconds, and not before that of the last event.
    """
    update = StateUpdate(excused(state, now), now)
    hear(update, event)
    settle(update)
    update.note_signs()
    if update.state.tick_at is None or isinstance(event, Tick | Restarted):
        update.set(tick_at=next_tick(update.state, now))
    return update.finish()


LONGEST_DELAY_S = 30.0


def settle(update: StateUpdate) -> None:
    """Do what the state calls for."""
    reach, form = (_give_up, keep_in_reach), (_finish, _regroup, _dismiss, _start, _form_first, _announce, _close)
    for rule in (*reach, *form, keep_in_reach):  # again, for those that have come or gone
        if update.state.over is None:
            rule(update)


def _give_up(update: StateUpdate) -> None:
    """Whoever hangs is lost."""
    state = update.state
    # Only what a worker says of itself can make it hang, or the first that waits for others.
    begins = state.workers.count("waits") > 0 == update.before.workers.count("waits")
    news = state.members if begins else [state.workers[name] for name in update.heard if name in state.workers]
    for worker in news:
        if hangs(update.state, worker):
            pulse = worker.signs.pulse
            where = "a collective call" if pulse.doing == "call" else "the script's own code, and others wait for it"
            update.lose(
                worker, f"it hangs: no progress for {pulse.still_s:.0f} s in {where} (see the stacks in its log)"
            )


def _finish(update: StateUpdate) -> None:
    """Whoever has finished has all that training comes to: the job is done when nobody is still on the way."""
    if not update.state.workers.number(("finished",)) or update.state.workers.number(MEMBER):
        return
    finished = update.state.finished
    if update.state.minted is None and update.state.workers.number(CANDIDATE):  # nobody has trained
        if update.state.workers.number(("ready",)):
            update.fail(update.blame(finished[0], "its script ended before the others'"))
    elif len({worker.digest for worker in finished}) > 1:
        digests = ", ".join(f"{worker.id} {worker.digest[:12]}" for worker in finished)
        update.fail(f"the workers have finished with different weights: {digests}")
    else:
        roster = () if update.state.minted is None else update.state.minted.roster
        main, main_agent = next(((seat.worker, seat.agent) for seat in roster), ("", ""))
        names = tuple(worker.id for worker in finished)
        agents = tuple(dict.fromkeys(worker.agent for worker in finished))
        over = JobOver(digest=finished[0].digest, main=main, main_agent=main_agent, finished=names, agents=agents)
        update.end("done", over)


def _regroup(update: StateUpdate) -> None:
    """Form the next generation when all members that are left have arrived.

    Somebody comes or goes only where all stand at one boundary; elsewhere the survivors go on as they are, to the
    next boundary. Who computes wrong results goes wherever the others stand.
    """
    current, workers = update.state.minted, update.state.workers
    arrived = len(update.state.arrivals)
    if current is None or workers.number(MEMBER) > arrived or workers.number(MEMBER, connected=False):
        return
    members, arrivals = update.state.members, update.state.arrivals.plain()
    faulty = [member for member in members if member.is_faulty]
    members = tuple(member for member in members if not member.is_faulty)
    holders = holders_among(members, current, arrivals)
    if not holders:
        _start_over(update)
        return
    steady = are_steady(holders, arrivals) and not workers.number(("finished",))
    if steady and all(member.leaving for member in members):
        _preempt(update, holders)
        return
    excluded = exclude_unconnected(update, current, holders)
    members = tuple(member for member in members if member.id not in excluded)
    size = update.state.size
    staying = [member for member in members if not member.leaving][:size] if steady else []
    holding = {member.id for member in holders}
    if not any(member.id in holding for member in staying):
        staying = list(members)  # who holds the weights goes once somebody else has them
    source = newest(staying, holding, arrivals)
    loop = arrivals[staying[source].id].loop
    joiners = [worker for worker in _ready(update.state) if worker.loop == loop and not worker.leaving]
    joiners = joiners[: max(0, size - len(staying))] if steady else []
    agents = update.state.agents
    theirs = {agent: agents[agent] for agent in {member.agent for member in staying}}
    seats = [survivor(member, theirs[member.agent], arrivals[member.id], member.id in holding) for member in staying]
    seats += [newcomer(joiner, agents[joiner.agent], joins=True) for joiner in joiners]
    _form(update, seats, source, loop)
    for member in faulty:
        update.remove(member, "it computes wrong results")
    seated = {member.id for member in staying}
    for member in members:
        if member.id not in seated:
            why = "it was asked to leave" if member.leaving else f"the job goes on with {size} workers"
            update.remove(member, why)


def _ready(state: State) -> list[Worker]:
    """Candidates that can be taken in, first come, first served."""
    ready = state.workers.those(("ready",), connected=True)
    return sorted(
        (worker for worker in ready if not state.agents[worker.agent].probing), key=lambda worker: worker.turn
    )


def _preempt(update: StateUpdate, holders: list[Worker]) -> None:
    for member in update.state.members:  # a joiner that was still to receive the weights must not write them
        update.remove(member, "all were asked to leave", preempted=member in holders)
    update.set(preempting=True, minted=None, due_since=None, arrival=None, lost=(), broken=False)


def _start_over(update: StateUpdate) -> None:
    """Nobody is left who holds the weights: new workers go on from the newest checkpoint."""
    update.note("starts over", generation=update.state.generation, because=update.state.blame)
    for worker in (*update.state.members, *update.state.candidates):
        if worker.phase != "asked":  # it stands where only those that are lost could have helped it
            update.remove(worker, "all others are lost, and the job starts over")
    update.set(minted=None, loop=None, due_since=None, arrival=None, lost=(), broken=False)
    update.actions.append(Forget())


def _dismiss(update: StateUpdate) -> None:
    """Remove candidates that are not needed."""
    for worker in update.state.workers.those(CANDIDATE, leaving=None if update.state.preempting else True):
        update.remove(worker, "it was asked to leave")
    surplus = update.state.staying - update.state.size
    for worker in update.state.candidates[::-1][:surplus] if surplus > 0 else ():
        update.remove(worker, f"the job goes on with {update.state.size} workers")


def _start(update: StateUpdate) -> None:
    """Ask for as many workers as are missing, where there is room."""
    _reopen(update)
    state = update.state
    missing = state.size - state.unreplaced - state.staying
    if missing <= 0 or state.stopping or state.preempting or state.workers.number(("finished",)):
        return
    # The exponent is bounded: 2.0 to the power of very many failures would be an OverflowError.
    delay_s = 0.0 if state.quick < 2 else min(LONGEST_DELAY_S, 0.5 * 2.0 ** min(state.quick - 2, 30))
    signs = Signs(started=update.now + delay_s, since=update.now)
    for agent in state.agents.marked("free"):
        count = min(missing, agent.places - agent.started)
        if count <= 0:
            break
        last = update.state.last_worker
        names = tuple(f"w{number}" for number in range(last + 1, last + 1 + count))
        update.ask_for(agent, [Worker(name, agent.id, host=agent.host, signs=signs) for name in names])
        update.set(last_worker=last + count)
        update.tell_agent(agent.id, Start(workers=names, delay_s=delay_s))
        update.note("asked for", workers=list(names), host=agent.host, delay_s=delay_s)
        missing -= count


def _reopen(update: StateUpdate) -> None:
    """Places of workers that were asked to leave are filled again when training could not even begin without."""
    state = update.state
    if state.minted is None and state.agents.weight < state.settings.smallest:
        update.fill_again()


def _form_first(update: StateUpdate) -> None:
    """Form a first generation, when enough are ready and nobody is awaited."""
    state, needed = update.state, update.state.settings.smallest
    if state.minted is not None or state.preempting or state.stopping:
        return
    if 0 < state.shards < needed:
        shards = f"{state.shards} shard{'s' if state.shards > 1 else ''}"
        update.fail(f"at least {needed} workers are to train, but the job has only {shards}")
        return
    candidates = state.workers.number(CANDIDATE)
    all_ready = state.workers.number(("ready",), connected=True) == candidates
    if candidates >= needed and all_ready and len(_ready(state)) == candidates:
        seats = [newcomer(worker, state.agents[worker.agent], joins=False) for worker in state.candidates]
        _form(update, seats, source=0, loop=None)
    elif candidates < needed and state.size - state.unreplaced < needed:
        update.fail(f"no restarts are left, and fewer than the {needed} workers needed; lost last: {state.blame}")


def _form(update: StateUpdate, seats: list[Seat], source: int, loop: int | None) -> None:
    before, number = update.state, update.state.generation + 1
    workers = before.workers.of_ids([seat.worker for seat in seats])
    split = split_for(before.shards, workers)
    new = MintedGeneration(
        generation=number,
        roster=tuple(seats),
        bounds=split.bounds,
        source=source,
        loop=loop,
        departures=before.departures,
    )
    update.actions.append(Forget(number))
    update.set(arrivals=LayeredMap(), formed_by=HashTrieSet())
    update.hear_of([seat.worker for seat in seats])
    with update.in_bulk():
        for worker in [worker for worker in workers if worker.phase not in MEMBER or worker.signs.pulse.still_s]:
            pulse = worker.signs.pulse.model_copy(update={"still_s": 0.0})
            update.put(worker, phase="working", signs=changed(worker.signs, pulse=pulse))
    for names, message in new.messages(before.minted, before.arrivals):
        update.tell_all(names, message)
    update.moved.add(seats[0].agent)  # others than before may hold the weights, by which it is decided who is left out
    candidates = {worker.id for worker in before.candidates} if before.lost else ()
    update.set(generation=number, minted=new, judged_at=update.now, loop=loop)
    update.set(due_since=None, arrival=None, turns_seen=before.last_turn)
    update.set(lost=(), broken=False, formed=False, seconds={})
    joined = [worker for worker, seat in zip(workers, seats, strict=True) if seat.joins or before.minted is None]
    update.note(
        "minted",
        generation=number,
        workers=[seat.worker for seat in seats],
        joined=[worker.id for worker in joined],
        ready=[round(worker.signs.since - worker.signs.started, 3) for worker in joined],
        lost=[name for name in before.lost if name not in candidates],
        source=seats[source].worker,
        shards=split.counts,
        seconds=0.0 if before.due_since is None else round(update.now - before.due_since, 3),
    )


def _announce(update: StateUpdate) -> None:
    """A new generation is due when somebody wants in or out, there are too many, or shards could be split better."""
    state, workers = update.state, update.state.workers
    members = workers.number(MEMBER)
    if not members or state.due_since is not None or workers.number(("finished",)):
        return
    leaving = workers.number(MEMBER, leaving=True)
    joins = any(_is_wanted(state, worker) for worker in _ready(state))
    if leaving or members > state.size or joins or _judge(update):
        update.call_members()


def _judge(update: StateUpdate) -> bool:
    """Whether shards could be split better; looked at from time to time."""
    if update.now < update.state.judged_at + SETTLED_S:
        return False
    update.set(judged_at=update.now)
    return is_unbalanced(update.state)


def _is_wanted(state: State, joiner: Worker) -> bool:
    """Whether the members should stop for a joiner, which is probably in the same loop."""
    if joiner.loop is None or state.loop is None or joiner.loop == state.loop:
        return joiner.loop is not None
    # It goes past a loop once that is over, so it may know better. If it did not, they do not stop for it again.
    return joiner.loop > state.loop and joiner.turn > state.turns_seen


def _close(update: StateUpdate) -> None:
    """Let go who was asked to leave: the whole job, or an agent."""
    state, agents = update.state, update.state.agents
    everybody = state.preempting or state.stopping or (bool(agents) and not agents.count("stays"))
    if everybody and not state.workers:
        update.end("preempted", JobOver(preempted=True, reason="all were asked to leave"))
        return
    for agent in agents.marked("leaving"):
        if not agent.started:
            update.put_agent(agent, left=True)
            forget_agent(update, agent.id)
            update.tell_agent(agent.id, JobOver(preempted=True, reason="this agent was asked to leave"))
            update.note("agent left", agent=agent.id, host=agent.host)
