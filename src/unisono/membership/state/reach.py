"""The hosts that reach each other, and which workers are left out where they do not.

Before any worker of a new host is started, and again before members stop for one, its agent probes the other hosts. No
member knows of that.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import chain
from typing import NamedTuple

from unisono.membership.agent_messages import LeftOut, Probe, Probed
from unisono.membership.messages import Target, Unreached
from unisono.membership.state.rows import CANDIDATE, MEMBER, Agent, Link, pair
from unisono.membership.state.state import State
from unisono.membership.state.state_update import StateUpdate, short
from unisono.membership.state.tables import AgentTable

FRESH_S = 5.0
"""How long a probe is believed before members are stopped for a host, in seconds."""

ADVICE = (
    "Workers of all hosts connect to each other, at ports that the system chooses: let the firewalls between these "
    "hosts pass them, or name the network interface that the hosts share with GLOO_SOCKET_IFNAME. It is tried again "
    "every {seconds:g} s, and the job goes on meanwhile"
)


def keep_in_reach(update: StateUpdate) -> None:
    """Have hosts probed whose connections are not known, and leave out those without which all others are connected.

    Only what has changed since it was last done is looked at.
    """
    while update.moved or update.linked:
        then = update.reached
        moved = [agent for agent in update.moved if _standing(then, agent) != _standing(update.state, agent)]
        _forget(update, moved)
        linked, update.reached = frozenset(update.linked), update.state
        update.moved.clear()
        update.linked.clear()
        _probe(update, moved, linked, then)
        _leave_out(update)


def doubt(update: StateUpdate, agent: str) -> None:
    """Have a host probed again before members stop for it: its connections may have changed since."""
    known = [link for link in update.state.links.of_agent(agent) if not link.why]
    update.drop_links([link for link in known if link.at < update.now - FRESH_S])


def probed(update: StateUpdate, agent: Agent, found: Probed) -> None:
    """What an agent has found out about those that it was asked to probe."""
    asked = {*agent.probing}
    reached = [other for other in found.reached if other in asked and other in update.state.agents]
    _learn(update, agent.id, dict.fromkeys(reached, ""))
    unreached = [each for each in found.unreached if each.agent in asked]
    not_reached(update, agent, unreached)
    answered = {*found.reached, *(each.agent for each in unreached)}
    agent = update.state.agents[agent.id]
    update.put_agent(agent, probing=tuple(other for other in agent.probing if other not in answered))


def not_reached(update: StateUpdate, agent: Agent, unreached: Sequence[Unreached]) -> None:
    """An agent, or a worker of it while its generation formed, did not reach these hosts."""
    found: dict[str, str] = {}
    for each in unreached:
        other = update.state.agents.get(each.agent)
        if other is not None and other is not agent:
            where = f" at {other.probes}" if other.probes else ""
            found[other.id] = short(f"{agent.host} does not reach {other.host}{where}: {each.why}")
    _learn(update, agent.id, found)


def gave_no_answer(update: StateUpdate, agent: Agent) -> None:
    """An agent was asked to probe others, and says nothing about them."""
    silent = [Unreached(agent=other, why="its agent has not said whether it does") for other in agent.probing]
    not_reached(update, agent, silent)
    update.put_agent(update.state.agents[agent.id], probing=())


def try_again(update: StateUpdate) -> None:
    """Have hosts probed that did not reach each other for some time.

    Where one answers no probes, only a generation can tell: it is tried where that stops nobody.
    """
    timeout_s = update.state.settings.failure_timeout_s
    due = [link for link in update.state.links.gaps if link.at + timeout_s <= update.now]
    update.linked |= {link.id for link in due}
    if update.state.minted is None:
        reach = Reach(update.state)
        update.drop_links([link for link in due if not reach.is_uncertain(link.one, link.other)])


def forget_agent(update: StateUpdate, agent: str) -> None:
    """An agent has another address, or is gone."""
    update.drop_links(update.state.links.of_agent(agent))


# -- links


def _learn(update: StateUpdate, one: str, found: Mapping[str, str]) -> None:
    """The connections of an agent to others; of each the reason why there is none, or nothing."""
    for other, why in found.items():
        known = update.state.links.get(pair(one, other))
        if why and (known is None or not known.why):
            update.note("no connection", agents=[one, other], why=why)
        elif known is not None and known.why and not why:
            update.note("connected again", agents=[one, other])
    update.put_links([Link(one, other, why, update.now) for other, why in found.items()])


def _forget(update: StateUpdate, moved: Iterable[str]) -> None:
    """Links of agents that are gone; and that members are connected goes without saying."""
    now, gone = Reach(update.state), {}
    for agent in moved:
        for link in update.state.links.of_agent(agent):
            ends = [now.standing(end) for end in (link.one, link.other)]
            if not all(end.there for end in ends) or (not link.why and all(end.at_work for end in ends)):
                gone[link.id] = link
    update.drop_links([*gone.values()])


# -- probes


class Reach:
    """Who has to reach whom in a state. What it has found out of an agent it does not look up again."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._known: dict[str, Standing] = {}

    def is_uncertain(self, one: str, other: str) -> bool:
        """Whether both answer probes, and one at least has no members."""
        first, second = self.standing(one), self.standing(other)
        return first.answers and second.answers and not (first.at_work and second.at_work)

    def misses(self, one: str, other: str) -> bool:
        """Whether an agent's workers have to wait until it is known whether they reach those of another one."""
        if not self.standing(other).takes_part or not self.is_uncertain(one, other):
            return False
        return pair(one, other) not in self._state.links

    def standing(self, agent: str) -> "Standing":
        """All of an agent that decides who is probed."""
        if agent not in self._known:
            self._known[agent] = _standing(self._state, agent)
        return self._known[agent]


