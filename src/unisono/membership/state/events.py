"""The effect of each event on the state, before the transitions that follow from it."""

from collections.abc import Sequence

from unisono.errors import NOT_STARTED, PREEMPTED
from unisono.membership import messages
from unisono.membership.state.event import (
    AgentHeard,
    Bundle,
    CheckpointAsked,
    Disconnected,
    Event,
    Forget,
    Heard,
    LeaveAsked,
    ReplaceAsked,
    Resized,
    Restarted,
    StopAsked,
    Tick,
)
from unisono.membership.state.questions import (
    agent_deadline,
    find,
    is_past,
    main_worker,
    probes_deadline,
    waited_since,
    why_no_checkpoint,
    why_not_replaced,
    worker_deadline,
)
from unisono.membership.state.reach import doubt, forget_agent, gave_no_answer, not_reached, probe, probed, try_again
from unisono.membership.state.state import CANDIDATE, MEMBER, Agent, AgentSigns, Phase, Signs, State, Worker, changed
from unisono.membership.state.state_update import StateUpdate
from unisono.membership.state.table import LayeredMap

HEARD: tuple[Phase, ...] = ("preparing", "ready", *MEMBER, "finished")
"""Phases of those who may say something."""


def hear(update: StateUpdate, event: Event) -> None:
    """Let an event have its effect. Of a job that is over, only whoever connects is told so."""
    match event:
        case Heard(_, messages.WorkerHello() as hello):
            _greet(update, hello)
        case Bundle(events):
            with update.in_bulk():
                for inner in events:
                    hear(update, inner)
        case Restarted():
            _restart(update)
        case AgentHeard(_, messages.AgentHello() as hello):
            _enlist(update, hello)
        case _ if update.state.over is not None:
            pass
        case Heard(workers, message):
            _hear(update, workers, message)
        case AgentHeard(agent, messages.WorkerEnded() as ended):
            _ended(update, agent, ended)
        case AgentHeard(agent, messages.AgentLeaving(reason=reason)):
            _agent_leaves(update, agent, reason)
            if (known := update.state.agents.get(agent)) is not None and not known.workers:
                _stop(update)
        case AgentHeard(agent, messages.Probed() as reply) if agent in update.state.agents:
            probed(update, update.state.agents[agent], reply)
        case Disconnected(worker, agent):
            _disconnected(update, worker, agent)
        case Resized(workers):
            _resize(update, workers, "a person")
        case LeaveAsked(who):
            _leave_asked(update, who)
        case ReplaceAsked(who):
            _replace_asked(update, who)
        case CheckpointAsked():
            _checkpoint_asked(update)
        case StopAsked():
            _stop(update)
        case Tick():
            _expire(update)


# -- workers


def _greet(update: StateUpdate, hello: messages.WorkerHello) -> None:
    state, worker = update.state, update.state.workers.get(hello.worker)
    if state.over is not None:
        update.tell_all((hello.worker,), state.over)
        return
    if worker is None or _refusal(state, worker, hello):
        reason = "no worker of this name is expected" if worker is None else _refusal(state, worker, hello)
        update.refuse(hello.worker, reason)
        return
    is_new = worker.phase == "asked"
    update.set(shards=hello.shards)
    worker = update.put(
        worker,
        host=hello.host,
        pid=hello.pid,
        phase="preparing" if is_new else worker.phase,
        joins=state.minted is not None if is_new else worker.joins,
        signs=changed(worker.signs, connected=True),
    )
    update.hear_of([worker.id])
    if worker.farewell is not None:
        update.tell(worker, worker.farewell)
        return
    update.tell(worker, messages.Welcome(joins=worker.joins))
    if state.is_at_work(worker):
        _remind(update, worker, hello.generation)


