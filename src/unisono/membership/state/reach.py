"""The hosts that reach each other, and which workers are left out where they do not.

Before any worker of a new host is started, and again before members stop for one, its agent probes the other hosts. No
member knows of that.
"""

from collections.abc import Iterator, Sequence

from unisono.membership.agent_messages import LeftOut, Probe, Probed
from unisono.membership.messages import Target, Unreached
from unisono.membership.state.cover import lightest_cover
from unisono.membership.state.state import CANDIDATE, MEMBER, Agent, Link, State
from unisono.membership.state.state_update import StateUpdate, short

FRESH_S = 5.0
"""How long a probe is believed before members are stopped for a host, in seconds."""

ADVICE = (
    "Workers of all hosts connect to each other, at ports that the system chooses: let the firewalls between these "
    "hosts pass them, or name the network interface that the hosts share with GLOO_SOCKET_IFNAME. It is tried again "
    "every {seconds:g} s, and the job goes on meanwhile"
)


def keep_in_reach(update: StateUpdate) -> None:
    """Have hosts probed whose connections are not known, and leave out those without which all others are connected."""
    _forget(update)
    unknown = _probe(update)
    _leave_out(update)
    for agent in update.state.agents.values():
        if agent.untried != (agent.id in unknown):
            update.put_agent(agent, untried=agent.id in unknown)


def doubt(update: StateUpdate, agent: str) -> None:
    """Have a host probed again before members stop for it: its connections may have changed since."""
    known = [link for link in update.state.links if agent in (link.one, link.other) and not link.why]
    _drop(update, [link for link in known if link.at < update.now - FRESH_S])


def probed(update: StateUpdate, agent: Agent, found: Probed) -> None:
    """What an agent has found out about those that it was asked to probe."""
    for other in found.reached:
        if other in agent.probing and other in update.state.agents:
            _learn(update, agent.id, other, "")
    unreached = [each for each in found.unreached if each.agent in agent.probing]
    not_reached(update, agent, unreached)
    answered = {*found.reached, *(each.agent for each in unreached)}
    agent = update.state.agents[agent.id]
    update.put_agent(agent, probing=tuple(other for other in agent.probing if other not in answered))


def not_reached(update: StateUpdate, agent: Agent, unreached: Sequence[Unreached]) -> None:
    """An agent, or a worker of it while its generation formed, did not reach these hosts."""
    for each in unreached:
        other = update.state.agents.get(each.agent)
        if other is not None and other is not agent:
            where = f" at {other.probes}" if other.probes else ""
            _learn(update, agent.id, other.id, short(f"{agent.host} does not reach {other.host}{where}: {each.why}"))


def gave_no_answer(update: StateUpdate, agent: Agent) -> None:
    """An agent was asked to probe others, and says nothing about them."""
    silent = [Unreached(agent=other, why="its agent has not said whether it does") for other in agent.probing]
    not_reached(update, agent, silent)
    update.put_agent(update.state.agents[agent.id], probing=())


def forget_agent(update: StateUpdate, agent: str) -> None:
    """An agent has another address, or is gone."""
    _drop(update, [link for link in update.state.links if agent in (link.one, link.other)])


# -- links


def _learn(update: StateUpdate, one: str, other: str, why: str) -> None:
    known = _links(update.state).get(frozenset((one, other)))
    if why and (known is None or not known.why):
        update.note("no connection", agents=[one, other], why=why)
    elif known is not None and known.why and not why:
        update.note("connected again", agents=[one, other])
    _drop(update, [] if known is None else [known])
    update.set(links=(*update.state.links, Link(one, other, why, update.now)))


def _drop(update: StateUpdate, dropped: Sequence[Link]) -> None:
    if dropped:
        update.set(links=tuple(link for link in update.state.links if link not in dropped))


def _links(state: State) -> dict[frozenset[str], Link]:
    return {frozenset((link.one, link.other)): link for link in state.links}


def _at_work(state: State) -> set[str]:
    """Agents with members."""
    return {member.agent for member in state.members}


def _forget(update: StateUpdate) -> None:
    """Links of agents that are gone; and that members are connected goes without saying."""
    state = update.state
    if not state.links:
        return
    at_work, there = _at_work(state), {agent.id for agent in state.agents.values() if not agent.left}
    kept = [
        link
        for link in state.links
        if {link.one, link.other} <= there and (link.why or not {link.one, link.other} <= at_work)
    ]
    if len(kept) < len(state.links):
        update.set(links=tuple(kept))


# -- probes


