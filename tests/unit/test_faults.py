"""Faults as data: what can be written, what is refused, and whom and when they strike."""

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn
from torch.utils.data import TensorDataset

import unisono
from unisono.checkpoint.checkpoint_store import CheckpointStore
from unisono.errors import JobError, UnisonoWarning
from unisono.failpoints import failpoint
from unisono.train.plugins import Event, load_plugins
from unisono_lab.commands.chaos import restart_reason
from unisono_lab.faults.faults import KINDS, RECOVERY, SHARES, Fault, Faults, RandomFaults, Slow, listening
from unisono_lab.faults.injector import PLUGIN, FaultInjector, flip_in, is_in_recovery

pytestmark = pytest.mark.unit

ALL = (
    Faults()
    .kill(rank=0, at_step=2, after_s=0.01)
    .stop(rank=1, at_step=5)
    .stop(rank=1, at_step=5, for_s=0.5)
    .slow(rank=2, factor=3, steps=4)
    .join(at_step=7, workers=2)
    .leave(rank=1, at_step=9)
    .resize(workers=2, at_step=10)
    .kill_coordinator(at_step=11, for_s=1)
    .kill_agent(rank=3, at_step=12)
    .partition(rank=1, at_step=13, for_s=0.2)
    .flip_bit(rank=1, at_step=14)
    .flip_bit(rank=1, at_step=14, place="gradient", bit=30)
    .flip_bit(rank=1, at_step=14, place="checkpoint", bit=2**20)
    .wrong_result(rank=1, at_step=15)
    .kill(rank=1, at_step=16)
    .in_recovery("state taken")
    .partition(rank=0, at_step=17, after_s=0.01)
    .in_recovery()
)


# -- what is written


def test_a_script_of_every_kind_is_the_same_after_it_was_written_and_read() -> None:
    assert {fault.kind for fault in ALL.faults} == set(KINDS)
    assert Faults.from_toml(ALL.to_toml()) == ALL
    assert Faults.from_toml("") == Faults()


def test_a_script_does_not_change_and_what_is_built_is_checked_like_what_is_written() -> None:
    with pytest.raises(JobError, match=r"fault 2 \(kill\): rank = -1"):
        Faults().join(at_step=0).kill(rank=-1, at_step=0)
    first = Faults().kill(rank=0, at_step=2)
    second = first.join(at_step=3)
    assert (len(first.faults), len(second.faults)) == (1, 2)
    with pytest.raises(ValidationError):
        first.faults[0].at_step = 9


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (
            'kind = "kill"\nrank = -1\nat_step = 2',
            r"fault 2 \(kill\): rank = -1: needs to be greater than or equal to 0",
        ),
        ('kind = "kill"\nat_step = 2', r"fault 2 \(kill\): rank is missing: write rank = …"),
        ('kind = "kill"\nrank = 1\nat_step = 2\nfor_s = 1', r"fault 2 \(kill\): for_s is unknown: kill has "),
        ('kind = "bite"\nrank = 1', r"fault 2: kind 'bite' is unknown: use one of kill, stop, "),
        ("rank = 1", r"fault 2: kind None is unknown"),
        ('kind = ["kill"]', r"fault 2: kind \['kill'\] is unknown"),
        ('kind = "stop"\nrank = 0\nat_step = 1\nfor_s = 1e300', r"for_s = 1e\+300: needs to be less than or equal"),
        ('kind = "slow"\nrank = 1\nfactor = inf\nat_step = 1', r"fault 2 \(slow\): factor = inf: needs to be a finite"),
        ('kind = "stop"\nrank = 1\nat_step = 1\nfor_s = 0', r"fault 2 \(stop\): for_s = 0: needs to be greater than 0"),
        (
            'kind = "kill"\nrank = 0\nat_step = 1\npoint = "state taken"',
            r"fault 2 \(kill\): point = 'state taken' belongs to a recovery: also write during = \"recovery\"",
        ),
        ('kind = "kill"\nrank = 0\nat_step = 1\nduring = "lunch"', r"fault 2 \(kill\): during = 'lunch': needs to be"),
        ('kind = "slow"\nrank = 0\nfactor = 2\nat_step = 1\nduring = "recovery"', r"\(slow\): during is unknown: "),
    ],
)
def test_a_fault_that_makes_no_sense_is_refused_with_its_number_and_field(table: str, words: str) -> None:
    good = '[[fault]]\nkind = "join"\nat_step = 1\n'
    with pytest.raises(JobError, match=words):
        Faults.from_toml(f"{good}[[fault]]\n{table}\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[fault]\n", "is no TOML"),
        (f"a = {'[' * 3000}", "is no TOML: it is nested too deep"),
        (f"a = {'9' * 5000}", "is no TOML: "),
        ("[[faults]]\nrank = 1", "'faults' is unknown: write"),
        ("fault = 3", "'fault' is unk"),
    ],
)
def test_a_script_that_is_none_is_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "script.toml"
    path.write_text(text)
    with pytest.raises(JobError, match=rf"script\.toml.*{words}"):
        Faults.read(path)
    with pytest.raises(JobError, match=r"/nowhere\.toml cannot be read"):
        Faults.read(Path("/nowhere.toml"))