class Standing(NamedTuple):
    """An agent, as far as it decides who is probed.

    Attributes:
        answers: whether it answers probes, and was not asked to leave.
        at_work: whether it has members.
        takes_part: whether it has members or candidates.
        there: whether it is known, and has not left.
        connected: whether it is.
        probes: the address at which it answers.
    """

    answers: bool
    at_work: bool
    takes_part: bool
    there: bool
    connected: bool
    probes: str


def _standing(state: State, agent: str) -> Standing:
    at_work, row = state.workers.at(agent, "member") > 0, state.agents.get(agent)
    takes_part = at_work or state.workers.at(agent, "candidate") > 0
    if row is None:
        return Standing(False, at_work, takes_part, False, False, "")
    answers = bool(row.probes) and not row.leaving
    return Standing(answers, at_work, takes_part, not row.left, row.signs.connected, row.probes)


def _probe(update: StateUpdate, moved: Sequence[str], linked: Set[str], then: State) -> None:
    """Have pairs of hosts probed, each by the agent that came later, and count what is not known of each.

    Args:
        update: the state now.
        moved: agents that have changed since then.
        linked: connections that have changed since then, or are to be looked at.
        then: the state for which this was last done.
    """
    now, was, agents = Reach(update.state), Reach(then), update.state.agents
    around = {row.id for state in (then, update.state) for row in state.agents.marked("probed")} if moved else set()
    pairs = {pair(one, other) for one in moved for other in around if one != other} | linked
    missing: dict[str, int] = {}
    wanted: dict[str, list[Agent]] = {}
    for name in pairs:
        ends = name.split(" ")
        for one, other in (ends, ends[::-1]):
            if more := now.misses(one, other) - was.misses(one, other):
                missing[one] = missing.get(one, 0) + more
        if now.is_uncertain(*ends):
            earlier, later = sorted((agents[end] for end in ends), key=AgentTable.place)
            if _is_due(update, earlier, later):
                wanted.setdefault(later.id, []).append(earlier)
    for name, count in missing.items():
        if count and name in agents:
            update.put_agent(agents[name], missing=agents[name].missing + count)
    for name, others in wanted.items():
        _ask(update, update.state.agents[name], sorted(others, key=AgentTable.place))


