"""Whatever stands in a run folder or comes from a process of this user: a value comes of it, or an error of ours."""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import hostile
import unisono
from forks.request import ForkRequest
from unisono.adapt.batch_policies import AdaScale, LinearScaling, NoiseScalePolicy
from unisono.adapt.communication_policies import StragglerPolicy, StrategyPolicy, TopologyPolicy
from unisono.adapt.layout_policies import GoodputPolicy, ScalingPolicy, SpotPolicy
from unisono.adapt.norms import GradientNorms
from unisono.adapt.view import Policy, Setting, Timings, View
from unisono.checkpoint.folder import MetricsFile, RunFolder
from unisono.checkpoint.snapshot import Snapshot
from unisono.checkpoint.writer import describe_holder, newest_term
from unisono.errors import CheckpointError, JobError, UnisonoError, UnisonoWarning, Unreadable
from unisono.jsonl import read_lines
from unisono.launch.elastic.address import WHERE, address_of
from unisono.launch.failure import Failure, end_of
from unisono.launch.outcome import WorkerExit, with_faults
from unisono.launch.worker_start import WorkerRequest
from unisono.membership.coordinator import Coordinator
from unisono.membership.keyvalue import KeyValue
from unisono.membership.state.state import ElasticConfig
from unisono.membership.state_log import StateLog
from unisono.plan.batches import Position
from unisono.received import LARGEST_JSON, memory, parse_json
from unisono.train.model.prepared import Prepared
from unisono.train.model.tensors import set_like
from unisono.train.recovery.integrity import Integrity
from unisono.train.recovery.known_states import KnownStates, StateCopies
from unisono.train.state.policy_state import PolicyState
from unisono.train.state.registry import Attribute, kept_value
from unisono.train.state.trained import Doubt, RunProgress, Trained

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
    ("lock", {"pid": 1, "host": "h", "term": 3}, lambda folder: (newest_term(folder), describe_holder(folder))),
    (
        "logs/rank-0.error.json",
        asdict(Failure(0, "h", 1, "KeyError", "m", "t", consequence=False, time=1.5, exit_code=1)),
        lambda folder: Failure.read(RunFolder(folder), 0),
    ),
]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_hostile_file_of_a_run_folder_becomes_a_value_or_an_error(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # thousands take minutes
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
    with closing(StateLog(tmp_path / "coordinator.jsonl", lambda: ())) as state_log:
        for entry in state_log.read():
            values.restore(entry)
    assert [json.loads(json.dumps(entry)) for entry in values.entries()] == list(values.entries())


@pytest.mark.parametrize(("generation", "worker"), [(2**70, 1), (-5, 1), (1, 10**200), (True, 1), (1, "1")])
def test_numbers_of_an_earlier_start_that_cannot_be_are_left_out(tmp_path: Path, generation: Any, worker: Any) -> None:
    state = {"generation": generation, "last_worker": worker}
    (tmp_path / "coordinator.jsonl").write_text(json.dumps({"state": state}) + "\n")
    coordinator = Coordinator(tmp_path, ElasticConfig(), fresh=True)
    try:
        assert (coordinator.state.generation, coordinator.state.last_worker) == (0, 0)
    finally:
        coordinator.close()


def test_a_coordinator_waits_for_no_pipe_in_place_of_its_ledger(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "coordinator.jsonl")
    with pytest.raises(JobError, match="it is no file"):
        StateLog(tmp_path / "coordinator.jsonl", lambda: ())


def test_a_launcher_waits_for_no_pipe_in_place_of_the_note_how_a_script_ended(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.ended_of("w1").parent.mkdir(exist_ok=True)
    os.mkfifo(folder.ended_of("w1"))
    assert end_of(folder, "w1", -9)[0] == -9


WISH = ForkRequest({"A": "b"}, {"limits": "c"}, ("unisono", "run"), (0, 1, 2, 7), "/", (1, 2))
REQUEST = WorkerRequest(("train.py", "--x"), {"A": "b"}, "/")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_hostile_wish_or_request_becomes_one_or_an_error(seed: int) -> None:
    for number in range(CASES["requests"]):
        chance = Random(f"requests {seed} {number}")
        both: list[tuple[Any, Callable[[bytes], Any]]] = [
            (WISH, ForkRequest.from_json),
            (REQUEST, WorkerRequest.from_json),
        ]
        good, read = chance.choice(both)
        told = hostile.as_text(hostile.changed(chance, json.loads(good.to_json())))
        try:
            found = read(hostile.mutated(chance, told) if chance.random() < 0.5 else told)
        except Unreadable:
            continue
        assert read(found.to_json()) == found


PLACE = asdict(RunProgress())


@pytest.mark.parametrize("seed", SEEDS[:10])
def test_where_a_run_stands_is_numbers_or_an_error(seed: int) -> None:
    for number in range(CASES["requests"]):
        chance = Random(f"progress {seed} {number}")
        try:
            found = kept_value(RunProgress, hostile.changed(chance, PLACE), "progress")
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
    trained = Trained({"fingerprint": {"a": 1}}, PolicyState((AdaScale(),), 8, 8))
    trained.prepared = Prepared.of(model, [optimizer])
    trained.registry.add("counter", Counter())
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
            trained.progress = RunProgress()
            trained.resume_from(Snapshot(3, other["model"], other["optimizer"], other["state"]))
            trained.settle()
        except CheckpointError as error:
            named = "step 3" in str(error) or "where a run stands" in str(error)
            assert named, error  # noqa: PT017
        except UnisonoError:
            continue


def small_parts(trained: Trained) -> str:
    """All that a run knows besides its weights and optimizers."""
    known = [asdict(trained.monitors), trained.policy_state.state_dict(), asdict(trained.progress)]
    return repr([*known, trained.strategy, trained.doubt, [vars(one) for one in trained.policy_state.policies]])


def weights(trained: Trained) -> str:
    """Their digest."""
    assert trained.prepared is not None
    return unisono.digest(trained.prepared.modules[0])


@pytest.mark.parametrize("seed", SEEDS[:10])
@pytest.mark.parametrize("part", ["monitors", "adaptation", "strategy", "doubt", "progress"])
def test_what_another_worker_gives_is_taken_whole_or_not_at_all(part: str, seed: int) -> None:
    trained = a_run()
    good = trained.capture()
    for number in range(CASES["requests"]):
        chance = Random(f"given {part} {seed} {number}")
        before = small_parts(trained), weights(trained)
        state = {**good.state, part: hostile.changed(chance, good.state[part])}
        try:
            trained.take([True, 3, good.model, good.optimizer, state], joins=True)
        except UnisonoError as error:
            assert part in str(error) or isinstance(error, JobError), error  # noqa: PT017
            assert (small_parts(trained), weights(trained)) == before
        else:
            used(trained)
            trained = a_run()


def a_view(trained: Trained) -> View:
    """What policies see of it."""
    monitors, setting = trained.monitors, trained.monitors.setting
    position = trained.progress.position
    return View(
        step=position.step,
        epoch=position.epoch,
        samples=position.samples,
        batch_size=trained.policy_state.batch_size,
        base_batch_size=8,
        shards=trained.policy_state.shards,
        base_shards=8,
        world_size=setting.world_size,
        learning_rate=0.1,
        noise=monitors.noise.noise,
        norms=monitors.norms_of(position.step - 1),
        workers=monitors.timings,
        steady=monitors.steady,
        seconds=monitors.seconds,
        generation=setting.generation,
        departures=setting.departures,
        topology=setting.topology,
        links=monitors.links,
        observed=trained.policy_state.observed,
    )


def used(trained: Trained) -> None:
    """What the next step does with it ends in an error of ours, if in any."""
    assert trained.prepared is not None
    view = a_view(trained)
    with suppress(UnisonoError):
        trained.policy_state.take(trained.policy_state.ask("after_step", view), view, loop=0)
        with trained.policy_state.scaled(trained.prepared.optimizers):
            trained.monitors.see(view.step, GradientNorms((2.0, 3.0), (1, 1), 1.5), [0.5, 0.25])
            trained.monitors.time(Setting(), [Timings(0.1, 0.2)])


HOSTILE = [
    ("progress", "readers", [{"samples": -1, "state": None}]),
    ("monitors", "seconds", "x"),
    ("monitors", "timings", [{"step_s": "x"}]),
    ("monitors", "noise", {"variance": {"decay": 0.5, "total": "x"}, "signal": {"decay": 0.5}}),
    ("monitors", "links", {"latency_s": [[0.0], []], "bytes_per_s": [[0.0]]}),
    ("adaptation", "rate", "2"),
    ("adaptation", "rate", float("nan")),
    ("adaptation", "shards", 12),
    ("adaptation", "topology", "spiral"),
    ("adaptation", "observed", {"spot": {"price": [1]}}),
    ("adaptation", "policies", {"ada-scale": {"after_step": 1}}),
    ("adaptation", "policies", {"ada-scale": {"tau": "x", "gain": 1.0, "factor": 1.0}}),
]


@pytest.mark.parametrize(("part", "name", "value"), HOSTILE)
def test_a_value_of_a_wrong_type_or_without_sense_is_refused_and_its_part_named(
    part: str, name: str, value: Any
) -> None:
    trained = a_run()
    good = trained.capture()
    before = small_parts(trained)
    state = {**good.state, part: {**good.state[part], name: value}}
    with pytest.raises(CheckpointError, match=f"the {part} in the checkpoint of step 3"):
        trained.resume_from(Snapshot(3, good.model, good.optimizer, state))
    assert small_parts(trained) == before


def test_another_model_leaves_all_else_as_it_was() -> None:
    trained = a_run()
    good = trained.capture()
    before = small_parts(trained)
    state = {**good.state, "progress": {**good.state["progress"], "loop": 4}}
    with pytest.raises(CheckpointError, match="holds another model"):
        trained.resume_from(Snapshot(3, {}, good.optimizer, state))
    assert small_parts(trained) == before
    assert trained.restored is None


KNOWN: dict[str, Any] = {
    "right": {"step": 3, "digests": {"model": 2**64 - 1}},
    "waits": None,
    "cleared": [0, 2],
    "returns": 1,
    "digests": {(4, 0): 5},
    "given": {(4, 0): [8, 9, 10]},
    "wrong": {(4, 0): [6, 7]},
    "ignored": ["counter"],
    "before": {"3 counter": [1, 2]},
    "script_writes": False,
    "unseen": "nobody has compared it",
}


def test_what_another_worker_knows_of_older_states_is_taken_whole_or_not_at_all() -> None:
    for number in range(5 * CASES["requests"]):
        trained = a_run()
        integrity = Integrity(trained, StateCopies(trained), 10)
        known = Attribute(integrity, "known", KnownStates)
        known.load_state_dict(KNOWN)
        assert known.state_dict() == KNOWN
        try:
            known.load_state_dict(hostile.changed(Random(f"known {number}"), KNOWN))
        except Unreadable:
            assert known.state_dict() == KNOWN
        else:
            known.state_dict()


POLICIES: list[Callable[[], Policy]] = [
    AdaScale,
    StragglerPolicy,
    TopologyPolicy,
    ScalingPolicy,
    lambda: GoodputPolicy(largest=64),
    lambda: NoiseScalePolicy(largest=64),
    lambda: LinearScaling(2.0, 100),
    lambda: StrategyPolicy(workers={1: "all-reduce", 2: "local-sgd"}),
    lambda: SpotPolicy(dict),
]


def a_policy_at_work(make: Callable[[], Policy]) -> Trained:
    """A run in which a policy has seen some steps of two uneven workers."""
    trained = Trained({"fingerprint": {}}, PolicyState((make(),), 8, 8))
    trained.prepared = a_run().prepared
    for step in range(30):
        trained.progress = RunProgress(Position(step=step + 1, samples=8 * step + 8))
        norms = GradientNorms((2.0, 3.0), (1, 1), 1.5)
        trained.monitors.see(step, norms, [0.5, 0.25])
        setting = Setting(1, 2, 8, 8, "ring")
        trained.monitors.time(setting, [Timings(0.1, 0.2, exposed_s=0.01), Timings(0.4, 0.2 + step, exposed_s=0.1)])
        trained.policy_state.ask("after_step", a_view(trained))
    return trained


@pytest.mark.parametrize("make", POLICIES, ids=lambda make: make().name)
def test_the_state_of_a_policy_is_set_whole_or_not_at_all(make: Callable[[], Policy]) -> None:
    trained = a_policy_at_work(make)
    good = trained.capture()
    name = trained.policy_state.names[0]
    state = good.state["adaptation"]
    for number in range(3 * CASES["requests"]):
        chance = Random(f"policy {name} {number}")
        other = {**state, "policies": {name: hostile.changed(chance, state["policies"][name])}}
        before = small_parts(trained)
        try:
            trained.resume_from(Snapshot(30, good.model, good.optimizer, {**good.state, "adaptation": other}))
        except CheckpointError:
            assert small_parts(trained) == before
        else:
            used(trained)
            trained.resume_from(good)


@pytest.mark.parametrize("found", [None, [], [torch.zeros(3)], [torch.zeros(1), torch.zeros(2)], [torch.zeros(2), 1]])
def test_tensors_of_a_strategy_are_set_all_or_none(found: Any) -> None:
    tensors = [torch.ones(2), torch.ones(2)]
    with pytest.raises(CheckpointError, match="the velocity of the strategy"):
        set_like(tensors, found, "velocity")
    assert all(bool((tensor == 1).all()) for tensor in tensors)


@pytest.mark.parametrize("given", [3, [True], [True, 3, {}, [], None], [True, -1, {}, [], {}], [1, 3, {}, [], {}]])
def test_what_is_no_state_is_not_taken_from_another_worker(given: Any) -> None:
    with pytest.raises((CheckpointError, Unreadable), match="worker"):
        a_run().take(given, joins=True)


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


def test_json_that_is_too_long_is_not_parsed() -> None:
    with pytest.raises(Unreadable, match="more than the 10"):
        parse_json(b'{"a": "0123456789"}', most=10)
    assert LARGEST_JSON == 2**28


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
@pytest.mark.parametrize("name", ["journal.jsonl", "metrics.jsonl", "writer.json", "lock"])
def test_a_pipe_or_a_folder_among_the_files_of_a_run_is_neither_waited_for_nor_believed(
    name: str, make: Callable[[Path], None], tmp_path: Path
) -> None:
    make(tmp_path / name)
    assert newest_term(tmp_path) == 0
    folder = RunFolder(tmp_path)
    if name == "metrics.jsonl":
        with pytest.raises(JobError, match="cannot be read"):
            folder.metrics.truncate_after(3)
    if name == "journal.jsonl":
        with pytest.warns(UnisonoWarning, match="is incomplete"):
            folder.journal("healed")
    assert folder.mended() == {"healed": [], "rolled_back": [], "wrong_results": []}
    killed = WorkerExit(0, -9, 1.0, pid=7)
    assert with_faults([killed], folder) == (killed,)


def test_a_fault_in_the_journal_that_is_none_explains_nothing(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").write_text('{"event": "fault", "pid": [7], "kind": {}}\n')
    killed = WorkerExit(0, -9, 1.0, pid=7)
    assert with_faults([killed], RunFolder(tmp_path)) == (killed,)


def test_lines_that_are_more_than_the_memory_are_not_read(tmp_path: Path) -> None:
    with (tmp_path / "journal.jsonl").open("wb") as file:
        file.truncate(memory())
    assert RunFolder(tmp_path).mended()["healed"] == []
    with pytest.raises(Unreadable, match="too many"):
        read_lines(tmp_path / "journal.jsonl")
