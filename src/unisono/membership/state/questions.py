"""Questions to the state: deadlines of workers and agents, the worker of a name, and the status of the job."""

from dataclasses import asdict, replace
from typing import Any

from unisono.membership.state.member_table import LayeredMap
from unisono.membership.state.state import CANDIDATE, MEMBER, Agent, State, Worker, changed

LONGER = 3.0
"""A worker hangs only after this factor times the longest time without progress that it ever had."""


def next_deadline(state: State) -> float | None:
    """The time at which a tick is needed, whatever happens before; None when the job is over or has no deadline."""
    return None if state.over is not None else state.tick_at


def next_tick(state: State, now: float) -> float | None:
    """The time of the next tick, computed at a tick; None while there are no workers and no agents.

    Events until then only put deadlines off, or make new ones that lie at least half a timeout ahead. So no deadline is
    missed although only ticks look at all of them. Since ticks are at most a quarter of a timeout apart, a coordinator
    that was itself held up notices it.
    """
    if not state.workers and not state.agents:
        return None
    waiting_since = waited_since(state)
    deadlines = [worker_deadline(state, worker, waiting_since) for worker in state.workers.values()]
    deadlines += [agent_deadline(state, agent) for agent in state.agents.values()]
    deadlines += [probes_deadline(state, agent) for agent in state.agents.values()]
    pending = [deadline for deadline in deadlines if deadline is not None]
    return min([*pending, now + state.settings.failure_timeout_s / 4])


def waited_since(state: State) -> float | None:
    """The time since which a worker has been ready; None while no worker is."""
    return min((worker.signs.since for worker in state.workers.in_phases(("ready",))), default=None)


def worker_deadline(state: State, worker: Worker, waiting_since: float | None) -> float | None:
    """The time at which this worker has been silent for too long; None while no sign of it is expected."""
    heard_at, timeout_s = state.heard_at.get(worker.id, 0.0), state.settings.failure_timeout_s
    match worker.phase:
        case "working" if worker.id not in state.arrivals:
            # Once others have arrived it has to arrive as well: other signs of life do not count any more.
            return min(heard_at, heard_at if state.arrival is None else state.arrival) + timeout_s
        case "asked" | "preparing" if state.minted is None and not worker.joins:
            return _first_deadline(state, worker, waiting_since)
        case "preparing" | "ready" | "working":
            return None if worker.signs.connected else heard_at + timeout_s
        case "removed":
            return heard_at + timeout_s
    return None


def _first_deadline(state: State, worker: Worker, waiting_since: float | None) -> float | None:
    """The deadline before the first generation. A worker that has not connected has one only while others are ready."""
    since = max(worker.signs.since, worker.signs.started)
    if worker.phase == "asked":
        if waiting_since is None:
            return None
        since = max(since, waiting_since)
    return since + state.settings.failure_timeout_s


def hangs(state: State, worker: Worker) -> bool:
    """Whether a member's main thread has made no progress for too long, although it waits for no other worker.

    Too long is the timeout, or :data:`LONGER` times its longest time without progress if that is more. The script's own
    work may take any time: there a worker hangs only if others wait for it.
    """
    pulse = worker.signs.pulse
    if not state.is_at_work(worker) or pulse.doing == "wait":
        return False
    if pulse.still_s <= max(state.settings.failure_timeout_s, LONGER * pulse.longest_s):
        return False
    return pulse.doing == "call" or state.workers.count("waits") > 0


def agent_deadline(state: State, agent: Agent) -> float | None:
    """The time at which this agent has been away for too long; None while it is connected."""
    return None if agent.signs.connected else agent.signs.at + state.settings.failure_timeout_s


def probes_deadline(state: State, agent: Agent) -> float | None:
    """The time at which an agent has taken too long to probe others; None while it probes none."""
    return agent.tried_at + 2 * state.settings.failure_timeout_s if agent.probing else None


def is_past(deadline: float | None, now: float) -> bool:
    """Whether a deadline has come."""
    return deadline is not None and deadline <= now


