"""What an event does to the state, before what follows from it."""

from dataclasses import replace

from unisono.exit_codes import NOT_STARTED, PREEMPTED
from unisono.membership.messages import (
    AgentHello,
    AgentLeaving,
    Arrived,
    End,
    Finished,
    Formed,
    FromWorker,
    Leaving,
    Lost,
    Probed,
    Progress,
    Ready,
    RegroupDue,
    Replace,
    Resize,
    Welcome,
    WorkerEnded,
    WorkerHello,
)
from unisono.membership.state.change import Change
from unisono.membership.state.deadline import agent_deadline, is_past, probes_deadline, worker_deadline
from unisono.membership.state.event import (
    AgentHeard,
    Disconnected,
    Event,
    Forget,
    Heard,
    LeaveAsked,
    Resized,
    Restarted,
    StopAsked,
    Tell,
    Tick,
)
from unisono.membership.state.reach import doubt, forget_agent, gave_no_answer, not_reached, probed
from unisono.membership.state.state import CANDIDATE, MEMBER, Agent, Signs, State, Worker
from unisono.membership.state.status import find


def hear(change: Change, event: Event) -> None:
    """Let an event have its effect. Of a job that is over, only whoever connects is told so."""
    match event:
        case Restarted():
            _restart(change)
        case Heard(_, WorkerHello() as hello):
            _greet(change, hello)
        case AgentHeard(_, AgentHello() as hello):
            _enlist(change, hello)
        case _ if change.state.over is not None:
            pass
        case Heard(worker, message):
            _hear(change, worker, message)
        case AgentHeard(agent, WorkerEnded() as ended):
            _ended(change, agent, ended)
        case AgentHeard(agent, AgentLeaving()):
            _agent_leaves(change, agent)
        case AgentHeard(agent, Probed() as found) if agent in change.state.agents:
            probed(change, change.state.agents[agent], found)
        case Disconnected(worker, agent):
            _disconnected(change, worker, agent)
        case Resized(workers):
            _resize(change, workers, "a person")
        case LeaveAsked(who):
            _leave_asked(change, who)
        case StopAsked():
            _stop(change)
        case Tick():
            _expire(change)


# -- workers


def _greet(change: Change, hello: WorkerHello) -> None:
    state, worker = change.state, change.state.workers.get(hello.worker)
    if state.over is not None:
        change.actions.append(Tell(hello.worker, state.over))
        return
    if worker is None or _refusal(state, worker, hello):
        reason = "no worker of this name is expected" if worker is None else _refusal(state, worker, hello)
        change.refuse(hello.worker, reason)
        return
    is_new = worker.phase == "asked"
    change.set(shards=hello.shards)
    worker = change.put(
        worker,
        host=hello.host,
        pid=hello.pid,
        phase="preparing" if is_new else worker.phase,
        joins=state.minted is not None if is_new else worker.joins,
        signs=replace(worker.signs, connected=True, at=change.now),
    )
    if worker.farewell is not None:
        change.tell(worker, worker.farewell)
        return
    change.tell(worker, Welcome(joins=worker.joins))
    if worker.phase == "working":
        _remind(change, worker, hello.generation)


def _refusal(state: State, worker: Worker, hello: WorkerHello) -> str:
    if worker.phase == "lost":
        return f"{worker.id} was given up: {worker.why}"
    if state.shards not in (0, hello.shards):
        return f"the job has {state.shards} shards, but {hello.shards} on host {hello.host}"
    if hello.generation > state.generation:
        return f"{worker.id} is in generation {hello.generation}, but the newest is {state.generation}"
    return ""


def _remind(change: Change, worker: Worker, generation: int) -> None:
    """Tell a member what it may have missed while it had no connection."""
    minted = change.state.minted
    assert minted is not None
    if generation < minted.generation:
        change.tell(worker, minted)
    if change.state.broken:
        change.tell(worker, Lost(generation=minted.generation, workers=change.state.lost))
    elif change.state.due_since is not None:
        change.tell(worker, RegroupDue(generation=minted.generation))


def _hear(change: Change, name: str, message: FromWorker) -> None:
    worker = change.state.workers.get(name)
    if worker is None or worker.phase == "lost":
        reason = "no worker of this name is expected" if worker is None else f"{name} was given up: {worker.why}"
        change.refuse(name, reason)
        return
    writes = worker.farewell is not None and worker.farewell.preempted  # a checkpoint, which takes as long as it takes
    if worker.phase == "asked" or (worker.phase == "removed" and not writes):
        return
    worker = change.put(worker, signs=replace(worker.signs, at=change.now))
    match message:
        case Ready() if worker.phase in ("preparing", "ready"):
            _ready(change, worker, message)
        case Ready() if worker.phase == "working" and message.generation == change.state.generation:
            not_reached(change, change.state.agents[worker.agent], message.unreached)
            _ready(change, worker, message)
            change.break_up(worker)
        case Arrived() if worker.phase == "working" and message.generation == change.state.generation:
            _arrived(change, worker, message)
        case Formed() if worker.phase in MEMBER and message.generation == change.state.generation:
            _formed(change, worker, message)
        case Leaving() if worker.phase in (*CANDIDATE, *MEMBER):
            _leave(change, worker)
        case Progress() if worker.phase in MEMBER:
            _progress(change, worker, message)
        case Finished(digest=digest) if worker.phase in MEMBER:
            change.put(worker, phase="finished", digest=digest)
        case Replace() if worker.phase in MEMBER:
            _replace(change, message)
        case Resize(workers=workers) if worker.phase in MEMBER:
            _resize(change, workers, worker.id)


