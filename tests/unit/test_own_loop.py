"""Loops that stay the script's: the same weights on any number of workers, and those of the plain loop."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unisono
from script_cluster import Cluster, Done, Flip, Kill
from unisono.errors import JobError, JobMismatch, LossError, UnisonoWarning

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]

SCRIPT = Path(__file__).parents[1] / "procs" / "scripts" / "own_loops.py"
SHAPES = ["one loss", "zeroed first", "accumulated", "two losses", "gan", "clipped weights"]
KILLS = [Kill(1, 1, 6), Kill(3, 0, 0), Kill(5, 2, 13), Kill(7, 0, 6)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return Cluster(tmp_path_factory.mktemp("own-loops"))


@pytest.fixture(scope="module")
def serial(cluster: Cluster) -> Callable[[str], Done]:
    known = dict[str, Done]()

    def of(shape: str) -> Done:
        if shape not in known:
            known[shape] = cluster(SCRIPT, 1, shards=8, SHAPE=shape)
        return known[shape]

    return of


@pytest.mark.parametrize("workers", [2, 3, 5])
@pytest.mark.parametrize("shape", SHAPES)
def test_weights_are_the_same_on_any_number_of_workers(
    cluster: Cluster, serial: Callable[[str], Done], shape: str, workers: int
) -> None:
    done = cluster(SCRIPT, workers, shards=8, SHAPE=shape)
    assert done.said == serial(shape).said
    assert done.outcome == serial(shape).outcome


@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_shows_that_workers_were_killed_and_others_came(
    cluster: Cluster, serial: Callable[[str], Done], shape: str
) -> None:
    done = cluster(SCRIPT, 3, shards=8, kills=KILLS, SHAPE=shape)
    assert len(done.world.formed) > 3
    assert done.outcome == serial(shape).outcome


@pytest.mark.parametrize("shape", SHAPES)
def test_a_run_resumes_in_an_epoch_on_another_number_of_workers(
    cluster: Cluster, serial: Callable[[str], Done], shape: str, tmp_path: Path
) -> None:
    cluster(SCRIPT, 3, shards=8, folder=tmp_path, SHAPE=shape, UNISONO_STOP_AFTER="6")
    done = cluster(SCRIPT, 2, shards=8, folder=tmp_path, SHAPE=shape)
    assert done.journal("resumed")
    assert done.outcome == serial(shape).outcome


@pytest.mark.parametrize("shape", ["accumulated", "gan"])
@pytest.mark.parametrize(("step", "moment"), [(3, "step_begins"), (11, "step_ends")])
def test_a_fault_of_the_memory_sets_a_loop_back(
    cluster: Cluster, serial: Callable[[str], Done], shape: str, step: int, moment: Any
) -> None:
    done = cluster(SCRIPT, 2, shards=8, flips=[Flip(step, moment)], SHAPE=shape)
    assert not done.world.flips
    assert done.outcome == serial(shape).outcome


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "zeroed first"])
def test_with_one_shard_weights_are_those_of_the_plain_loop(cluster: Cluster, shape: str) -> None:
    done = cluster(SCRIPT, 1, shards=1, SHAPE=shape, STILL="yes")
    environment = {"SHAPE": shape, "STILL": "yes", "PLAIN": "yes", "PYTHONPATH": ":".join(sys.path)}
    plain = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True, check=True)
    assert done.said == plain.stdout.splitlines()


INPUTS, LABELS = torch.arange(60.0).reshape(20, 3) / 60, torch.arange(20.0).reshape(20, 1) / 20


@pytest.fixture
def made(tmp_path: Path) -> Any:
    """A run with 2 shards, and a model, an optimizer and a loader of 5 batches."""
    with unisono.init(shards=2, run_dir=tmp_path / "run", arithmetic={"threads": 1}) as run:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(INPUTS, LABELS), batch_size=4)
        yield run, *run.prepare(model, optimizer, loader)


def goes_backward_twice(loss: torch.Tensor) -> None:
    torch.autograd.backward([loss], retain_graph=True)
    loss.backward()


def sharpened(model: nn.Linear, loss: torch.Tensor) -> None:
    loss.backward(retain_graph=True)
    with torch.no_grad():
        if model.weight.grad is not None:
            model.weight.add_(0.1)
    loss.backward()


Body = Callable[[Any, Any, Any, Any], Any]

REFUSED: dict[str, tuple[type[Exception], str, Body]] = {
    "no backward": (JobError, r"without run\.backward", lambda run, loss, m, o: None),
    "a closure": (JobError, "without a closure", lambda run, loss, m, o: (loss.backward(), o.step(lambda: loss))),
    "a gradient": (LossError, r"gradient=….*autograd\.grad", lambda run, loss, m, o: loss.backward(torch.ones(()))),
    "backward by itself": (
        LossError,
        r"changed gradients before its backward pass.* torch\.autograd\.grad",
        lambda run, loss, m, o: goes_backward_twice(loss),
    ),
    "weights between": (
        JobError,
        r"between two backward passes.* step\.run",
        lambda run, loss, m, o: sharpened(m, loss),
    ),
    "curvature": (JobError, r"train with step\.run", lambda run, loss, m, o: run.curvature(lambda model, batch: loss)),
    "evaluate early": (
        JobError,
        r"all workers make together.* where run\.sync_gradients",
        lambda run, loss, m, o: run.barrier(),
    ),
    "no gradient": (LossError, "depends on no parameter", lambda run, loss, m, o: run.backward(loss.detach())),
    "a rate of each turn": (
        JobError,
        r"changed lr of an optimizer in two turns.* give the scheduler to run\.prepare",
        lambda run, loss, m, o: (loss.backward(), o.step(), o.param_groups[0].update(lr=loss.item())),
    ),
}


@pytest.mark.parametrize("body", REFUSED)
def test_bodies_that_cannot_be_kept_are_refused_with_the_cure(body: str, made: Any) -> None:
    kind, says, act = REFUSED[body]
    run, model, optimizer, loader = made
    with pytest.raises(kind, match=says):
        for inputs, labels in loader:
            act(run, F.mse_loss(model(inputs), labels), model, optimizer)


def test_a_counter_of_turns_that_decides_about_updates_is_refused(made: Any) -> None:
    _, model, optimizer, loader = made
    told = pytest.warns(UnisonoWarning, match=r"counts the turns of this worker.* run\.enumerate\(loader\)")
    with told, pytest.raises(JobError, match=r"0 times in one turn of a step, and 1 times.* run\.enumerate\(loader\)"):
        for number, (inputs, labels) in enumerate(loader):
            F.mse_loss(model(inputs), labels).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
def test_weights_are_those_of_step_run_bit_for_bit(tmp_path: Path, precision: Any) -> None:
    digests = []
    for is_own in (True, False):
        arithmetic = {"threads": 1, "precision": precision}
        with unisono.init(shards=2, run_dir=tmp_path / str(is_own), arithmetic=arithmetic) as run:
            model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            plain = DataLoader(TensorDataset(INPUTS, LABELS), batch_size=4)
            model, optimizer, loader = run.prepare(model, optimizer, plain)
            if is_own:
                for _ in run.epochs(2, loader):
                    for inputs, labels in loader:
                        F.mse_loss(model(inputs), labels).backward()
                        optimizer.step()
                        optimizer.zero_grad()
            else:
                for step in run.steps(plain, epochs=2):
                    step.run(lambda model, batch: F.mse_loss(model(batch[0]), batch[1]))
            digests.append(run.finish())
    assert digests[0] == digests[1]


def test_an_optimizer_may_go_on_when_its_run_is_over_and_in_another_run(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for number in range(2):
        with unisono.init(shards=1, run_dir=tmp_path / str(number), arithmetic={"threads": 1}) as run:
            loader = DataLoader(TensorDataset(INPUTS, LABELS), batch_size=20)
            _, _, prepared = run.prepare(model, optimizer, loader)
            for inputs, labels in prepared:
                F.mse_loss(model(inputs), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
        F.mse_loss(model(INPUTS), LABELS).backward()
        optimizer.step()
        seen.append(float(model.weight.detach().sum()))
    assert seen[0] != seen[1]


def test_batches_are_numbered_alike_in_all_turns_of_a_step(made: Any) -> None:
    run, model, optimizer, loader = made
    seen = []
    for epoch in run.epochs(2, loader):
        for number, (inputs, labels) in run.enumerate(loader, 1):
            F.mse_loss(model(inputs), labels).backward()
            optimizer.step()
            seen.append((epoch, number))
    assert seen == [(epoch, number) for epoch in range(2) for number in range(1, 6) for _ in range(2)]
    assert len(loader) == 5


def test_a_model_in_evaluation_mode_gets_all_batches(made: Any) -> None:
    _, model, _, loader = made
    model.eval()
    assert torch.equal(torch.cat([labels for _, labels in loader]), LABELS)


def test_all_workers_evaluate_behind_the_update_of_a_body(made: Any) -> None:
    run, model, optimizer, loader = made
    losses = []
    for inputs, labels in loader:
        F.mse_loss(model(inputs), labels).backward()
        optimizer.step()
        if run.sync_gradients:
            found = run.evaluate(
                loader.base, lambda model, batch: {"loss": float(F.mse_loss(model(batch[0]), batch[1]))}
            )
            losses.append(found["loss"])
        optimizer.zero_grad()
    assert len(losses) == 5
    assert losses[-1] < losses[0]


def test_a_pass_that_is_left_ends_the_epochs(made: Any) -> None:
    run, model, optimizer, loader = made
    with pytest.raises(JobError, match="left in epoch 0 before its end"):
        for _ in run.epochs(2, loader):
            for inputs, labels in loader:
                F.mse_loss(model(inputs), labels).backward()
                optimizer.step()
                if run.sync_gradients:
                    break


def test_both_loops_may_be_left_behind_an_update_and_others_follow(made: Any) -> None:
    run, model, optimizer, loader = made
    for _ in run.epochs(2, loader):
        for inputs, labels in loader:
            F.mse_loss(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            if run.sync_gradients:
                break
        break
    steps = sum(
        1 for step in run.steps(loader.base) if step.run(lambda model, batch: F.mse_loss(model(batch[0]), batch[1]))
    )
    assert steps == 5


def test_what_is_logged_before_the_backward_pass_is_a_mean_over_the_batch(made: Any) -> None:
    run, model, optimizer, loader = made
    for inputs, labels in loader:
        loss = F.mse_loss(model(inputs), labels)
        run.log("mean label", labels.mean())
        loss.backward()
        optimizer.step()
        run.log("behind", run.mean_loss)
    run.finish()
    rows = [line for line in (run.dir / "metrics.jsonl").read_text().splitlines() if "mean label" in line]
    assert [float(re.search(r'"mean label": ([\d.]+)', row)[1]) for row in rows] == pytest.approx(  # type: ignore[index]
        [0.075, 0.275, 0.475, 0.675, 0.875]
    )


def test_what_a_body_carries_from_turn_to_turn_is_told_and_what_it_changes_once_a_step_is_not(made: Any) -> None:
    run, model, optimizer, loader = made
    run.ignore("known")

    def train() -> tuple[float, int, int, float]:
        total, seen, steps, known, best, teacher = 0.0, torch.zeros(3), 0, 0, math.inf, nn.Linear(3, 1)
        for inputs, labels in loader:
            outputs = model(inputs)
            loss = F.mse_loss(outputs, labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item()
            known += 1
            seen += inputs.mean(0)
            with torch.no_grad():
                teacher.weight.lerp_(model.weight, 0.1)
            if run.sync_gradients:
                steps += 1
                best = min(best, run.mean_loss)
        return total, steps, known, best

    with pytest.warns(UnisonoWarning, match="changes in a turn") as told:
        total, steps, known, best = train()
    assert {str(warning.message).partition(" ")[0] for warning in told} == {"total", "seen", "teacher"}
    assert (steps, known) == (5, 10)
    assert best < total


def test_a_script_that_ends_before_the_place_where_its_run_goes_on_is_refused(tmp_path: Path) -> None:
    for passes in (2, 0):  # what decided about the number of passes was not kept
        with unisono.init(shards=2, run_dir=tmp_path, checkpoints={"every": 1}, arithmetic={"threads": 1}) as run:
            model = nn.Linear(3, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer, loader = run.prepare(
                model, optimizer, DataLoader(TensorDataset(INPUTS, LABELS), batch_size=4)
            )
            for _ in range(passes):
                for inputs, labels in loader:
                    F.mse_loss(model(inputs), labels).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            if not passes:
                with pytest.raises(
                    JobMismatch, match=r"in front of its loop 1, and the run goes on in loop .*run\.register"
                ):
                    run.finish()
