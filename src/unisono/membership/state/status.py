"""The status of a job, for people."""

from dataclasses import asdict
from typing import Any

from unisono.membership.state.rows import CANDIDATE, MEMBER, Worker
from unisono.membership.state.state import State


def find(state: State, who: str) -> str | None:
    """The id of a worker or an agent, by its id or its rank in digits; None if there is none."""
    if who in state.workers or who in state.agents:
        return who
    return next((worker for worker, rank in state.ranks.items() if str(rank) == who), None)


def why_not_replaced(state: State, who: str) -> str:
    """What is in the way of a worker that is to be replaced, for people; empty if nothing is."""
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
    """What is in the way of a checkpoint, for people; empty if nothing is."""
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
    known = state.workers.get(worker)
    return known is not None and known.phase != "lost"


def trains_alone(state: State, worker: str) -> bool:
    """Whether a worker is the only one of the generation that stays: the weights would leave with it."""
    return [member.id for member in state.members if not member.leaving] == [worker]


def status(state: State) -> dict[str, Any]:
    """All that people want to know, for JSON."""
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
        "members": [_of_worker(state, worker, ranks[worker.id]) for worker in workers if worker.id in ranks],
        "others": [_of_worker(state, worker, None) for worker in workers if worker.id not in ranks],
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
        "excluded": [asdict(one) for one in state.excluded],
        "over": None if state.over is None else state.over.model_dump(exclude={"kind"}),
    }


def _phase(state: State) -> str:
    if state.over is not None:
        return "over"
    if state.minted is None:
        return "stopping" if state.stopping or state.preempting else "forming"
    return "training" if state.due_since is None else "regrouping"


def _of_worker(state: State, worker: Worker, rank: int | None) -> dict[str, Any]:
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
