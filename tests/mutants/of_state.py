"""Mistakes in the state machine."""

from mutants.mutant import STATE, Mutant

TRANSITIONS = "membership/state/transitions.py"
EVENTS = "membership/state/events.py"
STATE_UPDATE = "membership/state/state_update.py"
QUESTIONS = "membership/state/questions.py"
BALANCE = "membership/state/transitions.py"
EXCLUSION = "membership/state/transitions.py"
REACH = "membership/state/reach.py"
TABLE = "membership/state/member_table.py"
ROSTER = "membership/state/roster.py"
REACHES = ("tests/unit/test_membership_reach.py", *STATE)
TABLES = ("tests/unit/test_membership_tables.py", *STATE)
ROSTERS = ("tests/unit/test_roster.py", *STATE)

MUTANTS = (
    # -- generations
    Mutant(
        "the store keeps the keys of all generations",
        TRANSITIONS,
        "    update.actions.append(DropKeys(number))\n",
        "",
    ),
    Mutant(
        "a job that starts over keeps the published values of before",
        TRANSITIONS,
        "    update.actions.append(DropKeys())\n",
        "",
    ),
    Mutant(
        "a generation gets the number of the one before",
        TRANSITIONS,
        "update.state, update.state.generation + 1\n",
        "update.state, max(1, update.state.generation)\n",
    ),
    Mutant(
        "joiners are let in where members do not stand at one boundary",
        TRANSITIONS,
        "joiners = joiners[: max(0, size - len(staying))] if steady else []",
        "joiners = joiners[: max(0, size - len(staying))]",
    ),
    Mutant(
        "joiners are let in that wait at another loop",
        TRANSITIONS,
        "for worker in _ready_candidates(update.state) if worker.loop == loop and not worker.leaving]",
        "for worker in _ready_candidates(update.state) if not worker.leaving]",
    ),
    Mutant(
        "members that leave go in the middle of a step",
        TRANSITIONS,
        "len(places) == 1 and all(message.at_boundary for message in messages)",
        "len(places) == 1",
    ),
    Mutant(
        "members count as standing at one boundary although one is an act ahead",
        TRANSITIONS,
        "places = {(message.acts, message.loop) for message in messages}",
        "places = {message.loop for message in messages}",
    ),
    Mutant(
        "the state of the generation comes from the member that is the furthest behind",
        TRANSITIONS,
        "    return acts.index(max(acts))",
        "    return acts.index(min(each for each in acts if each >= 0))",
    ),
    Mutant(
        "a joiner that has not yet received the state counts as one that has it",
        TRANSITIONS,
        "for member in members if member.id not in joiners or least <= arrivals[member.id].acts]",
        "for member in members]",
    ),
    Mutant(
        "the next generation is formed before all members have arrived",
        TRANSITIONS,
        "if current is None or workers.count_in_phases(MEMBER) > arrived or",
        "if current is None or not arrived or",
    ),
    Mutant(
        "a generation is formed with a member that has no connection",
        TRANSITIONS,
        " or workers.count_in_phases(MEMBER, connected=False):",
        ":",
    ),
    Mutant(
        "the only ones that hold the weights leave before somebody else has them",
        TRANSITIONS,
        "    if not any(member.id in holding for member in staying):\n",
        "    if not staying:\n",
    ),
    Mutant(
        "the first generation does not wait for those that were asked for",
        TRANSITIONS,
        '    all_ready = state.workers.count_in_phases(("ready",), connected=True) == candidates\n'
        "    if candidates >= needed and all_ready and len(_ready_candidates(state)) == candidates:\n",
        "    if len(_ready_candidates(state)) >= needed:\n",
    ),
    Mutant(
        "the first generation is formed with fewer workers than are needed",
        TRANSITIONS,
        "if candidates >= needed and all_ready and",
        "if candidates and all_ready and",
    ),
    Mutant(
        "there are more members than were asked for",
        TRANSITIONS,
        "staying = [member for member in members if not member.leaving][:size] if steady else []",
        "staying = [member for member in members if not member.leaving] if steady else []",
    ),
    Mutant(
        "members stop again and again for a joiner that waits at a later loop",
        TRANSITIONS,
        "return joiner.loop > state.loop and joiner.turn > state.turns_seen",
        "return joiner.loop > state.loop",
    ),
    Mutant(
        "workers of the life before are told nothing and wait for ever",
        TRANSITIONS,
        '            update.remove(worker, "all others are lost, and the job starts over")\n',
        "            pass\n",
    ),
    # -- messages
    Mutant(
        "an arrival in an earlier generation counts in this one",
        EVENTS,
        "case messages.Arrived() | messages.Formed() if",
        "case messages.Formed() if",
    ),
    Mutant(
        "a worker may be in the generation after the newest",
        EVENTS,
        "if hello.generation > state.generation:",
        "if hello.generation > state.generation + 1:",
    ),
    Mutant(
        "a member that missed its generation over a broken connection is not told of it",
        EVENTS,
        "    if generation < current.generation:\n",
        "    if generation + 1 < current.generation:\n",
    ),
    Mutant(
        "a member that missed a loss over a broken connection is not told of it",
        EVENTS,
        "    if update.state.broken:\n",
        "    if update.state.broken and False:\n",
    ),
    Mutant(
        "members wait for one that has left the work in the middle of it",
        EVENTS,
        "        update.wake_members()  # the others may",
        "        pass  #",
    ),
    Mutant(
        "members wait for one that has left before it had formed the generation",
        EVENTS,
        "    if not message.at_boundary or not (state.formed or all(map(state.has_formed, workers))):\n",
        "    if not message.at_boundary:\n",
    ),
    Mutant(
        "a joiner that has lost the others leaves its generation, and nobody is told",
        EVENTS,
        "            _ready(update, worker, message)\n            update.break_generation(worker)\n",
        "            _ready(update, worker, message)\n",
    ),
    Mutant(
        "a worker that was given up is served when it comes back",
        EVENTS,
        '    if worker.phase == "lost":\n',
        '    if worker.phase == "lost" and False:\n',
    ),
    Mutant(
        "a worker that was given up goes on talking, and is not told so",
        EVENTS,
        '    if worker is None or worker.phase == "lost":\n        reason',
        "    if worker is None:\n        reason",
    ),
    Mutant(
        "a replacement that was meant for a rank of an earlier generation hits another worker",
        EVENTS,
        "    if message.generation != update.state.generation:\n        return  # the rank may",
        "    if False:\n        return  # the rank may",
    ),
    Mutant(
        "a joiner that cannot join ends the job",
        EVENTS,
        "        update.fail_to_join(worker, why)\n",
        "        update.fail(update.blame(worker, why), worker.id)\n",
    ),
    Mutant(
        "a joiner that was taken in, and fails before it has the weights, ends the job",
        EVENTS,
        "    return seat.joins and not state.has_formed(worker)\n",
        "    return False\n",
    ),
    Mutant(
        "joiners that fail are replaced for ever",
        STATE_UPDATE,
        "if agent.failed < self.state.settings.max_restarts:",
        "if True:",
    ),
    Mutant(
        "a worker of an agent that was told to start it, and did not, is awaited for ever",
        EVENTS,
        "        if worker.id not in hello.running:\n            _ended_unreported(update, worker)\n",
        "        pass\n",
    ),
    # -- restarts of the coordinator
    Mutant(
        "workers count as connected to a coordinator that has just started",
        EVENTS,
        "changed(worker, signs=signs, unformed=0) for worker",
        "changed(worker, signs=changed(signs, connected=worker.signs.connected), unformed=0) for worker",
    ),
    Mutant(
        "a coordinator that was killed before it forgot values never forgets them",
        EVENTS,
        "    update.actions.append(DropKeys() if state.minted is None else DropKeys(state.generation))\n",
        "",
    ),
    Mutant(
        "members are lost at once when the coordinator starts again on another clock",
        EVENTS,
        "        arrival=None if state.arrival is None else update.now,\n",
        "",
    ),
    # -- losses
    Mutant(
        "lost workers are replaced without end",
        STATE_UPDATE,
        "self.set(restarts=self.state.restarts + 1)",
        "self.set(restarts=self.state.restarts)",
    ),
    Mutant(
        "one worker more is replaced than may be",
        STATE_UPDATE,
        "if self.state.restarts < settings.max_restarts * settings.largest:",
        "if self.state.restarts <= settings.max_restarts * settings.largest:",
    ),
    Mutant(
        "losses are not counted as departures, by which policies go",
        STATE_UPDATE,
        "            self.set(departures=self.state.departures + 1)\n",
        "            pass\n",
    ),
    Mutant(
        "a worker that leaves on notice and is then lost counts as two departures",
        STATE_UPDATE,
        "        if not worker.leaving:  # a worker that leaves has been counted when it was asked to\n",
        "        if True:\n",
    ),
    Mutant(
        "members are not told of a loss",
        STATE_UPDATE,
        "        self._send_to_working(Lost(generation=self.state.generation, workers=(worker.id,)))\n",
        "        pass\n",
    ),
    Mutant(
        "members are not told that a generation is due",
        STATE_UPDATE,
        "        self._send_to_working(RegroupDue(generation=self.state.generation))\n",
        "        pass\n",
    ),
    # -- time
    Mutant(
        "signs of life do not renew a member's deadline",
        EVENTS,
        "    update.record_signs([worker.id for worker in workers])\n",
        "",
    ),
    Mutant(
        "a member that goes on giving signs of life need never arrive",
        QUESTIONS,
        "return min(heard_at, heard_at if state.arrival is None else state.arrival) + timeout_s",
        "return heard_at + timeout_s",
    ),
    Mutant(
        "those who are ready wait for ever for one that never comes, as they give signs of life",
        QUESTIONS,
        "return min((worker.signs.since for worker in",
        "return min((state.heard_at[worker.id] for worker in",
    ),
    Mutant(
        "a coordinator that was held up takes everybody for lost",
        QUESTIONS,
        "    if gap <= state.settings.failure_timeout_s / 2:\n",
        "    if True:\n",
    ),
    Mutant(
        "a broken connection is a sign of life",
        EVENTS,
        "return max(heard_at, update.now - update.state.settings.failure_timeout_s / 2)",
        "return update.now",
    ),
    Mutant(
        "a main thread that hangs in a collective call is never given up",
        QUESTIONS,
        'return pulse.doing == "call" or state.workers',
        "return state.workers",
    ),
    # -- who comes and goes
    Mutant(
        "members stop again for a better split before they know how fast they are with this one",
        TRANSITIONS,
        "    if update.now < update.state.judged_at + SETTLED_S:",
        "    if update.now < update.state.judged_at:",
    ),
    Mutant(
        "the longest ready candidate is dismissed instead of the newest",
        TRANSITIONS,
        "for worker in update.state.candidates[::-1][:surplus] if",
        "for worker in update.state.candidates[:surplus] if",
    ),
    Mutant(
        "who is no member any more still counts as one that has arrived",
        STATE_UPDATE,
        "            self._forget_reports(worker)\n",
        "            pass\n",
    ),
    Mutant(
        "a worker that is gone is heard of for ever",
        STATE_UPDATE,
        "        self.set(heard_at=self.state.heard_at.drop(worker.id))\n",
        "",
    ),
    Mutant(
        "of several that say the same, one alone is heard",
        EVENTS,
        "senders = zip(names, update.state.workers.get_many(names), strict=True)",
        "senders = zip(names[:1], update.state.workers.get_many(names))",
    ),
    Mutant(
        "a worker that cannot be replaced for want of restarts is replaced",
        TRANSITIONS,
        "missing = state.size - state.unreplaced - state.staying",
        "missing = state.size - state.staying",
    ),
    Mutant(
        "a joiner without the weights is told to write them",
        TRANSITIONS,
        "preempted=member in holders)",
        "preempted=True)",
    ),
    Mutant(
        "a job is over for its agents while workers still write their checkpoint",
        TRANSITIONS,
        "    if everybody and not state.workers:\n",
        "    if everybody:\n",
    ),
    # -- who reaches whom
    Mutant(
        "hosts that cannot be reached stay in",
        REACH,
        "    _leave_out(update)\n",
        "",
        REACHES,
    ),
    Mutant(
        "a host joins unprobed once its last member has gone",
        REACH,
        "if begins or agent.id in changed]",
        "if begins]",
        REACHES,
    ),
    Mutant(
        "hosts that wait do not probe those that begin to train",
        REACH,
        "if begins or agent.id in changed]",
        "if agent.id in changed]",
        REACHES,
    ),
    Mutant(
        "members stop for a host whose probe is old",
        REACH,
        "if agent.tried_at < update.now - FRESH_S:",
        "if agent.tried_at < 0:",
        REACHES,
    ),
    Mutant(
        "a host that is left out is never tried again",
        REACH,
        "    probe(update, update.state.agents.get_many(due))\n",
        "",
        REACHES,
    ),
    Mutant(
        "members go for joiners that they do not reach",
        REACH,
        "(name not in holding, named[name],",
        "(named[name],",
        REACHES,
    ),
    Mutant(
        "of hosts that do not reach each other the one that came first goes",
        REACH,
        "named[name], state.agents[name].number)",
        "named[name], -state.agents[name].number)",
        REACHES,
    ),
    Mutant(
        "a host whose probe is under way starts workers",
        "membership/state/state.py",
        " and not row.probing",
        "",
        REACHES,
    ),
    Mutant(
        "workers of a host that is left out count as if they stayed",
        "membership/state/state.py",
        "leaving=False) - len(going)",
        "leaving=False)",
        REACHES,
    ),
    Mutant(
        "the same workers fail to form a generation again and again",
        EXCLUSION,
        "        out += [] if out else _suspects(update, current)\n",
        "        pass\n",
        REACHES,
    ),
    # -- the end
    Mutant(
        "workers may finish with different weights",
        TRANSITIONS,
        "    elif len({worker.digest for worker in finished}) > 1:\n",
        "    elif len({worker.digest for worker in finished}) > 2:\n",
    ),
    Mutant(
        "the job is done while members are still on the way",
        TRANSITIONS,
        " or update.state.workers.count_in_phases(MEMBER):\n        return\n    finished",
        ":\n        return\n    finished",
    ),
    # -- what stands beside the values
    Mutant(
        "a row keeps the marks that it had",
        TABLE,
        "                    rest = self._marked[mark].remove(before.id)\n",
        "                    rest = self._marked[mark]\n",
    ),
    Mutant(
        "an open table counts the rows with a mark without those that have just come",
        TABLE,
        "                count += self._count_changes.get(mark, 0)\n",
        "                pass\n",
        TABLES,
    ),
    Mutant(
        "a mark that has come and gone again in an open table is taken for one that is gone",
        TABLE,
        "        if moved.pop(name, comes) == comes:",
        "        if moved.pop(name, comes) is not None:",
        TABLES,
    ),
    Mutant(
        "a row that comes weighs, and one that goes weighs still",
        TABLE,
        "            self.weight -= self.weigh(before)\n",
        "            pass\n",
    ),
    Mutant(
        "a worker that is gone keeps its agent's room",
        STATE_UPDATE,
        "self.put_agent(agent, started=agent.started - 1)",
        "self.put_agent(agent, started=agent.started)",
    ),
    Mutant(
        "hosts whose workers come or go by a rule are not looked at again",
        TRANSITIONS,
        "leave_out_unreachable, *rules, leave_out_unreachable):",
        "leave_out_unreachable, *rules):",
        REACHES,
    ),
    Mutant(
        "the first tick is the last",
        TRANSITIONS,
        "if update.state.tick_at is None or isinstance(event, Tick | Restarted):",
        "if update.state.tick_at is None:",
    ),
    Mutant(
        "a worker that hangs is noticed only if others wait for it when it speaks",
        TRANSITIONS,
        "    for worker in state.members if begins else those_changed:",
        "    for worker in those_changed:",
    ),
    Mutant(
        "what changes of a worker is not written down",
        STATE_UPDATE,
        "        if _is_to_keep(before, worker, fields.keys()):\n",
        "        if False:\n",
    ),
    # -- rosters
    Mutant(
        "a joiner is told of new hosts alone",
        ROSTER,
        "and prober in old_probers and prober in survivors:",
        "and prober not in old_probers:",
        ROSTERS,
    ),
    Mutant(
        "hosts that are gone are probed for ever",
        ROSTER,
        "gone = tuple(agent for agent in old_hosts if agent not in hosts)",
        "gone = ()",
        ROSTERS,
    ),
    Mutant(
        "workers with other shards are told of as if they had as many",
        ROSTER,
        "    return stop - start, seat.acts, seat.joins\n",
        "    return 1, seat.acts, seat.joins\n",
        ROSTERS,
    ),
)
