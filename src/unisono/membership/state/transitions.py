"""The transitions from one state to the next: an event is applied, and then rules look at the state."""

from collections.abc import Mapping, Sequence, Set
from statistics import median

from rpds import HashTrieSet

from unisono.membership.messages import Arrived, JobOver, Start
from unisono.membership.state.event import Action, DropKeys, Event, Restarted, Tick
from unisono.membership.state.events import apply_event
from unisono.membership.state.member_table import LayeredMap
from unisono.membership.state.questions import hangs, next_tick, with_late_deadlines
from unisono.membership.state.reach import drop_probe_results, leave_out_unreachable
from unisono.membership.state.roster import MintedGeneration, Seat
from unisono.membership.state.state import CANDIDATE, MEMBER, Agent, Signs, State, Worker, changed
from unisono.membership.state.state_update import StateUpdate
from unisono.plan.split import Split

Arrivals = Mapping[str, Arrived]
"""The message with which each member has arrived, by its id."""


def holders_among(members: Sequence[Worker], current: MintedGeneration, arrivals: Arrivals) -> list[Worker]:
    """The members that hold the training's state: all but joiners that have not received it yet."""
    joiners = {seat.worker for seat in current.roster if seat.joins}
    least = max(1, current.roster[current.source].acts)
    return [member for member in members if member.id not in joiners or least <= arrivals[member.id].acts]


def are_steady(holders: Sequence[Worker], arrivals: Arrivals) -> bool:
    """Whether all of these members stand at the same boundary."""
    messages = _distinct([arrivals[member.id] for member in holders])
    places = {(message.acts, message.loop) for message in messages}
    return len(places) == 1 and all(message.at_boundary for message in messages)


def _distinct(arrived: Sequence[Arrived]) -> list[Arrived]:
    """Each message once: workers that arrive together share one object."""
    return [*{id(message): message for message in arrived}.values()]


def newest(staying: Sequence[Worker], holding: Set[str], arrivals: Arrivals) -> int:
    """The index of the first of these members whose state is the newest."""
    acts = [arrivals[member.id].acts if member.id in holding else -1 for member in staying]
    return acts.index(max(acts))


def survivor_seat(member: Worker, agent: Agent, arrived: Arrived, holds: bool) -> Seat:
    """The seat in the next roster of a member that has arrived."""
    acts = arrived.acts if holds else 0
    return Seat(member.id, member.host, arrived.address, acts, not holds, agent.id, agent.probes)


def new_seat(worker: Worker, agent: Agent, joins: bool) -> Seat:
    """The seat in the next roster of a worker that was in no generation."""
    return Seat(worker.id, worker.host, worker.address, 0, joins, agent.id, agent.probes)


# How shards are split among workers of different speed.

WORTH = 1.2
"""An uneven split has to be faster than an even one, or than the present one, by this factor."""

SETTLED_S = 5.0
"""The seconds that a split is kept before it is judged: the speeds are measured only after some steps."""


def split_for(shards: int, workers: Sequence[Worker]) -> Split:
    """The split for these workers: even, unless their measured speeds differ much.

    A worker without a measured speed counts as a median one.
    """
    even = Split.even(shards, len(workers))
    measured = [worker.signs.pulse.shard_s for worker in workers if worker.signs.pulse.shard_s > 0]
    if not measured:
        return even
    seconds = [worker.signs.pulse.shard_s or median(measured) for worker in workers]
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


# Which members are excluded when members could not connect: with the same ones the next generation would fail, too.

MOST_UNFORMED = 2
"""The number of generations that fail to form with a suspected worker until it is excluded."""


def exclude_unconnected(update: StateUpdate, current: MintedGeneration, holders: Sequence[Worker]) -> frozenset[str]:
    """Exclude members whose hosts are left out, or else members suspected to keep generations from forming.

    All members have arrived. At least one of those that hold the weights stays. Returns the ids of excluded workers.
    """
    agents = update.state.agents
    out = [member for member in update.state.members if agents[member.agent].left_out] if agents.count("out") else []
    if _has_formed(update.state, current, holders):
        update.set(unformed=0)
    elif _is_whole(update.state, current):
        update.journal("not formed", generation=current.generation, workers=[seat.worker for seat in current.roster])
        out += [] if out else _suspects(update, current)
    for worker in out:
        agent = update.state.agents[worker.agent]
        if not agent.left_out:
            update.put_agent(agent, given_up=agent.given_up + 1)
        update.exclude(worker, agent.left_out or _unformed_reason(current))
    return frozenset(worker.id for worker in out)