def with_late_deadlines(state: State, now: float) -> State:
    """The state, with all deadlines put off if the coordinator was held up: it received no messages meanwhile."""
    gap = now - state.now
    if gap <= state.settings.failure_timeout_s / 2:
        return state

    def waiting(worker: Worker) -> Worker:
        return changed(worker, signs=changed(worker.signs, since=worker.signs.since + gap))

    def away(agent: Agent) -> Agent:
        return changed(agent, signs=replace(agent.signs, at=agent.signs.at + gap))

    return changed(
        state,
        workers=state.workers.with_rows(map(waiting, state.candidates)),
        heard_at=LayeredMap({name: at + gap for name, at in state.heard_at.items()}),
        agents=state.agents.with_rows(map(away, state.agents.values())),
        arrival=None if state.arrival is None else state.arrival + gap,
    )


# The status of a job, for people.


def find(state: State, who: str) -> str | None:
    """The id of the worker or agent with this id, or of the worker with this rank in digits; None if there is none."""
    if who in state.workers or who in state.agents:
        return who
    return next((worker for worker, rank in state.ranks.items() if str(rank) == who), None)


def why_not_replaced(state: State, who: str) -> str:
    """The reason, for people, why a worker cannot be replaced; empty if it can."""
    if state.over is not None or state.stopping:
        return "the job is over" if state.over is not None else "all workers leave: the job stops"
    if who in state.agents:
        return f"{who} is the agent of a host: name one of its workers"
    worker = state.workers.get(find(state, who) or "")
    if worker is None:
        return f"{who} is gone already"
    if worker.phase not in (*MEMBER, *CANDIDATE):
        return f"{worker.id} is {worker.phase} already"
    if worker.leaving:
        return f"{worker.id} leaves already"
    if trains_alone(state, worker.id):
        return (
            f"{worker.id} trains alone, and the job would leave with it: have another worker first (unisono resize 2)"
        )
    return ""


def why_no_checkpoint(state: State) -> str:
    """The reason, for people, why no checkpoint can be written; empty if one can."""
    if state.over is not None:
        return "the job is over"
    main = main_worker(state)
    if main is None:
        return "nobody trains now who could write a checkpoint"
    return "" if main.phase in MEMBER else f"the main worker is {main.phase}: ask again when another one is"


def main_worker(state: State) -> Worker | None:
    """The worker with rank 0; None before there is one."""
    return next((state.workers.get(worker) for worker, rank in state.ranks.items() if rank == 0), None)


def takes_part(state: State, worker: str) -> bool:
    """Whether a worker is expected and not given up."""
    row = state.workers.get(worker)
    return row is not None and row.phase != "lost"


def trains_alone(state: State, worker: str) -> bool:
    """Whether a worker is the only one of the generation that stays: the weights would leave with it."""
    return [member.id for member in state.members if not member.leaving] == [worker]


def status(state: State) -> dict[str, Any]:
    """The status of the job for people, as values for JSON."""
    ranks = state.ranks
    workers = sorted(state.workers.values(), key=lambda worker: ranks.get(worker.id, len(ranks)))
    return {
        "generation": state.generation,
        "phase": _phase(state),
        "wanted": state.size,
        "smallest": state.limits[0],
        "largest": state.limits[1],
        "shards": state.shards,
        "devices_per_worker": state.settings.devices,
        "restarts": state.restarts,
        "members": [_worker_status(state, worker, ranks[worker.id]) for worker in workers if worker.id in ranks],
        "others": [_worker_status(state, worker, None) for worker in workers if worker.id not in ranks],
        "agents": [
            {
                "agent": agent.id,
                "host": agent.host,
                "workers": agent.workers,
                "connected": agent.signs.connected,
                "leaving": agent.leaving,
                "left_out": agent.left_out,
            }
            for agent in state.agents.values()
        ],
        "excluded": [asdict(excluded) for excluded in state.excluded],
        "over": None if state.over is None else state.over.model_dump(exclude={"kind"}),
    }


def _phase(state: State) -> str:
    if state.over is not None:
        return "over"
    if state.minted is None:
        return "stopping" if state.stopping or state.preempting else "forming"
    return "training" if state.due_since is None else "regrouping"


def _worker_status(state: State, worker: Worker, rank: int | None) -> dict[str, Any]:
    return {
        "id": worker.id,
        "rank": rank,
        "host": worker.host,
        "pid": worker.pid,
        "agent": worker.agent,
        "phase": state.phase_of(worker),
        "connected": worker.signs.connected,
        "leaving": worker.leaving,
        "step": worker.signs.step,
        "samples_per_s": worker.signs.samples_per_s,
    }
