"""The hosts that reach each other, and which workers are left out where they do not.

Before any worker of a new host is started, and again before members stop for one, its agent probes the hosts of the
members. No member knows of that. Hosts that begin to train together are probed by their workers.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

from unisono.membership.messages import LeftOut, Probe, Probed, Target, Unreached
from unisono.membership.state.state import CANDIDATE, Agent, State
from unisono.membership.state.state_update import StateUpdate, short

FRESH_S = 5.0
"""How long a probe is believed before members are stopped for a host, in seconds."""

ADVICE = (
    "Workers of all hosts connect to each other, at ports that the system chooses: let the firewalls between these "
    "hosts pass them, or name the network interface that the hosts share with GLOO_SOCKET_IFNAME. It is tried again "
    "every {seconds:g} s, and the job goes on meanwhile"
)


def keep_in_reach(update: StateUpdate) -> None:
    """Leave out hosts that cannot take part, and have others probe where members have come or gone."""
    if not update.moved:
        return
    turned = {name for name in update.moved if _trains(update.before, name) != _trains(update.state, name)}
    update.moved.clear()
    _leave_out(update)
    if turned:
        begins = any(_trains(update.state, name) for name in turned)
        waiting = [agent for agent in update.state.agents.marked("probed") if begins or agent.id in turned]
        probe(update, [agent for agent in waiting if agent.probing or not agent.left_out])


def _trains(state: State, agent: str) -> bool:
    return state.workers.at(agent, "member") > 0


# -- probes


def probe(update: StateUpdate, agents: Iterable[Agent]) -> None:
    """Have hosts without members probe those that have some, unless they do already."""
    state = update.state
    waiting = [agent for agent in agents if agent.probes and not agent.leaving and not _trains(state, agent.id)]
    if not waiting:
        return
    hosts = [host for host in state.agents.marked("probed") if _trains(state, host.id) and not host.left_out]
    targets = [Target(agent=host.id, host=host.host, address=host.probes) for host in hosts]
    for agent in waiting:
        if asked := tuple(target for target in targets if target.agent not in agent.probing):
            probing = (*agent.probing, *(target.agent for target in asked))
            update.put_agent(agent, probing=probing, tried_at=update.now)
            update.tell_agent(agent.id, Probe(targets=asked))


def doubt(update: StateUpdate, name: str) -> None:
    """Have a host probe once more, unless it has lately: its connections may have changed since."""
    agent = update.state.agents[name]
    if agent.tried_at < update.now - FRESH_S:
        probe(update, [agent])


def probed(update: StateUpdate, agent: Agent, reply: Probed) -> None:
    """What an agent says about those that it was asked to probe."""
    asked = {*agent.probing}
    reached = [other for other in reply.reached if other in asked]
    unreached = [other for other in reply.unreached if other.agent in asked]
    answered = {*reached, *(other.agent for other in unreached)}
    probing = tuple(other for other in agent.probing if other not in answered)
    update.put_agent(agent, probing=probing, tried_at=update.now)
    _learn(update, agent.id, dict.fromkeys(reached, ""))
    not_reached(update, agent, unreached)


def gave_no_answer(update: StateUpdate, name: str) -> None:
    """An agent was asked to probe others, and says nothing about them."""
    agent = update.state.agents[name]
    silent = [Unreached(agent=other, why="its agent has not said whether it does") for other in agent.probing]
    probed(update, agent, Probed(unreached=tuple(silent)))


def try_again(update: StateUpdate) -> None:
    """Have hosts probe again that were left out some time ago.

    Where neither of two hosts has members, only a generation can tell whether they reach each other by now.
    """
    state, last = update.state, update.now - update.state.settings.failure_timeout_s
    out = state.agents.marked("out")
    due = dict.fromkeys(agent.id for agent in out if not agent.probing and agent.tried_at <= last)
    _forget(update, lambda ends: any(end in due for end in ends) and not any(_trains(state, end) for end in ends))
    probe(update, update.state.agents.of_ids(due))


# -- what is known


def not_reached(update: StateUpdate, agent: Agent, unreached: Sequence[Unreached]) -> None:
    """An agent, or a worker of it while its generation formed, did not reach these hosts."""
    reasons: dict[str, str] = {}
    for host in unreached:
        other = update.state.agents.get(host.agent)
        if other is not None and other.id != agent.id:
            where = f" at {other.probes}" if other.probes else ""
            reasons[other.id] = short(f"{agent.host} does not reach {other.host}{where}: {host.why}")
    _learn(update, agent.id, reasons)


def _learn(update: StateUpdate, name: str, reasons: Mapping[str, str]) -> None:
    """Of each other agent, why an agent does not reach it, or nothing if it does. The later of the two keeps it."""
    for other, why in reasons.items():
        earlier, later = sorted(update.state.agents.of_ids([name, other]), key=lambda agent: agent.number)
        known = later.unreached.get(earlier.id, "")
        if why and not known:
            update.note("no connection", agents=[name, other], why=why)
        elif known and not why:
            update.note("connected again", agents=[name, other])
        if why or known:
            rest = {host: reason for host, reason in later.unreached.items() if host != earlier.id}
            update.put_agent(later, unreached={**rest, earlier.id: why} if why else rest)


def forget_agent(update: StateUpdate, name: str) -> None:
    """An agent has another address, or is gone."""
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
    """A host is left out for this reason, or not left out any more."""
    update.put_agent(agent, left_out=why, tried_at=update.now if why else agent.tried_at)
    if not why:
        doubt(update, agent.id)  # it may have been left out for one that is gone
    update.note("left out" if why else "not left out any more", agent=agent.id, host=agent.host, why=why)
    advice = ADVICE.format(seconds=update.state.settings.failure_timeout_s)
    update.tell_agent(agent.id, LeftOut(reason=f"{why}. {advice}" if why else ""))


def _reason(agent: str, gaps: Mapping[tuple[str, str], str], out: frozenset[str]) -> str:
    """Why it does not reach a host that stays."""
    return next(why for ends, why in gaps.items() if agent in ends and not out.issuperset(ends))


def _left_out(state: State, gaps: Iterable[tuple[str, str]]) -> frozenset[str]:
    """The agents without which all others reach each other.

    One by one they go: those without the weights before any that has them, then whoever is named by most gaps, then
    whoever came last. Whoever was named only by others that go stays after all.
    """
    holding, left = _holding(state), {*gaps}
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


def _holding(state: State) -> set[str]:
    """The agents whose workers hold the weights, or are to make them."""
    fresh = set() if state.minted is None else {seat.worker for seat in state.minted.roster if seat.joins}
    return {member.agent for member in state.members if member.id not in fresh or state.has_formed(member)}