def _probe(update: StateUpdate) -> set[str]:
    """Have pairs of hosts probed, each by the agent that came later.

    Returns:
        the agents of which it is not known whether they reach all others that have workers.
    """
    state, known = update.state, _links(update.state)
    with_workers = {worker.agent for worker in state.workers.values() if worker.phase in (*CANDIDATE, *MEMBER)}
    unknown: set[str] = set()
    wanted: dict[str, list[Agent]] = {}
    for earlier, later in _uncertain(state):
        link = known.get(frozenset((earlier.id, later.id)))
        if link is None:
            for one, other in ((earlier, later), (later, earlier)):
                if other.id in with_workers:
                    unknown.add(one.id)
        is_due = link is None or (link.why and link.at + state.settings.failure_timeout_s <= update.now)
        if is_due and earlier.id not in later.probing and earlier.signs.connected and later.signs.connected:
            wanted.setdefault(later.id, []).append(earlier)
    for name, others in wanted.items():
        agent = update.state.agents[name]
        targets = tuple(Target(agent=other.id, host=other.host, address=other.probes) for other in others)
        update.put_agent(agent, probing=(*agent.probing, *(other.id for other in others)), probing_since=update.now)
        update.tell_agent(name, Probe(targets=targets))
    return unknown


def _uncertain(state: State) -> Iterator[tuple[Agent, Agent]]:
    """Pairs of agents, first who came first, that answer probes and of which one at least has no members."""
    at_work = _at_work(state)
    agents = [agent for agent in state.agents.values() if agent.probes and not agent.leaving]
    for place, agent in enumerate(agents):
        if agent.id not in at_work:
            yield from ((earlier, agent) for earlier in agents[:place])
            yield from ((agent, later) for later in agents[place + 1 :] if later.id in at_work)


# -- who is left out


def _leave_out(update: StateUpdate) -> None:
    gaps = [link for link in update.state.links if link.why]
    out = lightest_cover([(link.one, link.other) for link in gaps], _weights(update.state)) if gaps else frozenset()
    for agent in update.state.agents.values():
        why = _reason(update.state, agent, gaps, out) if agent.id in out else ""
        if bool(why) != bool(agent.left_out):
            update.put_agent(agent, left_out=why)
            update.note("left out" if why else "not left out any more", agent=agent.id, host=agent.host, why=why)
            advice = ADVICE.format(seconds=update.state.settings.failure_timeout_s)
            update.tell_agent(agent.id, LeftOut(reason=f"{why}. {advice}" if why else ""))
        for worker in update.workers_of(agent.id) if why else ():
            if worker.phase in CANDIDATE:
                update.exclude(worker, why)


def _reason(state: State, agent: Agent, gaps: Sequence[Link], out: frozenset[str]) -> str:
    if agent.left_out:
        return agent.left_out
    mine = [link for link in gaps if agent.id in (link.one, link.other)]
    telling = [link for link in mine if not {link.one, link.other} <= out] or mine
    return telling[0].why


def _weights(state: State) -> dict[str, int]:
    """What it costs to go on without the workers of each agent.

    Whoever holds the weights counts most; among equals the source's host stays, then the one with more workers on the
    way, with more room, and that came first. Before the first generation the room counts most.
    """
    source = "" if state.minted is None else state.minted.roster[state.minted.source].agent
    names = sorted(state.agents, key=lambda name: name != source)
    holding, working = _counted(state)
    weights = {}
    for place, name in enumerate(names):
        counts = [holding.get(name, 0), int(name == source), working.get(name, 0), state.agents[name].room]
        weight = 0
        for count in counts if state.minted is not None else counts[::-1]:
            weight = (weight << 20) + count
        # A bit of its own for each agent, so that no two sets weigh the same: the higher, the sooner it came.
        weights[name] = (weight << len(names)) + (1 << (len(names) - 1 - place))
    return weights


def _counted(state: State) -> tuple[dict[str, int], dict[str, int]]:
    """Of each agent, how many workers hold the weights, and how many take part or are about to."""
    fresh = set() if state.minted is None else {seat.worker for seat in state.minted.roster if seat.joins}
    holding: dict[str, int] = {}
    working: dict[str, int] = {}
    for worker in state.workers.values():
        if worker.phase in MEMBER and (worker.id not in fresh or worker.id in state.formed):
            holding[worker.agent] = holding.get(worker.agent, 0) + 1
        if worker.phase in (*CANDIDATE, *MEMBER):
            working[worker.agent] = working.get(worker.agent, 0) + 1
    return holding, working
