"""The effect of each event on the state, before the transitions that follow from it."""

from collections.abc import Sequence

from unisono.errors import NOT_STARTED, PREEMPTED
from unisono.membership import messages
from unisono.membership.state.event import (
    AgentMessage,
    Bundle,
    CheckpointRequested,
    Disconnected,
    DropKeys,
    Event,
    LeaveRequested,
    ReplaceRequested,
    ResizeRequested,
    Restarted,
    StopRequested,
    Tick,
    WorkerMessage,
)
from unisono.membership.state.member_table import LayeredMap
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
from unisono.membership.state.reach import (
    drop_probe_results,
    probe,
    probe_left_out_again,
    probe_unless_recent,
    record_probe_reply,
    record_probe_timeout,
    record_unreached,
)
from unisono.membership.state.state import CANDIDATE, MEMBER, Agent, AgentSigns, Phase, Signs, State, Worker, changed
from unisono.membership.state.state_update import StateUpdate

ACTIVE: tuple[Phase, ...] = ("preparing", "ready", *MEMBER, "finished")
"""Phases of the workers whose messages count."""


def apply_event(update: StateUpdate, event: Event) -> None:
    """Apply an event to the state. When the job is over, only workers and agents that connect get an answer."""
    match event:
        case WorkerMessage(_, messages.WorkerHello() as hello):
            _worker_connected(update, hello)
        case Bundle(events):
            with update.in_bulk():
                for inner in events:
                    apply_event(update, inner)
        case Restarted():
            _restart(update)
        case AgentMessage(_, messages.AgentHello() as hello):
            _agent_connected(update, hello)
        case _ if update.state.over is not None:
            pass
        case WorkerMessage(workers, message):
            _receive(update, workers, message)
        case AgentMessage(agent, messages.WorkerEnded() as ended):
            _worker_ended(update, agent, ended)
        case AgentMessage(agent, messages.AgentLeaving(reason=reason)):
            _agent_leaves(update, agent, reason)
            if (leaving := update.state.agents.get(agent)) is not None and not leaving.workers:
                _stop(update)  # an agent without room only keeps the coordinator: with it the whole job stops
        case AgentMessage(agent, messages.Probed() as reply) if agent in update.state.agents:
            record_probe_reply(update, update.state.agents[agent], reply)
        case Disconnected(worker, agent):
            _disconnected(update, worker, agent)
        case ResizeRequested(workers):
            _resize(update, workers, "a person")
        case LeaveRequested(who):
            _leave_asked(update, who)
        case ReplaceRequested(who):
            _replace_asked(update, who)
        case CheckpointRequested():
            _checkpoint_asked(update)
        case StopRequested():
            _stop(update)
        case Tick():
            _expire(update)


# -- workers


def _worker_connected(update: StateUpdate, hello: messages.WorkerHello) -> None:
    state, worker = update.state, update.state.workers.get(hello.worker)
    if state.over is not None:
        update.send_to_all((hello.worker,), state.over)
        return
    if worker is None or _reason_to_refuse(state, worker, hello):
        reason = "no worker of this name is expected" if worker is None else _reason_to_refuse(state, worker, hello)
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
    update.record_signs([worker.id])
    if worker.farewell is not None:
        update.send(worker, worker.farewell)
        return
    update.send(worker, messages.Welcome(joins=worker.joins))
    if state.is_at_work(worker):
        _send_missed_messages(update, worker, hello.generation)


def _reason_to_refuse(state: State, worker: Worker, hello: messages.WorkerHello) -> str:
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


def _send_missed_messages(update: StateUpdate, worker: Worker, generation: int) -> None:
    current = update.state.minted
    assert current is not None
    if generation < current.generation:
        update.send(worker, current.message_for(worker.id))
    if update.state.broken:
        update.send(worker, messages.Lost(generation=current.generation, workers=update.state.lost))
    elif update.state.due_since is not None:
        update.send(worker, messages.RegroupDue(generation=current.generation))