def _refusal(state: State, worker: Worker, hello: messages.WorkerHello) -> str:
    if worker.phase == "lost":
        return f"{worker.id} was given up: {worker.why}"
    if state.shards not in (0, hello.shards):
        return f"the job has {state.shards} shards, but {hello.shards} on host {hello.host}"
    if hello.devices != (devices := state.settings.devices):
        return (
            f"the workers of the job have {devices} devices each, but {hello.devices} on host {hello.host}: start them "
            f"there with --devices-per-worker {devices}"
        )
    if hello.generation > state.generation:
        return f"{worker.id} is in generation {hello.generation}, but the newest is {state.generation}"
    return ""


def _remind(update: StateUpdate, worker: Worker, generation: int) -> None:
    """Tell a member what it may have missed while it had no connection."""
    current = update.state.minted
    assert current is not None
    if generation < current.generation:
        update.tell(worker, current.message_for(worker.id))
    if update.state.broken:
        update.tell(worker, messages.Lost(generation=current.generation, workers=update.state.lost))
    elif update.state.due_since is not None:
        update.tell(worker, messages.RegroupDue(generation=current.generation))


def _hear(update: StateUpdate, names: Sequence[str], message: messages.FromWorker) -> None:
    """Workers have said the same."""
    known = zip(names, update.state.workers.of_ids(names), strict=True)
    workers = [
        worker for name, worker in known if (worker and worker.phase in HEARD) or _is_heard(update, name, worker)
    ]
    update.hear_of([worker.id for worker in workers])
    generation = update.state.generation
    match message:
        case messages.Arrived() | messages.Formed() if message.generation != generation:
            pass
        case messages.Arrived():
            _arrived(update, update.state.at_work(workers), message)
        case messages.Formed():
            _formed(update, [worker for worker in workers if worker.phase in MEMBER], message)
        case _:
            for worker in workers:
                _hear_one(update, worker, message)


def _is_heard(update: StateUpdate, name: str, worker: Worker | None) -> bool:
    """Whether what a worker says counts that is in another phase than those of :data:`HEARD`."""
    if worker is None or worker.phase == "lost":
        reason = "no worker of this name is expected" if worker is None else f"{name} was given up: {worker.why}"
        update.refuse(name, reason)
        return False
    # It writes a checkpoint, which takes as long as it takes.
    return worker.phase == "removed" and worker.farewell is not None and worker.farewell.preempted


def _hear_one(update: StateUpdate, worker: Worker, message: messages.FromWorker) -> None:
    match message:
        case messages.Ready() if worker.phase in ("preparing", "ready"):
            _ready(update, worker, message)
        case messages.Ready() if update.state.is_at_work(worker) and message.generation == update.state.generation:
            not_reached(update, update.state.agents[worker.agent], message.unreached)
            _ready(update, worker, message)
            update.break_up(worker)
        case messages.Leaving() if worker.phase in (*CANDIDATE, *MEMBER):
            _leave(update, worker)
        case messages.Finished(digest=digest) if worker.phase in MEMBER:
            update.put(worker, phase="finished", digest=digest)
        case messages.Replace() if worker.phase in MEMBER:
            _replace(update, message)
        case messages.Progress() if worker.phase in MEMBER:
            _progress(update, worker, message)
        case messages.ResizeRequest(workers=workers) if worker.phase in MEMBER:
            _resize(update, workers, worker.id)


def _ready(update: StateUpdate, worker: Worker, message: messages.Ready) -> None:
    if worker.phase != "ready" or worker.loop != message.loop:
        update.set(last_turn=update.state.last_turn + 1, quick=0)
        worker = changed(worker, turn=update.state.last_turn)
        if update.state.minted is not None:
            doubt(update, worker.agent)
    update.put(worker, phase="ready", loop=message.loop, address=message.address)