# -- what is drawn


@given(st.integers(), st.integers(1, 300), st.integers(2, 5000), st.integers(2, 64))
def test_a_storm_has_as_many_faults_as_it_should_inside_of_the_job(
    seed: int, faults: int, steps: int, largest: int
) -> None:
    script = RandomFaults(seed, faults, steps, largest).draw()
    assert len(script.faults) == faults
    assert all(1 <= fault.at_step < steps for fault in script.faults)
    assert script == RandomFaults(seed, faults, steps, largest).draw()
    if faults >= len(SHARES):
        assert set(script.counts) == set(SHARES)


def test_some_faults_of_a_storm_strike_inside_of_a_recovery_and_most_do_not() -> None:
    script = RandomFaults(1, 200, 1000, 4).draw()
    inside = [fault for fault in script.faults if is_in_recovery(fault)]
    assert 20 < len(inside) < 80
    assert {getattr(fault, "point", "") for fault in inside} == set(RECOVERY)


# -- whom they strike


@pytest.fixture
def training(tmp_path: Path, one_worker: None) -> Iterator[unisono.Run]:
    run = unisono.init(batch_size=8, shards=2, run_dir=tmp_path / "run")
    yield run
    run.close()


def loop(run: unisono.Run, seen: Any = lambda step: None, epochs: int = 1) -> None:
    model = nn.Linear(3, 1)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps(TensorDataset(torch.randn(40, 3)), epochs=epochs):
        step.run(lambda model, batch: model(batch[0]).square().mean())
        seen(step)


def struck(run: unisono.Run) -> list[tuple[int, int]]:
    """The numbers of the faults that struck, each with its step."""
    path = run.dir / "journal.jsonl"
    lines = map(json.loads, path.read_text().splitlines())
    return [(line["number"], line["step"]) for line in lines if line["event"] == "fault"]


def test_a_fault_strikes_before_its_step_and_never_again_in_its_folder(training: unisono.Run) -> None:
    faults = Faults().flip_bit(rank=0, at_step=3).flip_bit(rank=5, at_step=1).flip_bit(rank=0, at_step=99)
    FaultInjector(faults).attach(training)
    FaultInjector(faults).attach(training)  # as another worker of the same rank after a loss
    with pytest.warns(UnisonoWarning, match="goes back"):
        loop(training)
    assert struck(training) == [(2, 1), (1, 3)]


def test_a_fault_of_a_recovery_waits_for_its_step_and_then_for_its_point(training: unisono.Run) -> None:
    done: list[tuple[str, int]] = []

    def inject(fault: Fault, run: unisono.Run) -> None:
        done.append((fault.kind, run.inside.collectives.step))

    faults = Faults().kill(rank=0, at_step=2).in_recovery("generation formed").leave(rank=3, at_step=3).in_recovery()

    def recover(step: Any) -> None:
        failpoint("regroup begins")
        failpoint("generation formed")

    with listening(lambda point: None):  # who listens afterwards is who did before
        FaultInjector(faults, inject).attach(training)
        loop(training, recover)
    assert done == [("kill", 2), ("leave", 3)]
    assert struck(training) == [(1, 2), (2, 3)]


def test_a_fault_of_a_hand_over_strikes_whoever_gives_the_state_or_gets_it(training: unisono.Run) -> None:
    done: list[str] = []

    def inject(fault: Fault, run: unisono.Run) -> None:
        done.append(fault.kind)

    faults = Faults().kill(rank=1, at_step=0).in_recovery("state taken").stop(rank=1, at_step=0).in_recovery()

    def recover(step: Any) -> None:
        failpoint("regroup begins")
        failpoint("state taken")

    with listening(lambda point: None):
        FaultInjector(faults, inject, lambda fault, workers: 1).attach(training)  # and here is rank 0
        loop(training, recover)
    assert done == ["kill"]


def test_a_flipped_bit_is_one_bit_of_the_weights(training: unisono.Run) -> None:
    model = nn.Linear(3, 1)
    training.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    before, version = model.weight.detach().clone(), model.weight._version
    for bit in (0, 23, 31):
        flip_in(training, "weights", bit)
        changed = (model.weight.view(torch.int32) ^ before.view(torch.int32)).flatten().tolist()
        assert sorted(map(abs, changed)) == [0, 0, 1 << bit]
        flip_in(training, "weights", bit)
    assert torch.equal(model.weight, before)
    assert model.weight._version == version  # nobody is told