def _receive(update: StateUpdate, names: Sequence[str], message: messages.FromWorker) -> None:
    senders = zip(names, update.state.workers.get_many(names), strict=True)
    workers = [
        worker
        for name, worker in senders
        if (worker and worker.phase in ACTIVE) or _accepts_inactive(update, name, worker)
    ]
    update.record_signs([worker.id for worker in workers])
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
                _receive_from_one(update, worker, message)


def _accepts_inactive(update: StateUpdate, name: str, worker: Worker | None) -> bool:
    """Whether a message counts although its worker is not in one of the phases of :data:`ACTIVE`."""
    if worker is None or worker.phase == "lost":
        reason = "no worker of this name is expected" if worker is None else f"{name} was given up: {worker.why}"
        update.refuse(name, reason)
        return False
    # A preempted worker writes a checkpoint, which may take long: its messages show that it is alive.
    return worker.phase == "removed" and worker.farewell is not None and worker.farewell.preempted


def _receive_from_one(update: StateUpdate, worker: Worker, message: messages.FromWorker) -> None:
    match message:
        case messages.Ready() if worker.phase in ("preparing", "ready"):
            _ready(update, worker, message)
        case messages.Ready() if update.state.is_at_work(worker) and message.generation == update.state.generation:
            record_unreached(update, update.state.agents[worker.agent], message.unreached)
            _ready(update, worker, message)
            update.break_generation(worker)
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
            probe_unless_recent(update, worker.agent)
    update.put(worker, phase="ready", loop=message.loop, address=message.address)


def _arrived(update: StateUpdate, workers: Sequence[Worker], message: messages.Arrived) -> None:
    if not workers:
        return
    for worker in workers if message.unreached else ():
        record_unreached(update, update.state.agents[worker.agent], message.unreached)
    state = update.state
    update.set(
        arrivals=state.arrivals.update(dict.fromkeys([worker.id for worker in workers], message)),
        arrival=update.now if state.arrival is None else state.arrival,
    )
    update.request_regroup()
    if not message.at_boundary or not (state.formed or all(map(state.has_formed, workers))):
        update.wake_members()  # the others may wait for it in a collective call, and it does not come any more


def _formed(update: StateUpdate, workers: Sequence[Worker], message: messages.Formed) -> None:
    seconds, formed_by = update.state.seconds, update.state.formed_by
    names = [worker.id for worker in workers if worker.id not in formed_by]
    if not names:
        return
    longer = {part: length for part, length in message.seconds.items() if length > seconds.get(part, -1.0)}
    update.set(formed_by=formed_by.update(names), seconds={**seconds, **longer} if longer else seconds)
    for agent in update.state.agents.get_many({worker.agent for worker in workers}):
        if agent.failed:
            update.put_agent(agent, failed=0)
    # More workers than before may hold the weights, on which it depends which hosts are left out.
    update.touched_agents.add(workers[0].agent)
    if len(update.state.formed_by) == update.state.workers.count_in_phases(MEMBER):
        update.set(formed=True)
        update.journal("formed", generation=update.state.generation, seconds=dict(update.state.seconds))


def _leave(update: StateUpdate, worker: Worker) -> None:
    if worker.leaving:
        return
    if worker.phase in MEMBER:
        update.depart(worker)
    update.put(worker, leaving=True)
    agent = update.state.agents[worker.agent]
    update.put_agent(agent, given_up=agent.given_up + 1)
    update.journal("asked to leave", worker=worker.id, host=worker.host)


def _replace(update: StateUpdate, message: messages.Replace) -> None:
    """A member leaves, and its place is filled again. All members send this, so that the loss of one loses nothing."""
    if message.generation != update.state.generation:
        return  # the rank may be that of another worker by now
    roster = () if update.state.minted is None else update.state.minted.roster
    if message.rank >= len(roster):
        return
    worker = update.state.workers.get(roster[message.rank].worker)
    if worker is None or worker.phase not in MEMBER or worker.is_faulty:
        return
    if len(roster) == 1:  # no other worker has checked its results, and the weights would be lost with it
        update.journal("not replaced", worker=worker.id, host=worker.host, why="it trains alone")
    else:
        update.put(worker, leaving=True, is_faulty=True)
        update.journal("replaced", worker=worker.id, host=worker.host, rank=message.rank)


