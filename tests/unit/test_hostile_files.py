"""Whatever stands in a run folder or comes from a process of this user: a value comes of it, or an error of ours."""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import hostile
from unisono.adapt.ada_scale import AdaScale
from unisono.adapt.norms import GradientNorms
from unisono.adapt.setting import Setting
from unisono.adapt.timings import Timings
from unisono.checkpoint.folder import MetricsFile, RunFolder
from unisono.checkpoint.hold import newest_term, who_holds
from unisono.checkpoint.store import Snapshot
from unisono.errors import CheckpointError, UnisonoError, Unreadable
from unisono.jsonl import read_lines
from unisono.launch.address import WHERE, address_of
from unisono.launch.failure import Failure
from unisono.launch.request import Request
from unisono.launch.wish import Wish
from unisono.membership.keyvalue import KeyValue
from unisono.membership.ledger import Ledger
from unisono.received import LARGEST_JSON, parse_json, parse_object, read_object
from unisono.train.adaptation import Adaptation
from unisono.train.prepared import Prepared
from unisono.train.state import Progress
from unisono.train.trained import Doubt, Trained

pytestmark = pytest.mark.unit

DATA = json.loads((Path(__file__).parents[1] / "hostile_seeds.json").read_text())
SEEDS: list[int] = DATA["seeds"]
CASES: dict[str, int] = DATA["cases"]