def _ready(change: Change, worker: Worker, message: Ready) -> None:
    if worker.phase != "ready" or worker.loop != message.loop:
        change.set(last_turn=change.state.last_turn + 1, quick=0)
        worker = replace(worker, turn=change.state.last_turn)
        if change.state.minted is not None:
            doubt(change, worker.agent)
    change.put(worker, phase="ready", loop=message.loop, address=message.address)


def _arrived(change: Change, worker: Worker, message: Arrived) -> None:
    not_reached(change, change.state.agents[worker.agent], message.unreached)
    change.put(worker, phase="arrived", arrived=message)
    if change.state.arrival is None:
        change.set(arrival=change.now)
    change.call_members()
    if not message.at_boundary or worker.id not in change.state.formed:
        change.wake_members()  # they may wait for it, and it comes no more


def _formed(change: Change, worker: Worker, message: Formed) -> None:
    if worker.id in change.state.formed:
        return
    seconds = dict(change.state.seconds)
    for part, length in message.seconds.items():
        seconds[part] = max(length, seconds.get(part, 0.0))
    change.set(formed=(*change.state.formed, worker.id), seconds=seconds)
    if {member.id for member in change.state.members} <= set(change.state.formed):
        change.note("formed", generation=change.state.generation, seconds=seconds)


def _leave(change: Change, worker: Worker) -> None:
    if worker.leaving:
        return
    if worker.phase in MEMBER:
        change.depart(worker)
    change.put(worker, leaving=True)
    agent = change.state.agents[worker.agent]
    change.put_agent(agent, given_up=agent.given_up + 1)
    change.note("asked to leave", worker=worker.id, host=worker.host)


def _replace(change: Change, message: Replace) -> None:
    """A member leaves, and its place is filled again. All members say so, that it may outlive any of them."""
    if message.generation != change.state.generation:
        return  # the worker that was meant may have another rank by now
    for worker in change.state.members:
        if change.state.ranks.get(worker.id) == message.rank and not worker.is_faulty:
            change.put(worker, leaving=True, is_faulty=True)
            change.note("replaced", worker=worker.id, host=worker.host, rank=message.rank)


def _progress(change: Change, worker: Worker, message: Progress) -> None:
    signs = replace(worker.signs, step=message.step, samples_per_s=message.samples_per_s, pulse=message.pulse)
    change.put(worker, signs=signs)
    known = change.state.loop
    if message.loop is not None and (known is None or message.loop > known):
        change.set(loop=message.loop)


# -- agents


def _enlist(change: Change, hello: AgentHello) -> None:
    if change.state.over is not None:
        change.tell_agent(hello.agent, change.state.over)
        return
    agent = change.state.agents.get(hello.agent)
    if agent is None:
        agent = Agent(hello.agent, hello.host, hello.workers)
        change.note("agent joined", agent=agent.id, host=agent.host, workers=agent.workers)
    if agent.probes != hello.probes:
        forget_agent(change, agent.id)
    signs = Signs(connected=True, at=change.now)
    change.put_agent(agent, workers=hello.workers, left=False, probes=hello.probes, probing=(), signs=signs)
    change.tell_agent(agent.id, Welcome(joins=change.state.minted is not None))
    theirs = change.workers_of(agent.id)
    for worker in theirs:
        if worker.id not in hello.running:
            _ended_unseen(change, worker)
    known = {worker.id for worker in theirs if worker.phase != "lost"}
    if strangers := tuple(worker for worker in hello.running if worker not in known):
        change.tell_agent(agent.id, End(workers=strangers, how="kill"))


def _ended_unseen(change: Change, worker: Worker) -> None:
    """A worker is gone, and its agent cannot say how: it was away, or never heard that it should start it."""
    if worker.phase in ("asked", "removed", "lost"):
        change.drop(worker)
    elif worker.phase != "finished":
        change.lose(worker, "it ended while its agent was away", ended=True)


