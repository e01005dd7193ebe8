"""What holds of every change of the coordinator's state."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, get_args

from simulation.settings import SHARDS
from unisono.jsonl import read_lines
from unisono.membership import state as machine
from unisono.membership.state.state import Phase

if TYPE_CHECKING:
    from collections.abc import Hashable

    from simulation.world import World
    from unisono.membership.state.member_table import Table
    from unisono.membership.state.roster import MintedGeneration

PHASES = get_args(Phase)


def check(world: World, before: machine.State, after: machine.State) -> None:
    """What the coordinator has decided makes sense in this world."""
    assert after.generation >= before.generation
    check_indexes(after)
    assert {*after.arrivals, *after.formed_by} <= {member.id for member in after.members}
    assert {*after.heard_at} == {*after.workers}
    for agent in after.agents.values():
        mine = [worker for worker in after.workers.values() if worker.agent == agent.id]
        assert len(mine) <= max(agent.workers, len([w for w in before.workers.values() if w.agent == agent.id]))
    if after.generation > before.generation and after.minted is not None:
        assert after.generation == before.generation + 1
        world.minted[after.generation] = after.minted
        _check_minted(world, before, after.minted)
        _check_progress(world, before, after.minted)


def check_indexes(state: machine.State) -> None:
    """What stands beside the rows is what one finds by looking at all of them."""
    tables: list[Table[Any]] = [state.workers, state.agents]
    for table in tables:
        assert table.weight == sum(map(table.weigh, table.values()))
        found: dict[Hashable, set[str]] = {}
        for row in table.values():
            for mark in table.marks(row):
                found.setdefault(mark, set()).add(row.id)
        for mark, ids in found.items():
            assert {row.id for row in table.marked(mark)} == ids
            assert table.count(mark) == len(ids)
    assert state.workers.count_in_phases(PHASES) == len(state.workers)
    for agent in state.agents.values():
        assert agent.started == len([worker for worker in state.workers.values() if worker.agent == agent.id])
        assert {*agent.probing, *agent.unreached} <= {*state.agents} - {agent.id}
        assert not agent.probing or not state.workers.count_of_agent(agent.id, "member"), "members wait for a probe"


def _check_progress(world: World, before: machine.State, minted: MintedGeneration) -> None:
    """What has failed with all alive is not tried for ever."""
    last = world.groups.get(before.generation)
    failed = last is not None and last.connected != last.names == {seat.worker for seat in minted.roster}
    world.repeated = world.repeated + 1 if failed else 0
    assert world.repeated <= 2, "the same workers fail to form a generation again and again"


def _check_minted(world: World, before: machine.State, minted: MintedGeneration) -> None:
    names = [seat.worker for seat in minted.roster]
    assert len(set(names)) == len(names) <= SHARDS
    assert minted.bounds[0] == 0
    assert minted.bounds[-1] == SHARDS
    assert len(minted.bounds) == len(names) + 1
    acts = [seat.acts for seat in minted.roster]
    assert acts[minted.source] == max(acts), "the source is not the one that has come furthest"
    newcomers = [seat for seat in minted.roster if seat.joins and before.workers[seat.worker].phase == "ready"]
    if before.minted is None or not newcomers:
        return
    next_act = world.life.acts[acts[minted.source]]
    assert (next_act.loop, next_act.kind) == (minted.loop, "step"), "joins where nobody can"


def check_kept(world: World) -> None:
    """What the coordinator has kept of the whole job is whole, and no more than it needs."""
    events = [line for line in read_lines(world.folder / "journal.jsonl") if line["event"] == "minted"]
    numbers = [line["generation"] for line in events]
    assert all(later == earlier + 1 for earlier, later in pairwise(numbers)), "the journal lacks or repeats a line"
    assert set(world.groups) <= set(numbers)
    keys = (entry["key"] for entry in world.service.coordinator.values.entries() if "key" in entry)
    oldest = f"g{world.service.state.generation}/"
    assert all(key.startswith(("run/", oldest)) for key in keys), "keys of an old generation are kept"
