"""Mistakes in the acts, in what is handed over, and in a worker's membership."""

from mutants.mutant import ACTS, Mutant

ACTS_FILE = "train/group/collectives.py"
MAJORITY = "train/group/membership.py"
WORKERS = "train/group/workers.py"
ELASTIC = "train/group/elastic.py"
MEMBERSHIP = "train/group/membership.py"
REGISTRY = "train/state/registry.py"

REGISTERED = ("tests/unit/test_registry.py",)
DOORS = ("tests/unit/test_elastic_listener.py", *ACTS)

MUTANTS = (
    Mutant(
        "an act is counted before its state is there",
        ACTS_FILE,
        "        self._bar = WITHIN\n        try:\n",
        "        self._bar, self.done, self._changed, self._cause = WITHIN, done, changed, cause\n        try:\n",
        ACTS,
    ),
    Mutant(
        "a state is handed over without its count",
        ACTS_FILE,
        "        self._commit(done, take, lambda: cause, changed=changed)\n",
        "        self._commit(self.done, take, lambda: cause, changed=changed)\n",
        ACTS,
    ),
    Mutant(
        "a count is handed over without its state",
        ACTS_FILE,
        "            if changed or joins:\n                self.recovery.take(state, joins=joins, follow=follow)\n",
        "",
        ACTS,
    ),
    Mutant(
        "a state that one worker alone hands over is believed",
        ACTS_FILE,
        "                self.recovery.suspect_only_copy()\n",
        "                pass\n",
        ("tests/unit/test_collective_calls.py",),
    ),
    Mutant(
        "only joiners get the state, so that a member that is behind keeps its old one",
        ACTS_FILE,
        "            if changed or joins:\n",
        "            if joins:\n",
        ACTS,
    ),
    Mutant(
        "a joiner gets no state when the newest act has changed none",
        ACTS_FILE,
        "            is_lacking = self._changed or transfer.joiners\n",
        "            is_lacking = self._changed\n",
        ACTS,
    ),
    Mutant(
        "who is behind does not learn whether the newest act has changed the state",
        ACTS_FILE,
        "message = [self.done, self._changed, self._value, state",
        "message = [self.done, False, self._value, state",
        ACTS,
    ),
    Mutant(
        "who is behind keeps the value of its own act before",
        ACTS_FILE,
        "            return value\n\n        self._commit",
        "            return self._value\n\n        self._commit",
        ACTS,
    ),
    Mutant(
        "who is behind gets the weights after an update of the script's own, and nothing else that it has changed",
        ACTS_FILE,
        "            follow = partial(self._follow, cause)\n",
        "            follow = None\n",
        ("tests/unit/test_struck_own_updates.py",),
    ),
    Mutant(
        "an act that a worker was lost in is left out",
        ACTS_FILE,
        "                self.regroup(lost)\n            else:\n                self._commit(",
        "                self.regroup(lost)\n                break\n            else:\n                self._commit(",
        ACTS,
    ),
    Mutant(
        "an act is set that another device of the worker has not worked out",
        ACTS_FILE,
        "                self._require_all(number + 1)\n",
        "",
        ("tests/unit/test_collective_calls.py",),
    ),
    Mutant(
        "a state is taken over that another device of the worker was not given",
        ACTS_FILE,
        "            self._require_all(done)\n",
        "",
        ("tests/unit/test_collective_calls.py",),
    ),
    Mutant(
        "an act is not counted",
        ACTS_FILE,
        "self._commit(number + 1, change.make, change.cause, changed=changes)",
        "self._commit(number, change.make, change.cause, changed=changes)",
        ACTS,
    ),
    Mutant(
        "steps count as acts that change nothing",
        ACTS_FILE,
        "self._commit(number + 1, change.make, change.cause, changed=changes)",
        "self._commit(number + 1, change.make, change.cause, changed=False)",
        ACTS,
    ),
    Mutant(
        "a joiner publishes what it has read",
        ACTS_FILE,
        "        if not self._membership.joins:  # a joiner has read these values from the others\n",
        "        if True:\n",
        ACTS,
    ),
    Mutant(
        "a member that takes an act from the others does not number it, so that joiners read the wrong values",
        ACTS_FILE,
        "            self._membership.joins = False\n        elif is_new:\n            self._publish_value()\n",
        "            self._membership.joins = False\n",
        ACTS,
    ),
    Mutant(
        "a joiner that loses the others when it has their state throws it away, and its count stays",
        ACTS_FILE,
        "                if not self._membership.joins:  # it has the state, and is a member like the others\n"
        "                    self.regroup(lost)\n",
        "                self._membership.joins = True\n",
        ACTS,
    ),
    Mutant(
        "a worker arrives with a count that is one too high",
        ACTS_FILE,
        "        return MemberProgress(self.done, self._loop, self.step)\n",
        "        return MemberProgress(self.done + 1, self._loop, self.step)\n",
        ACTS,
    ),
    Mutant(
        "a worker that loses another one while it regroups gives up",
        ACTS_FILE,
        "                if isinstance(error, JobEnded) or not self._membership.is_elastic:\n",
        "                if True:\n",
        ACTS,
    ),
    Mutant(
        "only joiners count as behind",
        MEMBERSHIP,
        "        return frozenset(late) | self.joiners\n",
        "        return self.joiners\n",
        ACTS,
    ),
    Mutant(
        "joiners do not count as behind",
        MEMBERSHIP,
        "        return frozenset(late) | self.joiners\n",
        "        return frozenset(late)\n",
        ACTS,
    ),
    Mutant(
        "the source of a generation counts as one that is behind",
        MEMBERSHIP,
        "if acts < self.acts[self.source]}",
        "if acts <= self.acts[self.source]}",
        ACTS,
    ),
    Mutant(
        "a state that was handed over is used though it is not the one that was sent",
        WORKERS,
        "        if _seal(skeleton, received) != seal:\n",
        "        if False:\n",
        ("tests/unit/test_workers.py",),
    ),
    Mutant(
        "a state is handed over though others who should hold the same hold another one",
        ACTS_FILE,
        "        transfer = self._trusted(transfer)\n",
        "",
        ("tests/unit/test_struck_runs.py",),
    ),
    Mutant(
        "who has come second in a vote gives its weights to the others",
        MAJORITY,
        "Counter(held).most_common(1)[0]",
        "Counter(held).most_common(2)[-1]",
        ("tests/unit/test_majority.py",),
    ),
    Mutant(
        "half of the workers are a majority",
        MAJORITY,
        "    if 2 * votes <= len(held):\n",
        "    if 2 * votes < len(held):\n",
        ("tests/unit/test_majority.py",),
    ),
    Mutant(
        "a worker hangs up on a generation that it has left already, and with it on the next",
        ELASTIC,
        "            if self._lost >= self._generation.number > self._left:\n",
        "            if self._lost >= self._generation.number:\n",
        DOORS,
    ),
    Mutant(
        "the state of the next generation is taken from its first rank",
        ELASTIC,
        "StateTransfer(source=new.source,",
        "StateTransfer(source=0,",
        ACTS,
    ),
    Mutant(
        "a worker that is behind by an update does not get what the update has changed beside weights",
        REGISTRY,
        'UPDATE: When = ("early", "behind")\n',
        'UPDATE: When = ("early",)\n',
        REGISTERED,
    ),
    Mutant(
        "a checkpoint is handed on with what was known and asked for when it was written",
        REGISTRY,
        "            elif not entry.checkpoint:\n",
        "            elif not entry.checkpoint and entry.name not in state:\n",
        REGISTERED,
    ),
    Mutant(
        "everything is restored at every moment",
        REGISTRY,
        "            for entry in self._at(moment):\n",
        "            for entry in self._entries.values():\n",
        REGISTERED,
    ),
    Mutant(
        "what could not be restored leaves the half of it",
        REGISTRY,
        "            for attributes, old in before:\n",
        "            for attributes, old in before[:0]:\n",
        REGISTERED,
    ),
    Mutant(
        "a checkpoint of other objects is restored as far as it goes",
        REGISTRY,
        "        if missing or unknown:\n",
        "        if missing and unknown:\n",
        REGISTERED,
    ),
)