def _has_formed(state: State, current: MintedGeneration, holders: Sequence[Worker]) -> bool:
    base = current.roster[current.source].acts
    return state.formed or any(state.arrivals[holder.id].acts > base for holder in holders)


def _is_whole(state: State, current: MintedGeneration) -> bool:
    """Whether the generation had several workers and lost none, so that only connections can have failed."""
    workers = [state.workers.get(seat.worker) for seat in current.roster]
    return len(workers) > 1 and all(worker is not None and worker.phase in (*CANDIDATE, *MEMBER) for worker in workers)


def _suspects(update: StateUpdate, current: MintedGeneration) -> list[Worker]:
    """The workers to exclude: joiners, or without joiners the member that came last; none the first time."""
    workers = [update.state.workers[seat.worker] for seat in current.roster]
    joiners = [worker for worker, seat in zip(workers, current.roster, strict=True) if seat.joins]
    if joiners:
        counted = [update.put(joiner, unformed=joiner.unformed + 1) for joiner in joiners]
        return [joiner for joiner in counted if joiner.unformed >= MOST_UNFORMED]
    update.set(unformed=(update.state.unformed + 1) % MOST_UNFORMED)
    del workers[current.source]
    return [] if update.state.unformed else [max(workers, key=lambda worker: int(worker.id.removeprefix("w")))]


def _unformed_reason(current: MintedGeneration) -> str:
    return (
        f"generation {current.generation} did not form with it, nor did one before, and nobody was lost: see the "
        f"workers' logs. Its place stays empty until somebody resizes the job"
    )


# A step, and the rules.


def step(state: State, event: Event, now: float) -> tuple[State, tuple[Action, ...]]:
    """Apply an event to a state, at a time in seconds that is not before that of the last event.

    Returns:
        the new state, and the actions to do in this order once the new state is saved.
    """
    update = StateUpdate(with_late_deadlines(state, now), now)
    apply_event(update, event)
    apply_rules(update)
    update.apply_signs()
    if update.state.tick_at is None or isinstance(event, Tick | Restarted):
        update.set(tick_at=next_tick(update.state, now))
    return update.finish()


LONGEST_DELAY_S = 30.0


def apply_rules(update: StateUpdate) -> None:
    """Apply every rule to the state, in order."""
    rules = (_finish, _regroup, _dismiss, _start, _form_first, _request_regroup, _release)
    # The rules may have changed who takes part: so the hosts that are left out are looked at before and after them.
    for rule in (_give_up_hanging, leave_out_unreachable, *rules, leave_out_unreachable):
        if update.state.over is None:
            rule(update)


def _give_up_hanging(update: StateUpdate) -> None:
    state = update.state
    # Whether a worker hangs changes only with its own pulse, or for all when a first worker waits for others.
    begins = state.workers.count("waits") > 0 == update.before.workers.count("waits")
    those_changed = [state.workers[name] for name in update.pulse_changed if name in state.workers]
    for worker in state.members if begins else those_changed:
        if hangs(update.state, worker):
            pulse = worker.signs.pulse
            where = "a collective call" if pulse.doing == "call" else "the script's own code, and others wait for it"
            update.lose(
                worker, f"it hangs: no progress for {pulse.still_s:.0f} s in {where} (see the stacks in its log)"
            )


