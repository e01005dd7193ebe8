"""Whatever has a state is registered once; then it comes through a kill, a join and a resume like all else."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from one_at_a_time import Blow, SimulatedMembership, blows_on
from script_cluster import Cluster, Done, Kill
from struck_training import Memory, Outcome, Training, train
from unisono.adapt.batch_policies import AdaScale
from unisono.checkpoint.snapshot import Snapshot
from unisono.errors import CheckpointError, JobError
from unisono.train.group.collectives import Change, CollectiveCalls
from unisono.train.group.workers import Workers
from unisono.train.model.prepared import Prepared
from unisono.train.state.policy_state import PolicyState
from unisono.train.state.registry import UPDATE, Attribute, Copied, Entry, Registry, When
from unisono.train.state.trained import Trained


class Counter:
    """Counts."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.count = state["count"]


class Average(Counter):
    """Keeps a tensor."""

    def state_dict(self) -> dict[str, Any]:
        return {"count": torch.tensor([self.count])}


@dataclass
class Found:
    """Values of closed types."""

    number: int = 0
    names: dict[str, float] = field(default_factory=dict)


@dataclass
class Owner:
    """An object with such values."""

    found: Found = field(default_factory=Found)
    word: str | None = None


# Decisions.


@pytest.mark.unit
@pytest.mark.parametrize(
    ("when", "moments"),
    [(("early",), {"early"}), (UPDATE, {"early", "behind"}), (("script",), {"script"}), ((), set())],
)
def test_an_entry_is_restored_at_its_moments_and_at_no_other(when: When, moments: set[str]) -> None:
    registry, counter = Registry(), Counter(1)
    registry.add("counter", counter, when=when)
    snapshot = registry.capture(3)
    for moment in ("early", "behind", "weights", "kept", "script", "last"):
        counter.count = 5
        registry.restore(snapshot, moment)
        assert counter.count == (1 if moment in moments else 5), moment


@pytest.mark.unit
def test_what_is_no_part_of_checkpoints_is_handed_over_as_it_is_now_with_a_checkpoint_of_before() -> None:
    registry, kept, live = Registry(), Counter(1), Counter(1)
    registry.add("kept", kept)
    registry.add("live", live, within=(), when=UPDATE, checkpoint=False)
    registry.add("lone", Counter(7), hand_over=False)
    snapshot = registry.capture(3)
    assert snapshot.state == {"registered": {"kept": {"count": 1}, "lone": {"count": 7}}}
    kept.count = live.count = 2
    given = registry.handed_over(snapshot)
    assert given.state == {"registered": {"kept": {"count": 1}}, "live": {"count": 2}}
    live.count = 3
    assert registry.handed_over(given).state["live"] == {"count": 3}
    assert snapshot.state == {"registered": {"kept": {"count": 1}, "lone": {"count": 7}}}


@pytest.mark.unit
@pytest.mark.parametrize("rules", [{"checkpoint": False}, {"hand_over": False}, {"optional": True}])
def test_what_a_state_may_be_without_stays_as_it_is(rules: dict[str, Any]) -> None:
    registry, counter = Registry(), Counter(4)
    registry.add("counter", counter, **rules)
    registry.restore(Snapshot(3, {}, [], {"registered": {}}), "script")
    assert counter.count == 4


@pytest.mark.unit
def test_what_a_state_cannot_be_without_is_named() -> None:
    registry = Registry()
    registry.add("counter", Counter())
    with pytest.raises(CheckpointError, match="only in the script \\['counter'\\]"):
        registry.restore(Snapshot(3, {}, [], {"registered": {}}), "script")
    registry.add("place", Counter(), within=(), when=("early",))
    with pytest.raises(CheckpointError, match="the checkpoint of step 3 has no place"):
        registry.restore(Snapshot(3, {}, [], {}), "early")


@pytest.mark.unit
def test_a_name_is_taken_once_and_a_thing_without_a_state_is_refused() -> None:
    registry = Registry()
    registry.add("counter", Counter())
    registry.add("counter", Counter(), within=("others",))
    with pytest.raises(JobError, match="the name is taken by a Counter"):
        registry.add("counter", Average())
    with pytest.raises(JobError, match="object has no state_dict and load_state_dict"):
        registry.add("nothing", object())


@pytest.mark.unit
def test_what_takes_the_place_of_another_one_is_the_only_one_of_its_name() -> None:
    registry = Registry()
    registry.add("counter", Counter(1))
    registry.put(Entry(("registered", "counter"), Counter(2)))
    assert registry.capture(0).state == {"registered": {"counter": {"count": 2}}}


