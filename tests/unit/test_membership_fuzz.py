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

from unisono.errors import Unreadable
from unisono.membership.coordinator import AgentSession, Coordinator, Session, WorkerSession
from unisono.membership.messages import (
    DEEPEST,
    LONGEST_MESSAGE,
    MOST_PARTS,
    AgentHello,
    AgentLeaving,
    Arrived,
    Finished,
    Formed,
    Leaving,
    Message,
    Progress,
    Ready,
    ResizeRequest,
    StoreRequest,
    WorkerEnded,
    WorkerHello,
    from_agent,
    from_worker,
    parse,
)
from unisono.membership.state import (
    CheckpointRequested,
    ElasticConfig,
    LeaveRequested,
    ReplaceRequested,
    ResizeRequested,
    State,
    StopRequested,
)

pytestmark = pytest.mark.unit

SETTINGS = ElasticConfig(smallest=1, largest=3, max_restarts=2, restart_on_error=True, failure_timeout_s=10.0)
STATE: TypeAdapter[State] = TypeAdapter(State)
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
        hello = AgentHello(agent="a1", host="here", workers=2)
        self.agent = self.connect(AgentSession, hello)
        started = [name for said in self.agent[1].sent if said["kind"] == "start" for name in said["workers"]]
        self.first, self.second = started

    def connect(self, kind: type[Session], *said: Message) -> tuple[Session, Recorder]:
        peer = Recorder()
        session = kind(self.coordinator, peer)
        for message in said:
            session.receive(message.model_dump_json())
        return session, peer

    def worker(self, name: str, *said: Message) -> tuple[Session, Recorder]:
        return self.connect(WorkerSession, WorkerHello(worker=name, host="here", pid=1, shards=4), *said)


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

EXAMPLES: list[Message] = [
    WorkerHello(worker="w1", host="here", pid=1, shards=4, generation=1),
    Ready(),
    Ready(loop=3),
    Arrived(generation=1, acts=3, loop=0, at_boundary=True, step=3, address="x"),
    Formed(generation=1, seconds={"form": 0.5}),
    Leaving(),
    Progress(acts=3, step=3, samples_per_s=1.5, loop=0),
    Finished(digest="ab"),
    ResizeRequest(workers=2),
    StoreRequest(id=1, operation="set", keys=("g1/a",), value="eA=="),
    StoreRequest(id=2, operation="add", keys=("run/n",), value="2"),
    StoreRequest(id=3, operation="wait", keys=("g1/a", "g1/b"), timeout_s=1.0),
    AgentHello(agent="a1", host="here", workers=2, running=("w1", "w2")),
    WorkerEnded(worker="w1", code=-9, error="x"),
    AgentLeaving(),
]
ODD_VALUES: list[Any] = [None, True, -1, 0, 2**62, 2**63, 10**400, -0.0, 1e308, [], {}, [[]], {"a": {"b": {}}}]
ODD_VALUES += ["", "w1", "../x", "a b", "\x00", "é" * 200, "x" * 5000, ["w1"] * 5]
PIECES = [b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\", b"\\u0000", b"\xff", b"NaN", b"1e999", b"9" * 400, b"kind"]


def mutant(chance: random.Random) -> bytes:
    """A message with something wrong, mostly."""
    message = chance.choice(EXAMPLES).model_dump()
    for _ in range(chance.randrange(3)):
        name = chance.choice([*message, "more"])
        if chance.random() < 0.3:
            message.pop(name, None)
        else:
            message[name] = chance.choice([*ODD_VALUES, *chance.choice(EXAMPLES).model_dump().values()])
    text = bytearray(json.dumps(message, allow_nan=True).encode())
    for _ in range(chance.choice([0, 0, 1, 3])):
        at = chance.randrange(len(text) + 1)
        match chance.randrange(3):
            case 0:
                text[at : at + chance.randrange(8)] = chance.choice(PIECES)
            case 1:
                text[at:at] = chance.randbytes(3)
            case 2:
                del text[at : at + chance.randrange(20)]
    return bytes(text)


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32), phase=st.sampled_from(["greeting", "preparing", "ready", "working"]))
def test_what_is_invalid_is_refused_and_changes_nothing(folder: Path, seed: int, phase: str) -> None:
    chance = random.Random(seed)
    with bench(folder) as made:
        if phase == "working":
            made.worker(made.second, Ready())
            made.worker(made.first, Ready())
        for _ in range(PER_EXAMPLE):
            refuses(made, chance, phase)


def refuses(made: Bench, chance: random.Random, phase: str) -> None:
    """One case: a connection on which something is said that is probably wrong."""
    hello = AgentHello(agent="a1", host="here", workers=2, running=(made.first, made.second))
    adapter: Any
    if chance.random() < 0.3:
        adapter = from_agent
        session, peer = made.connect(AgentSession, *([] if phase == "greeting" else [hello]))
    elif phase == "greeting":
        adapter = from_worker
        session, peer = made.connect(WorkerSession)
    else:
        adapter = from_worker
        session, peer = made.worker(made.first, *([Ready()] if phase == "ready" else []))
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
        found = parse(adapter, data)
    except Unreadable as error:
        return str(error)
    assert isinstance(found, Message)
    return None


@settings(max_examples=500)
@given(data=st.one_of(st.binary(max_size=200), st.text(max_size=200)))
def test_bytes_and_texts_are_messages_or_unreadable(data: bytes | str) -> None:
    readable(data)


