"""The time for which each worker and each agent may be silent."""

from dataclasses import replace

from unisono.membership.state.layered_map import LayeredMap
from unisono.membership.state.rows import Agent, Worker, changed
from unisono.membership.state.state import State

LONGER = 3.0
"""How many times as long as ever before a worker may take for something."""


def next_deadline(state: State) -> float | None:
    """When a tick is needed at the latest, whatever happens before; None while nothing is waited for."""
    return None if state.over is not None else state.tick_at


def next_tick(state: State, now: float) -> float | None:
    """When the next tick is needed, seen from one; None while there is nobody to wait for.

    What happens until then only puts deadlines off, or makes new ones, all of which lie at least half a timeout ahead:
    so each is met to the moment although nobody looks at all of them but a tick. A coordinator that was itself held up
    can tell, since ticks are never further apart.
    """
    if not state.workers and not state.agents:
        return None
    waits = waited_since(state)
    found = [worker_deadline(state, worker, waits) for worker in state.workers.values()]
    found += [agent_deadline(state, agent) for agent in state.agents.values()]
    found += [probes_deadline(state, agent) for agent in state.agents.values()]
    known = [deadline for deadline in found if deadline is not None]
    return min([*known, now + state.settings.failure_timeout_s / 4])


def waited_since(state: State) -> float | None:
    """Since when somebody has been ready; None while nobody is."""
    return min((worker.signs.since for worker in state.workers.those(("ready",))), default=None)


def worker_deadline(state: State, worker: Worker, waits: float | None) -> float | None:
    """When this worker has been silent for too long; None while nothing is expected of it.

    Args:
        state: the state.
        worker: the worker.
        waits: since when somebody has been ready, as :func:`waited_since` says.
    """
    heard_at, timeout_s = state.heard_at.get(worker.id, 0.0), state.settings.failure_timeout_s
    match worker.phase:
        case "working" if worker.id not in state.arrivals:
            # When others have arrived, it has to as well, and other signs of life count no more.
            return min(heard_at, heard_at if state.arrival is None else state.arrival) + timeout_s
        case "asked" | "preparing" if state.minted is None and not worker.joins:
            return _first_deadline(state, worker, waits)
        case "preparing" | "ready" | "working":
            return None if worker.signs.connected else heard_at + timeout_s
        case "removed":
            return heard_at + timeout_s
    return None


def _first_deadline(state: State, worker: Worker, waits: float | None) -> float | None:
    """Once connected, it has nothing to do but to be ready. Before, it may take its time while nobody waits for it."""
    since = max(worker.signs.since, worker.signs.started)
    if worker.phase == "asked":
        if waits is None:
            return None
        since = max(since, waits)
    return since + state.settings.failure_timeout_s


def hangs(state: State, worker: Worker) -> bool:
    """Whether a member's main thread has come no further for too long, and nobody else is the reason.

    Too long is the timeout, or longer where it has worked longer at one thing before. In the script's own work, which
    may take as long as it takes, it hangs only if others wait for it.
    """
    pulse = worker.signs.pulse
    if not state.is_at_work(worker) or pulse.doing == "wait":
        return False
    if pulse.still_s <= max(state.settings.failure_timeout_s, LONGER * pulse.longest_s):
        return False
    return pulse.doing == "call" or state.workers.count("waits") > 0


def agent_deadline(state: State, agent: Agent) -> float | None:
    """When this agent has been away for too long; None while it is there."""
    return None if agent.signs.connected else agent.signs.at + state.settings.failure_timeout_s


def probes_deadline(state: State, agent: Agent) -> float | None:
    """When an agent has taken too long to probe others, which ends sooner; None while it probes none."""
    return agent.tried_at + 2 * state.settings.failure_timeout_s if agent.probing else None


def is_past(deadline: float | None, now: float) -> bool:
    """Whether it has come."""
    return deadline is not None and deadline <= now


def excused(state: State, now: float) -> State:
    """The state, with all that is waited for put off if the coordinator was held up: it heard nobody meanwhile."""
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