@pytest.mark.unit
@pytest.mark.parametrize(
    "state",
    [{}, {"number": 1}, {"number": "1", "names": {}}, {"number": 1, "names": {"a": "b"}}, {"number": 1, "more": 2}, 3],
)
def test_an_attribute_takes_no_other_types_and_nothing_else_is_set_then(state: Any) -> None:
    registry, owner = Registry(), Owner(Found(1, {"a": 2.0}), "word")
    registry.add("word", Attribute(owner, "word", str | None), within=(), when=UPDATE)
    registry.add("found", Attribute(owner, "found", Found), within=(), when=UPDATE)
    good = registry.capture(3)
    assert good.state == {"registered": {}, "word": "word", "found": {"number": 1, "names": {"a": 2.0}}}
    with (
        pytest.raises(CheckpointError, match="the found in the checkpoint of step 3 cannot be restored"),
        registry.all_or_nothing(),
    ):
        registry.restore(Snapshot(3, {}, [], {**good.state, "word": None, "found": state}), "behind")
    assert owner == Owner(Found(1, {"a": 2.0}), "word")
    registry.restore(Snapshot(3, {}, [], {**good.state, "word": None}), "behind")
    assert owner == Owner(Found(1, {"a": 2.0}), None)


@pytest.mark.unit
def test_a_copied_state_changes_with_nothing() -> None:
    class Names(Counter):
        names: list[str]

        def state_dict(self) -> dict[str, Any]:
            return {"names": self.names}

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            self.names = state["names"]

    registry, names = Registry(), Names()
    names.names = ["one"]
    registry.add("names", Copied(names))
    snapshot = registry.capture(3)
    names.names.append("two")
    registry.restore(snapshot, "script")
    names.names.append("three")
    assert snapshot.state == {"registered": {"names": {"names": ["one"]}}}


@pytest.mark.unit
def test_tensors_of_what_is_the_same_on_all_workers_are_compared_and_of_nothing_else() -> None:
    registry = Registry()
    for name in ("average", "ignored"):
        registry.add(name, Average(3))
    registry.add("own", Average(3), compare=False)
    registry.add("further", Average(3), within=(), compare=True)
    registry.add("numbers", Counter(3))
    found = registry.digests(registry.capture(0), ["ignored"])
    assert found.keys() == {"average", "further"}
    assert found["average"] == found["further"]


@pytest.mark.unit
def test_a_checkpoint_of_the_version_before_is_read() -> None:
    trained = Trained({}, PolicyState((AdaScale(),), 8, 8))
    model = torch.nn.Linear(2, 1)
    trained.prepared = Prepared.of(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    now = trained.capture()
    seen = now.state["adaptation"]["policies"]["ada-scale"]["seen"]
    state: dict[str, Any] = {
        "progress": {
            "position": {"step": 3, "samples": 24, "epoch": 1, "offset": 8},
            "loop": 0,
            "reading": {"samples": 16, "shuffle": True, "drop_last": False, "order": "", "content": ""},
            "readers": [],
        },
        "registered": {},
        "transient": {},
        "order": [["weight", "bias"]],
        "optimizers": ["SGD"],
        "trained": ["weight", "bias"],
        "evaluating": [],
        "about": {"fingerprint": {}},
        "monitors": {
            **now.state["monitors"],
            "timings": [{"shard_s": 0.1, "step_s": 0.2}],
            "seconds": 0.5,
            "links": {"latency_s": [[0.0]], "bytes_per_s": [[0.0]]},
        },
        "adaptation": {
            **now.state["adaptation"],
            "rate": 2.0,
            "policies": {"ada-scale": {"tau": 1.5, "gain": 2.0, "factor": 3.0, "seen": seen}},
        },
        "strategy": ["", {}],
        "doubt": None,
    }
    trained.resume_from(Snapshot(3, now.model, now.optimizer, state))
    assert trained.settle()
    assert trained.progress.position.offset == 8
    assert (trained.monitors.seconds, trained.monitors.timings[0].step_s) == (0.5, 0.2)
    assert trained.policy_state.rate == 2.0
    assert vars(trained.policy_state.policies[0])["tau"] == 1.5
    assert trained.strategy == ("", {})


# A thing that is new, and that nothing else knows of.


class WithMore(Training):
    """A script with a counter of each kind."""

    def __init__(
        self, membership: SimulatedMembership, memory: Memory, acts: type[CollectiveCalls] = CollectiveCalls
    ) -> None:
        super().__init__(membership, memory, acts)
        self.updates, self.handed, self.steps = Counter(), Counter(), Counter()
        self.trained.registry.add("updates", self.updates, within=("counters",), when=UPDATE)
        self.trained.registry.add("handed", self.handed, when=UPDATE, checkpoint=False)
        self.trained.registry.add("steps", self.steps)

    def one_step(self, workers: Workers) -> Change[float]:
        change = super().one_step(workers)

        def make() -> float:
            for counter in (self.updates, self.handed):
                counter.count = 3 * counter.count + self.trained.progress.position.step + 1
            return change.make()

        return Change(make, change.then)

    def body_goes_on(self) -> None:
        self.steps.count = 3 * self.steps.count + self.trained.progress.position.step + 1

    def digest(self) -> str:
        return f"{super().digest()} {self.updates.count} {self.handed.count} {self.steps.count}"


def ends(outcome: Outcome) -> set[str]:
    """Where the workers of a job have come to."""
    return set(outcome.digests.values())


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("workers", "joiners"), [(1, 1), (2, 0), pytest.param(2, 1, marks=pytest.mark.slow), (3, 0), (3, 1)]
)
def test_a_thing_that_is_new_comes_through_a_kill_and_a_join(
    pool: ThreadPoolExecutor, workers: int, joiners: int
) -> None:
    serial = ends(train(pool, 1, kind=WithMore))
    assert " 5 5 5" in next(iter(serial))
    whole = train(pool, workers, joiners, kind=WithMore)
    assert ends(whole) == serial
    known = {"5", "2"} if workers == 1 else {"5"}  # where nobody is left, what is no part of checkpoints begins anew
    expected = {one.replace(" 5 5 5", f" 5 {handed} 5") for one in serial for handed in known}
    for blow in list(blows_on(whole.world))[::5]:
        found = ends(train(pool, workers, joiners, blow, kind=WithMore))
        assert len(found) == 1, blow
        assert found <= expected, blow


