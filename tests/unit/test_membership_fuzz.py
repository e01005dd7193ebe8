"""Whatever comes over a connection: the coordinator neither fails nor hangs, and what is invalid changes nothing."""

import json
import os
import random
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

import hostile
from simulation.checks import check_indexes
from unisono.errors import Unreadable
from unisono.membership import messages
from unisono.membership import state as machine
from unisono.membership.coordinator import AgentSession, Coordinator, Session, WorkerSession

pytestmark = pytest.mark.unit

SETTINGS = machine.ElasticConfig(smallest=1, largest=3, max_restarts=2, restart_on_error=True, failure_timeout_s=10.0)
STATE: TypeAdapter[machine.State] = TypeAdapter(machine.State)
PER_EXAMPLE = 50
"""Cases that one seed stands for."""


class Recorder:
    """A peer that keeps what it is sent."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.is_hung_up = False

    def send(self, text: str) -> None:
        self.sent.append(json.loads(text))

    def hang_up(self) -> None:
        self.is_hung_up = True


class Bench:
    """A coordinator with an agent, and time that a test moves."""

    def __init__(self, folder: Path) -> None:
        self.time = 0.0
        self.coordinator = Coordinator(folder, SETTINGS, lambda: self.time, fresh=True)
        hello = messages.AgentHello(agent="a1", host="here", workers=2)
        self.agent = self.connect(AgentSession, hello)
        started = [name for said in self.agent[1].sent if said["kind"] == "start" for name in said["workers"]]
        self.first, self.second = started

    def connect(self, kind: type[Session], *said: messages.Message) -> tuple[Session, Recorder]:
        peer = Recorder()
        session = kind(self.coordinator, peer)
        for message in said:
            session.receive(message.model_dump_json())
        return session, peer

    def worker(self, name: str, *said: messages.Message) -> tuple[Session, Recorder]:
        return self.connect(WorkerSession, messages.WorkerHello(worker=name, host="here", pid=1, shards=4), *said)


@contextmanager
def bench(folder: Path) -> Iterator[Bench]:
    made = Bench(folder)
    with closing(made.coordinator):
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)  # thousands would take minutes
        yield tmp_path_factory.mktemp("coordinator")


# -- what is no message

EXAMPLES: list[messages.Message] = [
    messages.WorkerHello(worker="w1", host="here", pid=1, shards=4, generation=1),
    messages.Ready(),
    messages.Ready(loop=3),
    messages.Arrived(generation=1, acts=3, loop=0, at_boundary=True, step=3, address="x"),
    messages.Formed(generation=1, seconds={"form": 0.5}),
    messages.Leaving(),
    messages.Progress(acts=3, step=3, samples_per_s=1.5, loop=0),
    messages.Finished(digest="ab"),
    messages.ResizeRequest(workers=2),
    messages.StoreRequest(id=1, operation="set", keys=("g1/a",), value="eA=="),
    messages.StoreRequest(id=2, operation="add", keys=("run/n",), value="2"),
    messages.StoreRequest(id=3, operation="wait", keys=("g1/a", "g1/b"), timeout_s=1.0),
    messages.AgentHello(agent="a1", host="here", workers=2, running=("w1", "w2")),
    messages.WorkerEnded(worker="w1", code=-9, error="x"),
    messages.AgentLeaving(),
]


def mutant(chance: random.Random) -> bytes:
    """A message with something wrong, mostly."""
    message, other = (chance.choice(EXAMPLES).model_dump() for _ in range(2))
    if chance.random() < 0.3:
        name = chance.choice([*other, "more"])
        message[name] = other.get(name)
    told = hostile.as_text(hostile.changed(chance, message))
    return hostile.mutated(chance, told) if chance.random() < 0.5 else told


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32), phase=st.sampled_from(["greeting", "preparing", "ready", "working"]))
def test_what_is_invalid_is_refused_and_changes_nothing(folder: Path, seed: int, phase: str) -> None:
    chance = random.Random(seed)
    with bench(folder) as made:
        if phase == "working":
            made.worker(made.second, messages.Ready())
            made.worker(made.first, messages.Ready())
        for _ in range(PER_EXAMPLE):
            refuses(made, chance, phase)


def refuses(made: Bench, chance: random.Random, phase: str) -> None:
    """One case: a connection on which something is said that is probably wrong."""
    hello = messages.AgentHello(agent="a1", host="here", workers=2, running=(made.first, made.second))
    adapter: Any
    if chance.random() < 0.3:
        adapter = messages.from_agent
        session, peer = made.connect(AgentSession, *([] if phase == "greeting" else [hello]))
    elif phase == "greeting":
        adapter = messages.from_worker
        session, peer = made.connect(WorkerSession)
    else:
        adapter = messages.from_worker
        session, peer = made.worker(made.first, *([messages.Ready()] if phase == "ready" else []))
    data = mutant(chance)
    before, keys = made.coordinator.state, list(made.coordinator.values.entries())
    reason = unreadable(adapter, data)
    session.receive(data)
    if reason is not None:
        assert peer.sent[-1]["kind"] == "refused"
        assert peer.is_hung_up
        assert made.coordinator.state is before
        assert list(made.coordinator.values.entries()) == keys
    session.close()


def unreadable(adapter: Any, data: bytes | str) -> str | None:
    """Why it is no message; None if it is one."""
    try:
        found = messages.parse(adapter, data)
    except Unreadable as error:
        return str(error)
    assert isinstance(found, messages.Message)
    return None


@settings(max_examples=500)
@given(data=st.one_of(st.binary(max_size=200), st.text(max_size=200)))
def test_bytes_and_texts_are_messages_or_unreadable(data: bytes | str) -> None:
    for adapter in (messages.from_worker, messages.from_agent):
        assert len(unreadable(adapter, data) or "") <= 200


@pytest.mark.parametrize(
    "text",
    [
        "[" * (messages.DEEPEST + 1),
        '{"a":' * 100_000,
        "," * messages.LONGEST_MESSAGE,
        json.dumps({"kind": "wait", "keys": ["run/a"] * 5000}),
        " " * (messages.LONGEST_MESSAGE + 1),
        "9" * (messages.LONGEST_MESSAGE - 10),
        '"' + "\\" * (messages.LONGEST_MESSAGE - 10),
        b"\xff" * messages.LONGEST_MESSAGE,
        "",
        "\ud800",
        '{"kind":"ready","kind":"ready","loop":' + "0" * 250 + "1}",
    ],
    ids=lambda text: repr(text[:12]),
)
def test_what_could_keep_a_parser_busy_is_refused_at_once(text: str | bytes) -> None:
    with pytest.raises(Unreadable):
        messages.parse(messages.from_worker, text)


@pytest.mark.parametrize(
    ("text", "within"),
    [
        ("[" * messages.DEEPEST + "]" * messages.DEEPEST, True),
        ("[" * (messages.DEEPEST + 1) + "]" * (messages.DEEPEST + 1), False),
        ('[{"a":' * (messages.DEEPEST // 2) + "[1]" + "}]" * (messages.DEEPEST // 2), False),
        ('"' + "[" * 50 + '"', True),
        ("9" * 299, True),
        ("[" + "9" * 300 + "]", False),
    ],
    ids=lambda value: repr(value)[:12],
)
def test_short_texts_have_the_same_limits_as_long_ones(text: str, within: bool) -> None:
    for padding in ("", " " * 1000):
        if within:
            assert messages.parse(TypeAdapter(Any), text + padding) == json.loads(text)
        else:
            with pytest.raises(Unreadable, match="nested at most|fewer than"):
                messages.parse(TypeAdapter(Any), text + padding)


def test_the_largest_value_of_the_store_is_no_message_too_long() -> None:
    request = messages.StoreRequest(id=1, operation="set", keys=("g1/a",), value="A" * 2**22)

    assert messages.parse(messages.from_worker, request.model_dump_json()) == request


# -- messages that are valid, and come when nobody expects them

names = st.sampled_from(["w1", "w2", "w3", "w4", "w99", "a1", "a2"])
small = st.integers(0, 4)
seconds = st.floats(0, 30, allow_nan=False)
unreached = st.lists(st.builds(messages.Unreached, agent=names, why=st.just("x")), max_size=2).map(tuple)
keys = st.sampled_from(["run/a", "run/n", "g0/a", "g1/a", "g2/a", "g3/n", "x"])
requests = st.builds(
    messages.StoreRequest,
    id=small,
    operation=st.sampled_from(["set", "get", "wait", "add", "compare_set", "delete", "check", "clock"]),
    keys=st.lists(keys, min_size=1, max_size=3).map(tuple),
    value=st.sampled_from(["", "eA==", "1", "-5", "?"]),
    expected=st.sampled_from(["", "eA=="]),
    timeout_s=seconds,
)
said_by_workers = st.one_of(
    st.builds(messages.WorkerHello, worker=names, host=names, pid=small, shards=st.integers(1, 4), generation=small),
    st.builds(messages.Ready, loop=st.none() | small, generation=small, unreached=unreached),
    st.builds(
        messages.Arrived,
        generation=small,
        acts=small,
        loop=small,
        at_boundary=st.booleans(),
        step=small,
        unreached=unreached,
    ),
    st.builds(messages.Formed, generation=small, seconds=st.dictionaries(names, seconds, max_size=2)),
    st.just(messages.Leaving()),
    st.builds(messages.Progress, acts=small, step=small, samples_per_s=seconds, loop=st.none() | small),
    st.builds(messages.Finished, digest=names),
    st.builds(messages.ResizeRequest, workers=st.integers(1, 9)),
    requests,
)
said_by_agents = st.one_of(
    st.builds(
        messages.AgentHello,
        agent=names,
        host=names,
        workers=st.integers(1, 4),
        running=st.lists(names, max_size=3).map(tuple),
        probes=st.sampled_from(["", "1", "2"]),
    ),
    st.builds(messages.Probed, reached=st.lists(names, max_size=2).map(tuple), unreached=unreached),
    st.builds(messages.WorkerEnded, worker=names, code=st.integers(-15, 130), error=st.sampled_from(["", "x"])),
    st.just(messages.AgentLeaving()),
)
people = st.one_of(
    st.builds(machine.ResizeRequested, st.integers(1, 9)),
    st.builds(machine.LeaveRequested, names | st.just("0")),
    st.just(machine.StopRequested()),
    st.just(machine.Restarted()),
    st.just(machine.CheckpointRequested()),
    st.builds(machine.ReplaceRequested, names | st.just("0")),
)
events = st.one_of(
    st.tuples(st.just("worker"), st.integers(0, 3), said_by_workers),
    st.tuples(st.just("worker"), st.integers(0, 3), said_by_workers),
    st.tuples(st.just("agent"), st.integers(0, 1), said_by_agents),
    st.tuples(st.just("close"), st.integers(0, 5), st.none()),
    st.tuples(st.just("time"), seconds, st.none()),
    st.tuples(st.just("person"), st.none(), people),
)


@settings(max_examples=150)
@given(script=st.lists(events, max_size=40))
def test_valid_messages_in_any_order_do_no_harm(folder: Path, script: list[tuple[str, Any, Any]]) -> None:
    with bench(folder) as made:
        workers = [made.worker(name)[0] for name in (made.first, made.second)] + [made.connect(WorkerSession)[0]] * 2
        agents = [made.agent[0], made.connect(AgentSession)[0]]
        for kind, which, what in script:
            before = made.coordinator.state
            match kind:
                case "worker":
                    workers[which].receive(what.model_dump_json())
                case "agent":
                    agents[which].receive(what.model_dump_json())
                case "close":
                    reconnect(made, workers if which < 4 else agents, which % 4)
                case "time":
                    made.time += which
                    made.coordinator.tick()
                case "person":
                    made.coordinator.handle(what)
            deadline = made.coordinator.next_deadline()
            assert deadline is None or deadline >= 0
            state = made.coordinator.state
            check_indexes(state)
            assert state.generation - before.generation in (0, 1)
            assert before.over is None or state.over == before.over
            assert len(state.members) <= SETTINGS.largest
        state = made.coordinator.state
        assert STATE.validate_json(STATE.dump_json(state)) == state
        json.dumps(made.coordinator.status(), allow_nan=False)


def reconnect(made: Bench, sessions: list[Any], which: int) -> None:
    sessions[which].close()
    sessions[which] = made.connect(type(sessions[which]))[0]
