"""The hosts that reach each other, and which workers are left out where they do not.

Before any worker of a new host is started, and again before members stop to take one in, the host's agent probes the
hosts of the members. The members take no part in that. When several hosts begin to train together, their workers probe
the other hosts.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

from unisono.membership.messages import LeftOut, Probe, Probed, Target, Unreached
from unisono.membership.state.state import CANDIDATE, Agent, State
from unisono.membership.state.state_update import StateUpdate, short

FRESH_S = 5.0
"""The age in seconds up to which a probe's result is used before members stop to take workers of a host in."""

ADVICE = (
    "Workers of all hosts connect to each other, at ports that the system chooses: let the firewalls between these "
    "hosts pass them, or name the network interface that the hosts share with GLOO_SOCKET_IFNAME. It is tried again "
    "every {seconds:g} s, and the job goes on meanwhile"
)


def leave_out_unreachable(update: StateUpdate) -> None:
    """Leave out hosts that cannot take part, and have hosts probe again where members have come or gone."""
    if not update.touched_agents:
        return
    changed = {name for name in update.touched_agents if _trains(update.before, name) != _trains(update.state, name)}
    update.touched_agents.clear()
    _leave_out(update)
    if changed:
        begins = any(_trains(update.state, name) for name in changed)
        waiting = [agent for agent in update.state.agents.marked("probed") if begins or agent.id in changed]
        probe(update, [agent for agent in waiting if agent.probing or not agent.left_out])


def _trains(state: State, agent: str) -> bool:
    return state.workers.count_of_agent(agent, "member") > 0


# -- probes


def probe(update: StateUpdate, agents: Iterable[Agent]) -> None:
    """Have hosts without members probe the hosts with members, unless they probe them already."""
    state = update.state
    waiting = [agent for agent in agents if agent.probes and not agent.leaving and not _trains(state, agent.id)]
    if not waiting:
        return
    hosts = [host for host in state.agents.marked("probed") if _trains(state, host.id) and not host.left_out]
    targets = [Target(agent=host.id, host=host.host, address=host.probes) for host in hosts]
    for agent in waiting:
        if new_targets := tuple(target for target in targets if target.agent not in agent.probing):
            probing = (*agent.probing, *(target.agent for target in new_targets))
            update.put_agent(agent, probing=probing, tried_at=update.now)
            update.send_to_agent(agent.id, Probe(targets=new_targets))


def probe_unless_recent(update: StateUpdate, name: str) -> None:
    """Have a host probe again, since its connections may have changed, unless it has just done so."""
    agent = update.state.agents[name]
    if agent.tried_at < update.now - FRESH_S:
        probe(update, [agent])


def record_probe_reply(update: StateUpdate, agent: Agent, reply: Probed) -> None:
    """Record an agent's reply about the hosts that it was asked to probe."""
    requested = {*agent.probing}
    reached = [other for other in reply.reached if other in requested]
    unreached = [other for other in reply.unreached if other.agent in requested]
    answered = {*reached, *(other.agent for other in unreached)}
    probing = tuple(other for other in agent.probing if other not in answered)
    update.put_agent(agent, probing=probing, tried_at=update.now)
    _record_reachability(update, agent.id, dict.fromkeys(reached, ""))
    record_unreached(update, agent, unreached)


def record_probe_timeout(update: StateUpdate, name: str) -> None:
    """Record hosts as not reached, since an agent was asked to probe them and has not replied in time."""
    agent = update.state.agents[name]
    silent = [Unreached(agent=other, why="its agent has not said whether it does") for other in agent.probing]
    record_probe_reply(update, agent, Probed(unreached=tuple(silent)))


def probe_left_out_again(update: StateUpdate) -> None:
    """Have hosts probe again that were left out some time ago.

    Hosts without members are not probed. So two such hosts count as connected again until a generation with workers of
    both shows that they are not.
    """
    state, last = update.state, update.now - update.state.settings.failure_timeout_s
    out = state.agents.marked("out")
    due = dict.fromkeys(agent.id for agent in out if not agent.probing and agent.tried_at <= last)
    _forget(update, lambda ends: any(end in due for end in ends) and not any(_trains(state, end) for end in ends))
    probe(update, update.state.agents.get_many(due))


# -- which hosts reach each other