FILES: list[tuple[str, Any, Callable[[Path], Any]]] = [
    ("job.json", {"shards": 8, "seed": 1}, lambda folder: RunFolder(folder).read_job()),
    ("result.json", {"exit_code": 0}, lambda folder: RunFolder(folder).read_result()),
    (WHERE, {"url": "http://127.0.0.1:1", "pid": 1}, address_of),
    ("metrics.jsonl", {"step": 3, "loss": 0.5}, lambda folder: MetricsFile(folder / "metrics.jsonl").truncate_after(2)),
    ("journal.jsonl", {"time": "x", "event": "checkpoint"}, lambda folder: read_lines(folder / "journal.jsonl")),
    ("lock", {"pid": 1, "host": "h", "term": 3}, lambda folder: (newest_term(folder), who_holds(folder))),
    (
        "logs/rank-0.error.json",
        {
            "rank": 0,
            "host": "h",
            "pid": 1,
            "type": "KeyError",
            "message": "m",
            "traceback": "t",
            "consequence": False,
            "time": 1.5,
            "exit_code": 1,
        },
        lambda folder: Failure.read(RunFolder(folder), 0),
    ),
]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_hostile_file_of_a_run_folder_becomes_a_value_or_an_error(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unisono.checkpoint.folder.os.fsync", lambda descriptor: None)  # thousands take minutes
    (tmp_path / "logs").mkdir()
    for number in range(CASES["files"]):
        for name, value, read in FILES:
            chance = Random(f"{name} {seed} {number}")
            told = hostile.as_text(hostile.changed(chance, value))
            (tmp_path / name).write_bytes(hostile.mutated(chance, told) if chance.random() < 0.6 else told)
            try:
                read(tmp_path)
            except UnisonoError:
                continue
            except BaseException as error:
                raise AssertionError(f"{name}, seed {seed}, case {number}: {error!r}") from error


ENTRIES: list[dict[str, Any]] = [
    {"forgotten": 3},
    {"forgotten": None},
    {"key": "run/a", "value": "eA=="},
    {"key": "g1/a", "value": None},
    {"answered": "1", "worker": "w1", "id": 4},
]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_store_is_made_again_from_whatever_stands_in_its_file(seed: int, tmp_path: Path) -> None:
    chance = Random(f"entries {seed}")
    lines = [hostile.as_text(hostile.changed(chance, chance.choice(ENTRIES))) for _ in range(CASES["entries"])]
    data = b"\n".join(hostile.mutated(chance, line) if chance.random() < 0.3 else line for line in lines)
    (tmp_path / "coordinator.jsonl").write_bytes(data)
    values = KeyValue()
    with closing(Ledger(tmp_path / "coordinator.jsonl", lambda: ())) as ledger:
        for entry in ledger.read():
            values.restore(entry)
    assert [json.loads(json.dumps(entry)) for entry in values.entries()] == list(values.entries())


WISH = Wish({"A": "b"}, {"limits": "c"}, "/", (1, 2))
REQUEST = Request(("train.py", "--x"), {"A": "b"}, "/")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_hostile_wish_or_request_becomes_one_or_an_error(seed: int) -> None:
    for number in range(CASES["requests"]):
        chance = Random(f"requests {seed} {number}")
        both: list[tuple[Any, Callable[[bytes], Any]]] = [(WISH, Wish.from_json), (REQUEST, Request.from_json)]
        good, read = chance.choice(both)
        told = hostile.as_text(hostile.changed(chance, json.loads(good.to_json())))
        try:
            found = read(hostile.mutated(chance, told) if chance.random() < 0.5 else told)
        except Unreadable:
            continue
        assert read(found.to_json()) == found


PLACE = Progress().as_tree()


@pytest.mark.parametrize("seed", SEEDS[:10])
def test_where_a_run_stands_is_numbers_or_an_error(seed: int) -> None:
    for number in range(CASES["requests"]):
        chance = Random(f"progress {seed} {number}")
        try:
            found = Progress.from_tree(hostile.changed(chance, PLACE))
        except UnisonoError:
            continue
        assert found.position.step >= 0


class Counter:
    """An object of a script."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {"a": 1}

    def state_dict(self) -> dict[str, Any]:
        return {"names": dict(self.names)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.names = {str(name): int(number) for name, number in state["names"].items()}


def a_run() -> Trained:
    """Something of every part that is kept besides the model."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    trained = Trained({"fingerprint": {"a": 1}}, Adaptation((AdaScale(),), 8, 8))
    trained.prepared = Prepared.of(model, [optimizer])
    trained.registered.add("counter", Counter())
    trained.monitors.see(1, GradientNorms((2.0, 3.0), (1, 1), 1.5), [0.5, 0.25])
    trained.monitors.time(Setting(), [Timings(0.1, 0.2)])
    trained.doubt = Doubt(1, 0, "a bit")
    return trained


@pytest.mark.parametrize("seed", SEEDS[:10])
@pytest.mark.parametrize("part", ["model", "optimizer", "state"])
def test_a_part_of_a_snapshot_that_cannot_be_restored_is_named(part: str, seed: int) -> None:
    trained = a_run()
    parts = {name: getattr(trained.capture(), name) for name in ("model", "optimizer", "state")}
    for number in range(CASES["requests"]):
        chance = Random(f"restored {part} {seed} {number}")
        other = {**parts, part: hostile.changed(chance, parts[part])}
        try:
            trained.progress = Progress()
            trained.resume_from(Snapshot(3, other["model"], other["optimizer"], other["state"]))
            trained.settle()
        except CheckpointError as error:
            named = "step 3" in str(error) or "where a run stands" in str(error)
            assert named, error  # noqa: PT017
        except UnisonoError:
            continue


@pytest.mark.parametrize("name", ["monitors", "adaptation", "registered", "strategy", "transient", "progress"])
def test_a_snapshot_without_one_of_its_parts_is_refused(name: str) -> None:
    trained = a_run()
    found = trained.capture()
    del found.state[name]
    with pytest.raises(CheckpointError, match=name):
        trained.go_back(found)


@pytest.mark.parametrize(
    "data",
    [b"[" * 100_000, b'{"a":' * 100_000, b"\xff", b"", b"9" * 5000, b"\xff\xfe[\x00]\x00"],
    ids=lambda it: repr(it[:5]),
)
def test_what_is_no_json_is_unreadable(data: bytes) -> None:
    with pytest.raises(Unreadable):
        parse_json(data)


def test_json_that_is_too_long_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono.received.LARGEST_JSON", 10)
    with pytest.raises(Unreadable, match="more than the 10"):
        parse_object(b'{"a": "0123456789"}')
    assert LARGEST_JSON == 2**28


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Unreadable, match="is no file"):
        read_object(tmp_path / "pipe")