def _progress(update: StateUpdate, worker: Worker, message: messages.Progress) -> None:
    signs = {"step": message.step, "samples_per_s": message.samples_per_s, "pulse": message.pulse}
    update.put(worker, signs=changed(worker.signs, **signs))
    loop = update.state.loop
    if message.loop is not None and (loop is None or message.loop > loop):
        update.set(loop=message.loop)


# -- agents


def _agent_connected(update: StateUpdate, hello: messages.AgentHello) -> None:
    if update.state.over is not None:
        update.send_to_agent(hello.agent, update.state.over)
        return
    if hello.agent in update.state.agents and update.state.agents[hello.agent].probes != hello.probes:
        drop_probe_results(update, hello.agent)
    agent = update.state.agents.get(hello.agent)
    workers = update.state.workers.of_agent(hello.agent)
    if agent is None:
        number = update.state.last_agent + 1
        agent = Agent(hello.agent, hello.host, hello.workers, number, started=len(workers))
        update.set(last_agent=number)
        update.journal("agent joined", agent=agent.id, host=agent.host, workers=agent.workers)
    signs = AgentSigns(connected=True, at=update.now)
    leaving = agent.leaving and not agent.left  # an agent that had left and connects was started again
    update.put_agent(
        agent, workers=hello.workers, leaving=leaving, left=False, probes=hello.probes, probing=(), signs=signs
    )
    update.send_to_agent(agent.id, messages.Welcome(joins=update.state.minted is not None))
    if agent.turned_away:
        update.send_turned_away(agent.id)
    for worker in workers:
        if worker.id not in hello.running:
            _ended_unreported(update, worker)
    expected = {worker.id for worker in workers if worker.phase != "lost"}
    if unexpected := tuple(worker for worker in hello.running if worker not in expected):
        update.send_to_agent(agent.id, messages.End(workers=unexpected, how="kill"))
    probe(update, [update.state.agents[agent.id]])  # an agent forgets its probes when its connection ends


def _ended_unreported(update: StateUpdate, worker: Worker) -> None:
    """A worker is gone, and its agent cannot say how: it was away, or never received the order to start it."""
    if worker.phase in ("asked", "removed", "lost"):
        update.drop(worker)
    elif worker.phase != "finished":
        update.lose(worker, "it ended while its agent was away", ended=True)


def _worker_ended(update: StateUpdate, agent: str, ended: messages.WorkerEnded) -> None:
    worker = update.state.workers.get(ended.worker)
    if worker is None or worker.agent != agent:
        return
    if worker.phase in ("removed", "lost"):
        update.drop(worker)
        return
    why, is_error = _why_ended(update.state, worker, ended)
    if ended.code == 0 and update.state.minted is None and not worker.leaving:
        update.put(worker, phase="finished")  # all scripts may end before they train, as with --help
    elif is_error and not worker.leaving and _has_yet_to_join(update.state, worker):
        update.fail_to_join(worker, why)
    elif is_error and not update.state.settings.restart_on_error:
        update.fail(update.blame(worker, why), worker.id)
    elif worker.phase != "finished":
        update.lose(worker, why, ended=True)


def _has_yet_to_join(state: State, worker: Worker) -> bool:
    """Whether other workers train, and this one has never been a member of a generation that formed."""
    seats = () if state.minted is None else state.minted.roster
    seat = next((seat for seat in seats if seat.worker == worker.id), None)
    if seat is None:
        return state.minted is not None and worker.phase in CANDIDATE
    return seat.joins and not state.has_formed(worker)