@pytest.mark.cluster
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_thing_that_is_new_comes_through_a_resume(pool: ThreadPoolExecutor, workers: int) -> None:
    memory = Memory()
    serial = ends(train(pool, 1, memory=memory, kind=WithMore))

    def resumed(*blows: Blow) -> Outcome:
        half = Memory()
        half.kept = memory.kept[:1]
        return train(pool, workers, 0, *blows, memory=half, kind=WithMore)

    whole = resumed()
    expected = {one.replace(" 5 5 5", " 5 2 5") for one in serial}  # what is no part of checkpoints begins anew
    assert ends(whole) == expected
    if workers > 1:
        for blow in list(blows_on(whole.world))[::7]:
            assert ends(resumed(blow)) == expected, blow


SCRIPT = """
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import unisono
from unisono.train.state.registry import Attribute


class Seen:
    samples = 0


x = torch.randn(60, 4, generator=torch.Generator().manual_seed(1))
run = unisono.init(batch_size=12, shards=4, seed=3, checkpoints={"every": 1})
model = torch.nn.Linear(4, 3)
run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
seen, loss = Seen(), Seen()
run.register("seen", Attribute(seen, "samples", int))
run.inside.trained.registry.add("loss", Attribute(loss, "samples", float), within=("mine",))
for step in run.steps(TensorDataset(x, torch.arange(60) % 3), epochs=2):
    found = step.run(lambda model, batch: cross_entropy(model(batch[0]), batch[1]))
    seen.samples = 2 * seen.samples + step.size
    loss.samples = loss.samples / 2 + found
print("epoch 2:", run.finish(), seen.samples, repr(loss.samples), "on", run.rank)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "more.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def alone(script: Path, tmp_path_factory: pytest.TempPathFactory) -> Done:
    return Cluster(tmp_path_factory.mktemp("alone"))(script, 1, shards=4)


@pytest.mark.cluster
@pytest.mark.parametrize("workers", [2, 3])
def test_so_does_one_of_a_script(workers: int, script: Path, alone: Done, tmp_path: Path) -> None:
    kills = (Kill(2, 0), Kill(4, 1, 3), Kill(7, 0, 2))
    done = Cluster(tmp_path)(script, (workers, workers), shards=4, kills=kills)
    assert done.world.struck == 3
    assert done.said == alone.said
    assert len(done.said) == 1


@pytest.mark.cluster
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_and_it_goes_on_when_the_job_is_started_again(workers: int, script: Path, alone: Done, tmp_path: Path) -> None:
    cluster, folder = Cluster(tmp_path), tmp_path / "run"
    cluster(script, 2, shards=4, folder=folder, UNISONO_STOP_AFTER="4")
    done = cluster(script, workers, shards=4, folder=folder)
    assert done.journal("resumed")[0]["step"] == 4
    assert [line for line in done.said if line.startswith("epoch")] == alone.said


@pytest.mark.unit
def test_what_is_no_part_of_checkpoints_is_not_restored_from_one_that_has_it_all_the_same() -> None:
    registry, kept, left = Registry(), Counter(1), Counter(1)
    registry.add("kept", kept, within=())
    registry.add("left", left, within=(), checkpoint=False)
    forged = Snapshot(3, {}, [], {"kept": {"count": 2}, "left": {"count": 2}, "registered": {}})
    registry.restore(registry.as_read(forged), "script")
    assert (kept.count, left.count) == (2, 1)