def _arrived(update: StateUpdate, workers: Sequence[Worker], message: messages.Arrived) -> None:
    if not workers:
        return
    for worker in workers if message.unreached else ():
        not_reached(update, update.state.agents[worker.agent], message.unreached)
    state = update.state
    update.set(
        arrivals=state.arrivals.update(dict.fromkeys([worker.id for worker in workers], message)),
        arrival=update.now if state.arrival is None else state.arrival,
    )
    update.call_members()
    if not message.at_boundary or not (state.formed or all(map(state.has_formed, workers))):
        update.wake_members()  # they may wait for it, and it comes no more


def _formed(update: StateUpdate, workers: Sequence[Worker], message: messages.Formed) -> None:
    known, before = update.state.seconds, update.state.formed_by
    names = [worker.id for worker in workers if worker.id not in before]
    if not names:
        return
    longer = {part: length for part, length in message.seconds.items() if length > known.get(part, -1.0)}
    update.set(formed_by=before.update(names), seconds={**known, **longer} if longer else known)
    for agent in update.state.agents.of_ids({worker.agent for worker in workers}):
        if agent.failed:
            update.put_agent(agent, failed=0)
    update.moved.add(workers[0].agent)  # more than before may hold the weights, by which it is decided who is left out
    if len(update.state.formed_by) == update.state.workers.number(MEMBER):
        update.set(formed=True)
        update.note("formed", generation=update.state.generation, seconds=dict(update.state.seconds))


def _leave(update: StateUpdate, worker: Worker) -> None:
    if worker.leaving:
        return
    if worker.phase in MEMBER:
        update.depart(worker)
    update.put(worker, leaving=True)
    agent = update.state.agents[worker.agent]
    update.put_agent(agent, given_up=agent.given_up + 1)
    update.note("asked to leave", worker=worker.id, host=worker.host)


def _replace(update: StateUpdate, message: messages.Replace) -> None:
    """A member leaves, and its place is filled again. All members say so, that it may outlive any of them."""
    if message.generation != update.state.generation:
        return  # the worker that was meant may have another rank by now
    roster = () if update.state.minted is None else update.state.minted.roster
    if message.rank >= len(roster):
        return
    worker = update.state.workers.get(roster[message.rank].worker)
    if worker is None or worker.phase not in MEMBER or worker.is_faulty:
        return
    if len(roster) == 1:  # nobody has compared its results, and the job would leave with it
        update.note("not replaced", worker=worker.id, host=worker.host, why="it trains alone")
    else:
        update.put(worker, leaving=True, is_faulty=True)
        update.note("replaced", worker=worker.id, host=worker.host, rank=message.rank)


def _progress(update: StateUpdate, worker: Worker, message: messages.Progress) -> None:
    signs = {"step": message.step, "samples_per_s": message.samples_per_s, "pulse": message.pulse}
    update.put(worker, signs=changed(worker.signs, **signs))
    known = update.state.loop
    if message.loop is not None and (known is None or message.loop > known):
        update.set(loop=message.loop)


# -- agents


def _enlist(update: StateUpdate, hello: messages.AgentHello) -> None:
    if update.state.over is not None:
        update.tell_agent(hello.agent, update.state.over)
        return
    if hello.agent in update.state.agents and update.state.agents[hello.agent].probes != hello.probes:
        forget_agent(update, hello.agent)
    agent = update.state.agents.get(hello.agent)
    theirs = update.state.workers.of_agent(hello.agent)
    if agent is None:
        number = update.state.last_agent + 1
        agent = Agent(hello.agent, hello.host, hello.workers, number, started=len(theirs))
        update.set(last_agent=number)
        update.note("agent joined", agent=agent.id, host=agent.host, workers=agent.workers)
    signs = AgentSigns(connected=True, at=update.now)
    leaving = agent.leaving and not agent.left  # who has left, and is there again, was started again
    update.put_agent(
        agent, workers=hello.workers, leaving=leaving, left=False, probes=hello.probes, probing=(), signs=signs
    )
    update.tell_agent(agent.id, messages.Welcome(joins=update.state.minted is not None))
    if agent.turned_away:
        update.tell_turned_away(agent.id)
    for worker in theirs:
        if worker.id not in hello.running:
            _ended_unseen(update, worker)
    known = {worker.id for worker in theirs if worker.phase != "lost"}
    if strangers := tuple(worker for worker in hello.running if worker not in known):
        update.tell_agent(agent.id, messages.End(workers=strangers, how="kill"))
    probe(update, [update.state.agents[agent.id]])  # it has forgotten what it was asked before