def _why_ended(state: State, worker: Worker, ended: messages.WorkerEnded) -> tuple[str, bool]:
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
    update.journal("agent asked to leave", agent=agent.id, host=agent.host, **({"notice": reason} if reason else {}))


# -- people


def _resize(update: StateUpdate, workers: int, by: str) -> None:
    before = update.state.size
    if by in update.state.workers and update.state.wanted == update.state.clamp(workers):
        return  # all members send the same request, so that the loss of one loses nothing
    update.set(wanted=update.state.clamp(workers), unreplaced=0)
    update.reopen_places()
    update.journal("resized", workers=update.state.size, before=before, asked_for=workers, by=by)


def _leave_asked(update: StateUpdate, who: str) -> None:
    name = find(update.state, who)
    if name is not None and name in update.state.agents:
        _agent_leaves(update, name)
    worker = None if name is None else update.state.workers.get(name)
    if worker is not None and worker.phase in (*MEMBER, *CANDIDATE):
        _leave(update, worker)


def _replace_asked(update: StateUpdate, who: str) -> None:
    worker = update.state.workers.get(find(update.state, who) or "")
    if worker is not None and not why_not_replaced(update.state, who):
        if worker.phase in MEMBER:
            update.depart(worker)
        update.put(worker, leaving=True)
        update.journal("replaced", worker=worker.id, host=worker.host, rank=update.state.ranks.get(worker.id))


def _checkpoint_asked(update: StateUpdate) -> None:
    """Ask the main worker alone for a checkpoint: the others could hear of it at another step, and write one more."""
    main = main_worker(update.state)
    if main is not None and not why_no_checkpoint(update.state):
        update.send(main, messages.CheckpointDue())
        update.journal("asked to checkpoint")


def _stop(update: StateUpdate) -> None:
    if update.state.stopping:
        return
    update.set(stopping=True)
    for worker in update.state.workers.in_phases((*MEMBER, *CANDIDATE)):
        update.put(worker, leaving=True)
    update.journal("asked to stop")


# -- connections and time


def _disconnected(update: StateUpdate, worker: str | None, agent: str | None) -> None:
    if worker is not None and (row := update.state.workers.get(worker)) is not None:
        update.put(row, signs=changed(row.signs, connected=False))
        update.record_signs([row.id], _last_sign_at(update, update.last_heard(row.id)))
    if agent is not None and (host := update.state.agents.get(agent)) is not None:
        update.put_agent(host, signs=AgentSigns(connected=False, at=_last_sign_at(update, host.signs.at)))


def _last_sign_at(update: StateUpdate, heard_at: float) -> float:
    """The time that counts as the last sign of life after a connection broke: at least half the timeout is left."""
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
        unformed=0,  # the workers of a generation meet in the store, which was gone: no worker is to blame
    )
    # The coordinator may have ended after the state was saved, and before it dropped these keys.
    update.actions.append(DropKeys() if state.minted is None else DropKeys(state.generation))
    update.journal("coordinator restarted", generation=state.generation)


def _expire(update: StateUpdate) -> None:
    for agent in update.state.agents.values():
        if is_past(agent_deadline(update.state, agent), update.now):
            _lose_agent(update, agent)
        elif is_past(probes_deadline(update.state, update.state.agents[agent.id]), update.now):
            record_probe_timeout(update, agent.id)
    timeout_s, waiting_since = update.state.settings.failure_timeout_s, waited_since(update.state)
    probe_left_out_again(update)
    for worker in update.state.workers.values():
        if not is_past(worker_deadline(update.state, worker, waiting_since), update.now):
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
        update.journal("agent lost", agent=agent.id, host=agent.host)
    for worker in update.state.workers.of_agent(agent.id):
        if worker.phase in ("removed", "lost"):
            update.drop(worker)
        elif worker.phase != "finished":
            update.lose(worker, f"its agent on host {agent.host} is gone", ended=True)
    drop_probe_results(update, agent.id)
    update.drop_agent(agent)