@settings(max_examples=250)
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
        max_leaves=12,
    )
)
def test_json_values_are_messages_or_unreadable(value: Any) -> None:
    readable(json.dumps(value))
    readable(json.dumps({"kind": "arrived", "generation": value}))


def readable(data: bytes | str) -> None:
    for adapter in (from_worker, from_agent):
        assert len(unreadable(adapter, data) or "") <= 200


@pytest.mark.parametrize(
    "text",
    [
        "[" * (DEEPEST + 1),
        "[" * 100_000,
        '{"a":' * 100_000,
        "[]" * MOST_PARTS,
        "[" + '"",' * MOST_PARTS,
        "," * LONGEST_MESSAGE,
        json.dumps({"kind": "wait", "keys": ["run/a"] * 5000}),
        " " * (LONGEST_MESSAGE + 1),
        "9" * (LONGEST_MESSAGE - 10),
        '"' * (LONGEST_MESSAGE - 10),
        '"' + "\\" * (LONGEST_MESSAGE - 10),
        '"' + "a" * (LONGEST_MESSAGE - 10),
        b"\xff",
        b"\xff" * LONGEST_MESSAGE,
        "",
        "\ud800",
        '{"kind":"ready","kind":"ready","loop":' + "0" * 250 + "1}",
    ],
    ids=lambda text: repr(text[:12]),
)
def test_what_could_keep_a_parser_busy_is_refused_at_once(text: str | bytes) -> None:
    with pytest.raises(Unreadable):
        parse(from_worker, text)


@pytest.mark.parametrize(
    ("text", "within"),
    [
        ("[" * DEEPEST + "]" * DEEPEST, True),
        ("[" * (DEEPEST + 1) + "]" * (DEEPEST + 1), False),
        ('{"a":' * DEEPEST + "1" + "}" * DEEPEST, True),
        ('[{"a":' * (DEEPEST // 2) + "[1]" + "}]" * (DEEPEST // 2), False),
        ("[" + ",".join(["[]"] * 50) + "]", True),
        ('"' + "[" * 50 + '"', True),
        ("9" * 299, True),
        ("9" * 300, False),
        ("[" + "9" * 300 + "]", False),
    ],
    ids=lambda value: repr(value)[:12],
)
def test_short_texts_have_the_same_limits_as_long_ones(text: str, within: bool) -> None:
    for padding in ("", " " * 1000):
        if within:
            assert parse(TypeAdapter(Any), text + padding) == json.loads(text)
        else:
            with pytest.raises(Unreadable, match="nested at most|fewer than"):
                parse(TypeAdapter(Any), text + padding)


def test_the_largest_value_of_the_store_is_no_message_too_long() -> None:
    request = StoreRequest(id=1, operation="set", keys=("g1/a",), value="A" * 2**22)

    assert parse(from_worker, request.model_dump_json()) == request


# -- messages that are valid, and come when nobody expects them

names = st.sampled_from(["w1", "w2", "w3", "w4", "w99", "a1", "a2"])
small = st.integers(0, 4)
seconds = st.floats(0, 30, allow_nan=False)
keys = st.sampled_from(["run/a", "run/n", "g0/a", "g1/a", "g2/a", "g3/n", "x"])
requests = st.builds(
    StoreRequest,
    id=small,
    operation=st.sampled_from(["set", "get", "wait", "add", "compare_set", "delete", "check", "clock"]),
    keys=st.lists(keys, min_size=1, max_size=3).map(tuple),
    value=st.sampled_from(["", "eA==", "1", "-5", "?"]),
    expected=st.sampled_from(["", "eA=="]),
    timeout_s=seconds,
)
said_by_workers = st.one_of(
    st.builds(WorkerHello, worker=names, host=names, pid=small, shards=st.integers(1, 4), generation=small),
    st.builds(Ready, loop=st.none() | small),
    st.builds(Arrived, generation=small, acts=small, loop=small, at_boundary=st.booleans(), step=small),
    st.builds(Formed, generation=small, seconds=st.dictionaries(names, seconds, max_size=2)),
    st.just(Leaving()),
    st.builds(Progress, acts=small, step=small, samples_per_s=seconds, loop=st.none() | small),
    st.builds(Finished, digest=names),
    st.builds(ResizeRequest, workers=st.integers(1, 9)),
    requests,
)
said_by_agents = st.one_of(
    st.builds(
        AgentHello,
        agent=names,
        host=names,
        workers=st.integers(1, 4),
        running=st.lists(names, max_size=3).map(tuple),
    ),
    st.builds(WorkerEnded, worker=names, code=st.integers(-15, 130), error=st.sampled_from(["", "x"])),
    st.just(AgentLeaving()),
)
people = st.one_of(
    st.builds(ResizeRequested, st.integers(1, 9)),
    st.builds(LeaveRequested, names | st.just("0")),
    st.just(StopRequested()),
    st.just(CheckpointRequested()),
    st.builds(ReplaceRequested, names | st.just("0")),
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
        assert STATE.validate_json(STATE.dump_json(state)) == state
        json.dumps(made.coordinator.status(), allow_nan=False)


def reconnect(made: Bench, sessions: list[Any], which: int) -> None:
    sessions[which].close()
    sessions[which] = made.connect(type(sessions[which]))[0]