def _ended_unseen(update: StateUpdate, worker: Worker) -> None:
    """A worker is gone, and its agent cannot say how: it was away, or never heard that it should start it."""
    if worker.phase in ("asked", "removed", "lost"):
        update.drop(worker)
    elif worker.phase != "finished":
        update.lose(worker, "it ended while its agent was away", ended=True)


def _ended(update: StateUpdate, agent: str, ended: messages.WorkerEnded) -> None:
    worker = update.state.workers.get(ended.worker)
    if worker is None or worker.agent != agent:
        return
    if worker.phase in ("removed", "lost"):
        update.drop(worker)
        return
    why, is_error = _why_ended(update.state, worker, ended)
    if ended.code == 0 and update.state.minted is None and not worker.leaving:
        update.put(worker, phase="finished")  # all scripts may end so, as with --help
    elif is_error and not worker.leaving and _has_yet_to_join(update.state, worker):
        update.fail_to_join(worker, why)
    elif is_error and not update.state.settings.restart_on_error:
        update.fail(update.blame(worker, why), worker.id)
    elif worker.phase != "finished":
        update.lose(worker, why, ended=True)


def _has_yet_to_join(state: State, worker: Worker) -> bool:
    """Whether others train, and this worker has never been a member of a generation of theirs that formed."""
    seats = () if state.minted is None else state.minted.roster
    seat = next((seat for seat in seats if seat.worker == worker.id), None)
    if seat is None:
        return state.minted is not None and worker.phase in CANDIDATE
    return seat.joins and not state.has_formed(worker)


def _why_ended(state: State, worker: Worker, ended: messages.WorkerEnded) -> tuple[str, bool]:
    """Why a worker's process has ended, and whether its script is to blame."""
    if ended.code == 0:
        is_early = not worker.leaving and not state.finished
        return "its script ended before the others'", is_early
    how = f"signal {-ended.code}" if ended.code < 0 else f"code {ended.code}"
    why = f"it ended with {how}" + (f": {ended.error}" if ended.error else "")
    return why, 1 <= ended.code < NOT_STARTED and ended.code != PREEMPTED and bool(ended.error)


def _agent_leaves(update: StateUpdate, name: str, reason: str = "") -> None:
    agent = update.state.agents.get(name)
    if agent is None or agent.leaving:
        return
    update.put_agent(agent, leaving=True)
    for worker in update.state.workers.of_agent(name):
        if worker.phase in MEMBER:
            update.depart(worker)
        update.put(worker, leaving=True)
    update.note("agent asked to leave", agent=agent.id, host=agent.host, **({"notice": reason} if reason else {}))


# -- people


def _resize(update: StateUpdate, workers: int, by: str) -> None:
    before = update.state.size
    if by in update.state.workers and update.state.wanted == update.state.within(workers):
        return  # all members say so, that it may outlive any of them
    update.set(wanted=update.state.within(workers), unreplaced=0)
    update.fill_again()
    update.note("resized", workers=update.state.size, before=before, asked_for=workers, by=by)


def _leave_asked(update: StateUpdate, who: str) -> None:
    name = find(update.state, who)
    if name is not None and name in update.state.agents:
        _agent_leaves(update, name)
    worker = None if name is None else update.state.workers.get(name)
    if worker is not None and worker.phase in (*MEMBER, *CANDIDATE):
        _leave(update, worker)


