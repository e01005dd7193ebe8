"""Mistakes around the state machine: what is written down, said again, and kept for those who join."""

from mutants.mutant import LINE, PUBLISHED, SERVICE, STORE, Mutant

COORDINATOR = "membership/coordinator.py"
STATE_LOG = "membership/state_log.py"
STATE_ENTRY = "membership/state_log.py"
JSON_LINES = "jsonl.py"
KEYVALUE = "membership/keyvalue.py"
CONVERSATION = "membership/client.py"
BACKLOG = "train/group/publisher.py"

MUTANTS = (
    Mutant(
        "decisions are not written down",
        COORDINATOR,
        "        if self._unwritten or not is_sent_again:\n",
        "        if False:\n",
        SERVICE,
    ),
    Mutant(
        "a worker's first hello is forgotten, and with it that it joins",
        COORDINATOR,
        'return worker is None or worker.phase != "asked"',
        "return True",
        SERVICE,
    ),
    Mutant(
        "a worker that was given up sets values",
        COORDINATOR,
        "        if not machine.takes_part(self.state, worker):\n            return\n",
        "",
        SERVICE,
    ),
    Mutant(
        "the end of an old connection counts as that of the new one",
        COORDINATOR,
        "        if self._workers.get(worker) is peer:\n",
        "        if worker in self._workers:\n",
        SERVICE,
    ),
    Mutant(
        "lines of the journal are lost with the coordinator",
        COORDINATOR,
        "        self._journal.complete(lines)\n",
        "",
        SERVICE,
    ),
    Mutant(
        "the job's time goes on while no coordinator runs",
        COORDINATOR,
        '            self._time_before = _NOW.validate_python(newest.get("now"))\n',
        "",
        SERVICE,
    ),
    Mutant(
        "a coordinator does not start again from its newest state",
        COORDINATOR,
        "        for entry in self._state_log.read():\n",
        "        for entry in list(self._state_log.read())[:-1]:\n",
        SERVICE,
    ),
    Mutant(
        "a line after one that was cut off is lost with it",
        JSON_LINES,
        '            line = b"\\n" + line\n',
        "            pass\n",
        SERVICE,
    ),
    Mutant(
        "what happened before a file was written anew is lost",
        STATE_LOG,
        '        data = b"".join(map(to_json, self._all_entries()))\n',
        '        data = b""\n',
        SERVICE,
    ),
    Mutant(
        "keys of the newest generation are forgotten with those before it",
        KEYVALUE,
        "int(generation[1]) < self._oldest",
        "int(generation[1]) <= self._oldest",
        STORE,
    ),
    Mutant(
        "what is added is added twice when its answer is lost",
        KEYVALUE,
        "        if answer is not None:\n            return [self._reply(worker, request, answer)]\n",
        "",
        STORE,
    ),
    Mutant(
        "who waits for a key of a generation that is over waits on",
        KEYVALUE,
        '        return [self._give_up(waiter, "its generation is over") for waiter in waiters]\n',
        "        return []\n",
        STORE,
    ),
    Mutant(
        "forgotten values come back when the coordinator starts again",
        KEYVALUE,
        "            self._oldest = max(self._oldest, below or 0)\n            for",
        "            for",
        STORE,
    ),
    Mutant(
        "a worker does not say again on a new connection what still matters",
        CONVERSATION,
        "[self._hello, *others, *self._repeated.values(), *requests]",
        "[self._hello, *others, *requests]",
        LINE,
    ),
    Mutant(
        "a request whose answer was lost is not asked again",
        CONVERSATION,
        "[self._hello, *others, *self._repeated.values(), *requests]",
        "[self._hello, *others, *self._repeated.values()]",
        LINE,
    ),
    Mutant(
        "a worker says on a new connection that it is ready for a generation that it is in",
        CONVERSATION,
        "            del self._repeated[kind]\n",
        "            pass\n",
        LINE,
    ),
    Mutant(
        "on a new connection a worker says that it is in no generation",
        CONVERSATION,
        '        self._hello = self._hello.model_copy(update={"generation": generation})\n',
        "",
        LINE,
    ),
    Mutant(
        "a worker connects again and again after the job is over",
        CONVERSATION,
        "        if isinstance(message, _LAST_MESSAGES):\n            self.is_over = True\n",
        "",
        LINE,
    ),
    Mutant(
        "values are lost with the main worker that was to publish them",
        BACKLOG,
        "        self._kept[key] = text\n\n",
        "        if self._leads:\n            self._kept[key] = text\n\n",
        PUBLISHED,
    ),
    Mutant(
        "the next main worker takes for granted that the one before has published all",
        BACKLOG,
        "        self._checks = False\n        return self._leads\n",
        "        self._let_go(request.keys)\n        return self._leads\n",
        PUBLISHED,
    ),
    Mutant(
        "what did not fit on the disk is not written again",
        COORDINATOR,
        "        self._saved = self.state if saved else None\n",
        "        self._saved = self.state\n",
        SERVICE,
    ),
    Mutant(
        "lines that are missing are not missed",
        COORDINATOR,
        "                elif _number(entry) != _number(newest) + 1:\n",
        "                elif False:\n",
        SERVICE,
    ),
    Mutant(
        "rows that are gone stay in what is written down",
        STATE_ENTRY,
        "                table.pop(row_id, None)\n",
        "                pass\n",
        SERVICE,
    ),
)