def test_a_flipped_bit_of_a_checkpoint_is_found_when_it_is_read_and_the_one_before_it_is_used(
    one_worker: None, tmp_path: Path
) -> None:
    with unisono.init(batch_size=8, shards=2, run_dir=tmp_path / "run", checkpoints={"every": 2}) as run:
        FaultInjector(Faults().flip_bit(rank=0, at_step=4, place="checkpoint", bit=12_345)).attach(run)
        loop(run)
    assert struck(run) == [(1, 4)]
    with pytest.warns(UnisonoWarning, match="(?s)goes on from step 2, since .*step-00000004.*model.safetensors"):
        CheckpointStore(run.dir / "checkpoints").newest()


def test_a_bit_to_flip_in_a_checkpoint_that_is_not_there_is_an_error(training: unisono.Run) -> None:
    FaultInjector(Faults().flip_bit(rank=0, at_step=1, place="checkpoint")).attach(training)
    with pytest.raises(JobError, match="there is no checkpoint yet: set checkpoints="):
        loop(training)


def test_a_slow_worker_takes_longer_for_as_many_steps_as_it_should(training: unisono.Run) -> None:
    slept: list[tuple[int, float]] = []
    steps: list[Any] = []

    def sleep(seconds: float) -> None:
        slept.append((len(steps), seconds))

    FaultInjector(Faults().slow(rank=0, factor=3, at_step=1, steps=2), sleep=sleep).attach(training)
    loop(training, steps.append)
    assert [number for number, _ in slept] == [1, 2]
    assert [seconds for _, seconds in slept] == [2 * steps[number].computed_s for number in (1, 2)]
    assert Slow(rank=0, factor=3, at_step=1).steps is None


# -- how they come into workers


def test_a_plugin_is_called_with_the_run_before_the_script_has_it(
    tmp_path: Path, one_worker: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.toml"
    script.write_text(Faults().flip_bit(rank=0, at_step=2).to_toml())
    monkeypatch.setenv("UNISONO_PLUGINS", PLUGIN)
    monkeypatch.setenv("UNISONO_FAULTS", os.fspath(script))
    with unisono.init(batch_size=8, shards=2, run_dir=tmp_path / "run", faults={"verify_every": 0}) as run:
        loop(run)
        assert struck(run) == [(1, 2)]


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (None, r"UNISONO_FAULTS names no fault plan: use unisono run --faults"),
        (
            Faults().kill(rank=0, at_step=2).join(at_step=3),
            r"fault 2 \(join\) needs an elastic job: unisono run -n A:B",
        ),
    ],
)
@pytest.mark.usefixtures("one_worker")
def test_a_plan_that_is_missing_or_needs_an_elastic_job_is_refused(
    plan: Faults | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_PLUGINS", PLUGIN)
    monkeypatch.delenv("UNISONO_FAULTS", raising=False)
    if plan is not None:
        (script := tmp_path / "script.toml").write_text(plan.to_toml())
        monkeypatch.setenv("UNISONO_FAULTS", os.fspath(script))
    with pytest.raises(JobError, match=words):
        unisono.init(batch_size=8, shards=2, run_dir=tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere:begin", r"UNISONO_PLUGINS='nowhere:begin' cannot be imported: ModuleNotFoundError: No module"),
        ("json:begin", r"json has no begin"),
        ("json:__name__", r"is no function"),
        (".a:b", r"UNISONO_PLUGINS='\.a:b': write module:name"),
    ],
)
def test_a_plugin_that_cannot_be_loaded_is_named(name: str, words: str) -> None:
    with pytest.raises(JobError, match=words):
        load_plugins([name])


# -- what observers are told


def test_observers_hear_of_every_step_in_order(training: unisono.Run) -> None:
    heard: list[tuple[str, int]] = []
    events: tuple[Event, ...] = get_args(Event)

    def note(event: Event, run: Any, step: Any) -> None:
        heard.append((event, step.number))

    for event in events:
        training.on(event, partial(note, event))
    loop(training)
    assert heard == [(event, number) for number in range(5) for event in events]


def test_an_event_that_does_not_exist_is_refused(training: unisono.Run) -> None:
    with pytest.raises(JobError, match=r"run\.on\('step_dances'\).*choose of step_begins, step_computed, step_ends"):
        training.on("step_dances", print)  # type: ignore[arg-type]


COMPLETE = {"weights_sha256": "abc", "exit_code": 137}
CUT = {"weights_sha256": None, "exit_code": 137}


@pytest.mark.parametrize(
    ("code", "result", "why"),
    [
        (-9, {}, "its agent was killed"),
        (75, CUT, "all its workers were asked to leave"),
        (137, COMPLETE, "a fault hit its main worker in the script's last lines"),
        (137, CUT, ""),
        (1, COMPLETE, ""),
        (1, CUT, ""),
    ],
)
def test_a_job_that_a_fault_has_ended_is_started_again_and_one_that_failed_is_not(
    code: int, result: dict[str, Any], why: str
) -> None:
    assert restart_reason(code, result) == why