def _replace_asked(update: StateUpdate, who: str) -> None:
    """A worker leaves at the next boundary, and its place stays open for another one."""
    worker = update.state.workers.get(find(update.state, who) or "")
    if worker is not None and not why_not_replaced(update.state, who):
        if worker.phase in MEMBER:
            update.depart(worker)
        update.put(worker, leaving=True)
        update.note("replaced", worker=worker.id, host=worker.host, rank=update.state.ranks.get(worker.id))


def _checkpoint_asked(update: StateUpdate) -> None:
    """The main worker alone is told: all who would hear of it at different steps would each write one."""
    main = main_worker(update.state)
    if main is not None and not why_no_checkpoint(update.state):
        update.tell(main, messages.CheckpointDue())
        update.note("asked to checkpoint")


def _stop(update: StateUpdate) -> None:
    if update.state.stopping:
        return
    update.set(stopping=True)
    for worker in update.state.workers.those((*MEMBER, *CANDIDATE)):
        update.put(worker, leaving=True)
    update.note("asked to stop")


# -- connections and time


def _disconnected(update: StateUpdate, worker: str | None, agent: str | None) -> None:
    if worker is not None and (known := update.state.workers.get(worker)) is not None:
        update.put(known, signs=changed(known.signs, connected=False))
        update.hear_of([known.id], _cut_off(update, update.last_heard(known.id)))
    if agent is not None and (host := update.state.agents.get(agent)) is not None:
        update.put_agent(host, signs=AgentSigns(connected=False, at=_cut_off(update, host.signs.at)))


def _cut_off(update: StateUpdate, heard_at: float) -> float:
    """A broken connection is no sign of life: whoever was silent for long has half the time left."""
    return max(heard_at, update.now - update.state.settings.failure_timeout_s / 2)


def _restart(update: StateUpdate) -> None:
    state, signs, agent_signs = update.state, Signs(started=update.now, since=update.now), AgentSigns(at=update.now)
    update.set(
        workers=state.workers.with_rows(changed(worker, signs=signs, unformed=0) for worker in state.workers.values()),
        heard_at=LayeredMap(dict.fromkeys(state.workers, update.now)),
        agents=state.agents.with_rows(changed(agent, signs=agent_signs) for agent in state.agents.values()),
        judged_at=update.now,
        due_since=None if state.due_since is None else update.now,
        arrival=None if state.arrival is None else update.now,
        unformed=0,  # a generation that formed meanwhile met in the store that was gone: it counts against nobody
    )
    update.actions.append(Forget() if state.minted is None else Forget(state.generation))  # perhaps it came to nothing
    update.note("coordinator restarted", generation=state.generation)


def _expire(update: StateUpdate) -> None:
    for agent in update.state.agents.values():
        if is_past(agent_deadline(update.state, agent), update.now):
            _lose_agent(update, agent)
        elif is_past(probes_deadline(update.state, update.state.agents[agent.id]), update.now):
            gave_no_answer(update, agent.id)
    timeout_s, waits = update.state.settings.failure_timeout_s, waited_since(update.state)
    try_again(update)
    for worker in update.state.workers.values():
        if not is_past(worker_deadline(update.state, worker, waits), update.now):
            continue
        if worker.phase == "removed":
            update.kill(worker, "it did not end")
        elif not worker.signs.connected:
            update.lose(worker, f"it was not connected for {timeout_s:g} s")
        elif update.state.arrival is None:
            update.lose(worker, f"it gave no sign for {timeout_s:g} s")
        else:
            update.lose(worker, f"it did not stop with the others for {timeout_s:g} s")


def _lose_agent(update: StateUpdate, agent: Agent) -> None:
    if not agent.left:
        update.note("agent lost", agent=agent.id, host=agent.host)
    for worker in update.state.workers.of_agent(agent.id):
        if worker.phase in ("removed", "lost"):
            update.drop(worker)
        elif worker.phase != "finished":
            update.lose(worker, f"its agent on host {agent.host} is gone", ended=True)
    forget_agent(update, agent.id)
    update.drop_agent(agent)