def _finish(update: StateUpdate) -> None:
    """End the job when workers have finished and no member still trains: each finished worker has the whole result."""
    if not update.state.workers.count_in_phases(("finished",)) or update.state.workers.count_in_phases(MEMBER):
        return
    finished = update.state.finished
    if update.state.minted is None and update.state.workers.count_in_phases(CANDIDATE):  # before any training
        if update.state.workers.count_in_phases(("ready",)):
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

    Workers join or leave only where all members stand at one boundary; elsewhere the survivors go on as they are, to
    the next boundary. A worker that computes wrong results leaves in any case.
    """
    current, workers = update.state.minted, update.state.workers
    arrived = len(update.state.arrivals)
    if current is None or workers.count_in_phases(MEMBER) > arrived or workers.count_in_phases(MEMBER, connected=False):
        return
    members, arrivals = update.state.members, update.state.arrivals.plain()
    faulty = [member for member in members if member.is_faulty]
    members = tuple(member for member in members if not member.is_faulty)
    holders = holders_among(members, current, arrivals)
    if not holders:
        _start_over(update)
        return
    steady = are_steady(holders, arrivals) and not workers.count_in_phases(("finished",))
    if steady and all(member.leaving for member in members):
        _preempt(update, holders)
        return
    excluded = exclude_unconnected(update, current, holders)
    members = tuple(member for member in members if member.id not in excluded)
    size = update.state.size
    staying = [member for member in members if not member.leaving][:size] if steady else []
    holding = {member.id for member in holders}
    if not any(member.id in holding for member in staying):
        staying = list(members)  # a worker that holds the weights leaves only once another one has them
    source = newest(staying, holding, arrivals)
    loop = arrivals[staying[source].id].loop
    joiners = [worker for worker in _ready_candidates(update.state) if worker.loop == loop and not worker.leaving]
    joiners = joiners[: max(0, size - len(staying))] if steady else []
    agents = update.state.agents
    rows = {agent: agents[agent] for agent in {member.agent for member in staying}}
    seats = [survivor_seat(member, rows[member.agent], arrivals[member.id], member.id in holding) for member in staying]
    seats += [new_seat(joiner, agents[joiner.agent], joins=True) for joiner in joiners]
    _form(update, seats, source, loop)
    for member in faulty:
        update.remove(member, "it computes wrong results")
    seated = {member.id for member in staying}
    for member in members:
        if member.id not in seated:
            why = "it was asked to leave" if member.leaving else f"the job goes on with {size} workers"
            update.remove(member, why)


def _ready_candidates(state: State) -> list[Worker]:
    """The candidates that can be taken in, in the order in which they became ready."""
    ready = state.workers.in_phases(("ready",), connected=True)
    return sorted(
        (worker for worker in ready if not state.agents[worker.agent].probing), key=lambda worker: worker.turn
    )


def _preempt(update: StateUpdate, holders: list[Worker]) -> None:
    for member in update.state.members:  # a joiner that has not received the weights must not write a checkpoint
        update.remove(member, "all were asked to leave", preempted=member in holders)
    update.set(preempting=True, minted=None, due_since=None, arrival=None, lost=(), broken=False)


def _start_over(update: StateUpdate) -> None:
    """Start over from the newest checkpoint with new workers, since no worker that holds the weights is left."""
    update.journal("starts over", generation=update.state.generation, because=update.state.blame)
    for worker in (*update.state.members, *update.state.candidates):
        if worker.phase != "asked":  # it waits in the run for the state that only lost workers had
            update.remove(worker, "all others are lost, and the job starts over")
    update.set(minted=None, loop=None, due_since=None, arrival=None, lost=(), broken=False)
    update.actions.append(DropKeys())


def _dismiss(update: StateUpdate) -> None:
    for worker in update.state.workers.in_phases(CANDIDATE, leaving=None if update.state.preempting else True):
        update.remove(worker, "it was asked to leave")
    surplus = update.state.staying - update.state.size
    for worker in update.state.candidates[::-1][:surplus] if surplus > 0 else ():
        update.remove(worker, f"the job goes on with {update.state.size} workers")


def _start(update: StateUpdate) -> None:
    _reopen(update)
    state = update.state
    missing = state.size - state.unreplaced - state.staying
    if missing <= 0 or state.stopping or state.preempting or state.workers.count_in_phases(("finished",)):
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
        update.request_workers(agent, [Worker(name, agent.id, host=agent.host, signs=signs) for name in names])
        update.set(last_worker=last + count)
        update.send_to_agent(agent.id, Start(workers=names, delay_s=delay_s))
        update.journal("asked for", workers=list(names), host=agent.host, delay_s=delay_s)
        missing -= count


def _reopen(update: StateUpdate) -> None:
    """Fill places of workers that were asked to leave again if training could not begin without them."""
    state = update.state
    if state.minted is None and state.agents.weight < state.settings.smallest:
        update.reopen_places()


def _form_first(update: StateUpdate) -> None:
    """Form the first generation when all candidates are ready, and there are enough of them."""
    state, needed = update.state, update.state.settings.smallest
    if state.minted is not None or state.preempting or state.stopping:
        return
    if 0 < state.shards < needed:
        shards = f"{state.shards} shard{'s' if state.shards > 1 else ''}"
        update.fail(f"at least {needed} workers are to train, but the job has only {shards}")
        return
    candidates = state.workers.count_in_phases(CANDIDATE)
    all_ready = state.workers.count_in_phases(("ready",), connected=True) == candidates
    if candidates >= needed and all_ready and len(_ready_candidates(state)) == candidates:
        seats = [new_seat(worker, state.agents[worker.agent], joins=False) for worker in state.candidates]
        _form(update, seats, source=0, loop=None)
    elif candidates < needed and state.size - state.unreplaced < needed:
        update.fail(f"no restarts are left, and fewer than the {needed} workers needed; lost last: {state.blame}")


def _form(update: StateUpdate, seats: list[Seat], source: int, loop: int | None) -> None:
    before, number = update.state, update.state.generation + 1
    workers = before.workers.get_many([seat.worker for seat in seats])
    split = split_for(before.shards, workers)
    new = MintedGeneration(
        generation=number,
        roster=tuple(seats),
        bounds=split.bounds,
        source=source,
        loop=loop,
        departures=before.departures,
    )
    update.actions.append(DropKeys(number))
    update.set(arrivals=LayeredMap(), formed_by=HashTrieSet())
    update.record_signs([seat.worker for seat in seats])
    with update.in_bulk():
        for worker in [worker for worker in workers if worker.phase not in MEMBER or worker.signs.pulse.still_s]:
            pulse = worker.signs.pulse.model_copy(update={"still_s": 0.0})
            update.put(worker, phase="working", signs=changed(worker.signs, pulse=pulse))
    for names, message in new.messages(before.minted, before.arrivals):
        update.send_to_all(names, message)
    # Other workers than before may hold the weights, on which it depends which hosts are left out.
    update.touched_agents.add(seats[0].agent)
    candidates = {worker.id for worker in before.candidates} if before.lost else ()
    update.set(generation=number, minted=new, judged_at=update.now, loop=loop)
    update.set(due_since=None, arrival=None, turns_seen=before.last_turn)
    update.set(lost=(), broken=False, formed=False, seconds={})
    joined = [worker for worker, seat in zip(workers, seats, strict=True) if seat.joins or before.minted is None]
    update.journal(
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


def _request_regroup(update: StateUpdate) -> None:
    """Request a new generation when a worker waits to join or leave, there are too many, or a better split is found."""
    state, workers = update.state, update.state.workers
    members = workers.count_in_phases(MEMBER)
    if not members or state.due_since is not None or workers.count_in_phases(("finished",)):
        return
    leaving = workers.count_in_phases(MEMBER, leaving=True)
    joins = any(_is_wanted(state, worker) for worker in _ready_candidates(state))
    if leaving or members > state.size or joins or _should_split_again(update):
        update.request_regroup()


def _should_split_again(update: StateUpdate) -> bool:
    if update.now < update.state.judged_at + SETTLED_S:
        return False
    update.set(judged_at=update.now)
    return is_unbalanced(update.state)


def _is_wanted(state: State, joiner: Worker) -> bool:
    """Whether the members should stop for a joiner: it is probably in the same loop."""
    if joiner.loop is None or state.loop is None or joiner.loop == state.loop:
        return joiner.loop is not None
    # A joiner passes a loop once that is over: if it waits at a later one, what the members last sent may be old.
    # The members stop for it once. If they were still in the earlier loop, they do not stop for it again.
    return joiner.loop > state.loop and joiner.turn > state.turns_seen


def _release(update: StateUpdate) -> None:
    """End the job, or release an agent, once all workers that were asked to leave are gone."""
    state, agents = update.state, update.state.agents
    everybody = state.preempting or state.stopping or (bool(agents) and not agents.count("stays"))
    if everybody and not state.workers:
        update.end("preempted", JobOver(preempted=True, reason="all were asked to leave"))
        return
    for agent in agents.marked("leaving"):
        if not agent.started:
            update.put_agent(agent, left=True)
            drop_probe_results(update, agent.id)
            update.send_to_agent(agent.id, JobOver(preempted=True, reason="this agent was asked to leave"))
            update.journal("agent left", agent=agent.id, host=agent.host)