def record_unreached(update: StateUpdate, agent: Agent, unreached: Sequence[Unreached]) -> None:
    """Record the hosts that an agent did not reach, or a worker of it while its generation formed."""
    reasons: dict[str, str] = {}
    for host in unreached:
        other = update.state.agents.get(host.agent)
        if other is not None and other.id != agent.id:
            where = f" at {other.probes}" if other.probes else ""
            reasons[other.id] = short(f"{agent.host} does not reach {other.host}{where}: {host.why}")
    _record_reachability(update, agent.id, reasons)


def _record_reachability(update: StateUpdate, name: str, reasons: Mapping[str, str]) -> None:
    """Record why an agent does not reach others (empty if it does), in the row of the agent that came later."""
    for other, why in reasons.items():
        earlier, later = sorted(update.state.agents.get_many([name, other]), key=lambda agent: agent.number)
        why_before = later.unreached.get(earlier.id, "")
        if why and not why_before:
            update.journal("no connection", agents=[name, other], why=why)
        elif why_before and not why:
            update.journal("connected again", agents=[name, other])
        if why or why_before:
            rest = {host: reason for host, reason in later.unreached.items() if host != earlier.id}
            update.put_agent(later, unreached={**rest, earlier.id: why} if why else rest)


def drop_probe_results(update: StateUpdate, name: str) -> None:
    """Drop all results of probes of an agent that has another address now, or is gone."""
    _forget(update, lambda ends: name in ends)
    for agent in update.state.agents.values():
        probing = () if agent.id == name else tuple(other for other in agent.probing if other != name)
        if probing != agent.probing:
            update.put_agent(agent, probing=probing)


def _forget(update: StateUpdate, is_void: Callable[[tuple[str, str]], bool]) -> None:
    for agent in update.state.agents.marked("cut"):
        rest = {other: why for other, why in agent.unreached.items() if not is_void((agent.id, other))}
        if len(rest) < len(agent.unreached):
            update.put_agent(agent, unreached=rest)


# -- who is left out


def _leave_out(update: StateUpdate) -> None:
    agents = update.state.agents
    if not agents.count("cut") and not agents.count("out"):
        return
    gaps = {(agent.id, other): why for agent in agents.marked("cut") for other, why in agent.unreached.items()}
    out = _left_out(update.state, gaps)
    for agent in agents.values():
        why = agent.left_out or _reason(agent.id, gaps, out) if agent.id in out else ""
        if bool(why) != bool(agent.left_out):
            _tell(update, agent, why)
        for worker in update.state.workers.of_agent(agent.id) if why else ():
            if worker.phase in CANDIDATE:
                update.exclude(worker, why)


def _tell(update: StateUpdate, agent: Agent, why: str) -> None:
    update.put_agent(agent, left_out=why, tried_at=update.now if why else agent.tried_at)
    if not why:
        probe_unless_recent(update, agent.id)  # the host that it did not reach may just be gone
    update.journal("left out" if why else "not left out any more", agent=agent.id, host=agent.host, why=why)
    advice = ADVICE.format(seconds=update.state.settings.failure_timeout_s)
    update.send_to_agent(agent.id, LeftOut(reason=f"{why}. {advice}" if why else ""))


def _reason(agent: str, gaps: Mapping[tuple[str, str], str], out: frozenset[str]) -> str:
    """Why an agent that is left out and one that stays do not reach each other."""
    return next(why for ends, why in gaps.items() if agent in ends and not out.issuperset(ends))


def _left_out(state: State, gaps: Iterable[tuple[str, str]]) -> frozenset[str]:
    """The agents without which all others reach each other.

    They are left out one by one: first agents without the weights, among them those in most gaps, among these the one
    that came last. An agent whose gaps are all to other agents that are left out is taken back in the end.
    """
    holding, left = _agents_with_weights(state), {*gaps}
    others: dict[str, set[str]] = {}
    for ends in left:
        for name, other in (ends, ends[::-1]):
            others.setdefault(name, set()).add(other)
    out: list[str] = []
    while left:
        named = Counter(chain.from_iterable(left))
        out.append(max(named, key=lambda name: (name not in holding, named[name], state.agents[name].number)))
        left = {ends for ends in left if out[-1] not in ends}
    for name in out[::-1]:
        if others[name] <= {*out}:
            out.remove(name)
    return frozenset(out)


def _agents_with_weights(state: State) -> set[str]:
    """The agents whose workers hold the weights, or are the first workers, which make them."""
    fresh = set() if state.minted is None else {seat.worker for seat in state.minted.roster if seat.joins}
    return {member.agent for member in state.members if member.id not in fresh or state.has_formed(member)}