def _ended(change: Change, agent: str, ended: WorkerEnded) -> None:
    worker = change.state.workers.get(ended.worker)
    if worker is None or worker.agent != agent:
        return
    if worker.phase in ("removed", "lost"):
        change.drop(worker)
        return
    why, is_error = _why_ended(change.state, worker, ended)
    # A joiner that cannot join, for something that its host lacks, is no reason to end what works.
    is_joiner = worker.joins and worker.phase in CANDIDATE
    if is_error and not is_joiner and not change.state.settings.restart_on_error:
        change.fail(change.blame(worker, why))
    elif worker.phase != "finished":
        change.lose(worker, why, ended=True)


def _why_ended(state: State, worker: Worker, ended: WorkerEnded) -> tuple[str, bool]:
    """Why a worker's process has ended, and whether its script is to blame."""
    if ended.code == 0:
        is_early = not worker.leaving and not state.finished
        return "its script ended before the others'", is_early
    how = f"signal {-ended.code}" if ended.code < 0 else f"code {ended.code}"
    why = f"it ended with {how}" + (f": {ended.error}" if ended.error else "")
    return why, 1 <= ended.code < NOT_STARTED and ended.code != PREEMPTED and bool(ended.error)


def _agent_leaves(change: Change, name: str) -> None:
    agent = change.state.agents.get(name)
    if agent is None or agent.leaving:
        return
    change.put_agent(agent, leaving=True)
    for worker in change.workers_of(name):
        if worker.phase in MEMBER:
            change.depart(worker)
        change.put(worker, leaving=True)
    change.note("agent asked to leave", agent=agent.id, host=agent.host)


# -- people


def _resize(change: Change, workers: int, by: str) -> None:
    before = change.state.size
    if by in change.state.workers and change.state.wanted == change.state.within(workers):
        return  # all members say so, that it may outlive any of them
    change.set(wanted=change.state.within(workers), unreplaced=0)
    for agent in change.state.agents.values():
        change.put_agent(agent, given_up=0)
    change.note("resized", workers=change.state.size, before=before, asked_for=workers, by=by)


def _leave_asked(change: Change, who: str) -> None:
    name = find(change.state, who)
    if name is not None and name in change.state.agents:
        _agent_leaves(change, name)
    for worker in change.state.staying:
        if worker.id == name:
            _leave(change, worker)


def _stop(change: Change) -> None:
    if change.state.stopping:
        return
    change.set(stopping=True)
    for worker in change.state.members + change.state.candidates:
        change.put(worker, leaving=True)
    change.note("asked to stop")


# -- connections and time


def _disconnected(change: Change, worker: str | None, agent: str | None) -> None:
    if worker is not None and (known := change.state.workers.get(worker)) is not None:
        change.put(known, signs=_cut_off(change, known.signs))
    if agent is not None and (host := change.state.agents.get(agent)) is not None:
        change.put_agent(host, signs=_cut_off(change, host.signs))


def _cut_off(change: Change, signs: Signs) -> Signs:
    """Without a connection, which is no sign of life: whoever was silent for long has half the time left."""
    half = change.state.settings.failure_timeout_s / 2
    return replace(signs, connected=False, at=max(signs.at, change.now - half))


def _restart(change: Change) -> None:
    state, signs = change.state, Signs(at=change.now, started=change.now, since=change.now)
    change.set(
        workers={worker.id: replace(worker, signs=signs, unformed=0) for worker in state.workers.values()},
        agents={agent.id: replace(agent, signs=signs) for agent in state.agents.values()},
        due_since=None if state.due_since is None else change.now,
        arrival=None if state.arrival is None else change.now,
        unformed=0,  # a generation that formed meanwhile met in the store that was gone: it counts against nobody
    )
    change.actions.append(Forget() if state.minted is None else Forget(state.generation))  # perhaps it came to nothing
    change.note("coordinator restarted", generation=state.generation)


def _expire(change: Change) -> None:
    for agent in change.state.agents.values():
        if is_past(agent_deadline(change.state, agent), change.now):
            _lose_agent(change, agent)
        elif is_past(probes_deadline(change.state, agent), change.now):
            gave_no_answer(change, agent)
    timeout_s = change.state.settings.failure_timeout_s
    for worker in change.state.workers.values():
        if not is_past(worker_deadline(change.state, worker), change.now):
            continue
        if worker.phase == "removed":
            change.kill(worker, "it did not end")
        elif not worker.signs.connected:
            change.lose(worker, f"it was not connected for {timeout_s:g} s")
        elif change.state.arrival is None:
            change.lose(worker, f"it gave no sign for {timeout_s:g} s")
        else:
            change.lose(worker, f"it did not stop with the others for {timeout_s:g} s")


def _lose_agent(change: Change, agent: Agent) -> None:
    if not agent.left:
        change.note("agent lost", agent=agent.id, host=agent.host)
    for worker in change.workers_of(agent.id):
        if worker.phase in ("removed", "lost"):
            change.drop(worker)
        elif worker.phase != "finished":
            change.lose(worker, f"its agent on host {agent.host} is gone", ended=True)
    change.drop_agent(agent)