def _is_due(update: StateUpdate, earlier: Agent, later: Agent) -> bool:
    if earlier.id in later.probing or not earlier.signs.connected or not later.signs.connected:
        return False
    link, settings = update.state.links.get(pair(earlier.id, later.id)), update.state.settings
    return link is None or bool(link.why and link.at + settings.failure_timeout_s <= update.now)


def _ask(update: StateUpdate, agent: Agent, others: Sequence[Agent]) -> None:
    targets = tuple(Target(agent=other.id, host=other.host, address=other.probes) for other in others)
    update.put_agent(agent, probing=(*agent.probing, *(other.id for other in others)), probing_since=update.now)
    update.tell_agent(agent.id, Probe(targets=targets))


# -- who is left out


def _leave_out(update: StateUpdate) -> None:
    gaps = update.state.links.gaps
    if not gaps and not update.state.agents.count("out"):
        return
    out = _left_out(update.state, gaps)
    for agent in update.state.agents.values():
        why = _reason(update.state, agent, gaps, out) if agent.id in out else ""
        if bool(why) != bool(agent.left_out):
            update.put_agent(agent, left_out=why)
            update.note("left out" if why else "not left out any more", agent=agent.id, host=agent.host, why=why)
            advice = ADVICE.format(seconds=update.state.settings.failure_timeout_s)
            update.tell_agent(agent.id, LeftOut(reason=f"{why}. {advice}" if why else ""))
        for worker in update.state.workers.of_agent(agent.id) if why else ():
            if worker.phase in CANDIDATE:
                update.exclude(worker, why)


def _reason(state: State, agent: Agent, gaps: Sequence[Link], out: frozenset[str]) -> str:
    if agent.left_out:
        return agent.left_out
    mine = [link for link in gaps if agent.id in (link.one, link.other)]
    telling = [link for link in mine if not {link.one, link.other} <= out] or mine
    return telling[0].why


def _left_out(state: State, gaps: Sequence[Link]) -> frozenset[str]:
    """The agents without which all others reach each other: one by one, whoever is named by most of them.

    Whoever has no weights goes first. Of those that are named alike stays the one with more workers that hold the
    weights, then the source's host, the one with more workers on the way, with more room, and that came first. Before
    the first generation the room counts most. Whoever was named only by others that go stays after all.
    """
    source = "" if state.minted is None else state.minted.roster[state.minted.source].agent
    holding, working = _counted(state)
    places = {name: place for place, name in enumerate(state.agents)}

    def cost(name: str) -> list[int]:
        counts = [holding.get(name, 0), int(name == source), working.get(name, 0), state.agents[name].room]
        return [*(counts if state.minted is not None else counts[::-1]), -places[name]]

    pairs = left = {(link.one, link.other) for link in gaps}
    out: list[str] = []
    while left:
        named = Counter(chain.from_iterable(left))
        out.append(min(named, key=lambda name: (name in holding, -named[name], cost(name))))
        left = {both for both in left if out[-1] not in both}
    for name in out[::-1]:
        if {*chain.from_iterable(both for both in pairs if name in both)} <= {*out}:
            out.remove(name)
    return frozenset(out)


def _counted(state: State) -> tuple[dict[str, int], dict[str, int]]:
    """Of each agent, how many workers hold the weights, and how many take part or are about to."""
    fresh = set() if state.minted is None else {seat.worker for seat in state.minted.roster if seat.joins}
    holding: dict[str, int] = {}
    working: dict[str, int] = {}
    for worker in state.workers.values():
        if worker.phase in MEMBER and (worker.id not in fresh or state.has_formed(worker)):
            holding[worker.agent] = holding.get(worker.agent, 0) + 1
        if worker.phase in (*CANDIDATE, *MEMBER):
            working[worker.agent] = working.get(worker.agent, 0) + 1
    return holding, working
