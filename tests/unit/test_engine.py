"""A step that is lost on the way can be computed again."""

import gc
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import unisono
from benchmarks.thread_crew import Trade, run_of
from unisono.errors import JobError, WorkerLost
from unisono.job import Job
from unisono.membership.rendezvous import Generation
from unisono.plan.split import Split
from unisono.reduce.transport import Solo
from unisono.sync import strategy_of
from unisono.train.group.membership import Fixed
from unisono.train.group.workers import Workers
from unisono.train.step.part import Attempt

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_worker"), pytest.mark.filterwarnings("ignore:BatchNorm")]


def loss_fn(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def trained(run: unisono.Run, broken: "Breaking | None" = None) -> tuple[str, list[float]]:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(75, 6, generator=generator), torch.randint(0, 3, (75,), generator=generator)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    run.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
    losses = []
    for step in run.steps(TensorDataset(inputs, labels), epochs=2):
        if broken is not None:
            broken.breaks = True
            with pytest.raises(WorkerLost):
                step.run(loss_fn)
        losses.append(step.run(loss_fn))
    return run.finish(), losses


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_a_step_whose_reduction_failed_is_computed_again_to_the_same_bits(tmp_path: Path, shards: int) -> None:
    def run_over(transport: Solo, name: str) -> unisono.Run:
        job = Job.create(batch_size=32, shards=shards)
        membership = Fixed(Workers(Generation(1, 0, Split.even(shards, 1)), transport))
        return run_of(Trade(job, 1, tmp_path / name), membership)

    with closing(run_over(Solo(shards), "undisturbed")) as run:
        expected = trained(run)
    broken = Breaking(shards)
    with closing(run_over(broken, "disturbed")) as run:
        assert trained(run, broken) == expected


def test_what_a_script_begins_around_a_step_decides_no_bit_of_its_loss(tmp_path: Path) -> None:
    def losses(name: str, around: AbstractContextManager[Any]) -> list[float]:
        with closing(unisono.init(batch_size=12, shards=2, run_dir=tmp_path / name)) as run:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
            run.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
            samples = torch.linspace(-1, 1, 288).view(48, 6)
            with around:
                return [step.run(loss_fn) for step in run.steps(TensorDataset(samples, torch.arange(48) % 3))][:1]

    assert losses("cast", torch.autocast("cpu", torch.bfloat16)) == losses("plain", nullcontext())


@pytest.mark.parametrize("shards", [1, 3])
def test_nothing_of_a_step_waits_for_the_garbage_collector(tmp_path: Path, shards: int) -> None:
    run = unisono.init(batch_size=12, shards=shards, run_dir=tmp_path)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    run.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
    left: list[Any] = []
    with closing(run):
        for step in run.steps(TensorDataset(torch.randn(120, 6), torch.randint(0, 3, (120,)))):
            if step.number == 4:
                gc.collect()
                gc.set_debug(gc.DEBUG_SAVEALL)
            step.run(loss_fn, clip_norm=1.0)
            if step.number == 8:
                gc.collect()
                # Tensors of a step alone: what torch compiled in another test lets go of its stand-ins some time later.
                left, gc.garbage[:] = [each for each in gc.garbage if type(each) in (Tensor, nn.Parameter)], []
                gc.set_debug(0)
    assert left == []


class Rates(unisono.Part):
    """Notes the learning rates that hooks of a part see."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.groups = optimizer.param_groups
        self.seen: dict[str, list[float]] = {"work_out": [], "apply": []}

    def work_out(self, attempt: Attempt) -> None:
        self.seen["work_out"].append(self.groups[0]["lr"])

    def apply(self, attempt: Attempt) -> None:
        self.seen["apply"].append(self.groups[0]["lr"])


@pytest.mark.parametrize("is_own", [False, True])
def test_parts_see_the_learning_rates_with_which_the_update_is_made(tmp_path: Path, is_own: bool) -> None:
    policies = [unisono.LinearScaling(2.0, 8)]
    with closing(unisono.init(batch_size=12, shards=2, run_dir=tmp_path, policies=policies)) as run:
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.add_part(rates := Rates(optimizer))
        run.prepare(model, optimizer)
        for step in run.steps(TensorDataset(torch.randn(36, 6), torch.arange(36) % 3)):
            step.run(loss_fn, update=optimizer.step if is_own else None)
    scaled = [0.1, 0.1, 0.1] if is_own else [0.1, 0.2, 0.2]  # a script that updates by itself sees its own rates
    assert rates.seen == {"work_out": scaled, "apply": scaled}


@pytest.mark.parametrize(("strategy", "part"), [("local-sgd", unisono.Part()), ("all-reduce", object())])
def test_a_part_that_would_never_be_called_is_refused(tmp_path: Path, strategy: str, part: Any) -> None:
    with closing(unisono.init(batch_size=12, shards=1, run_dir=tmp_path)) as run:
        run.inside.trained.policy_state.strategy = strategy_of(strategy)  # which one worker alone cannot begin with
        with pytest.raises(JobError, match=r"run\.add_part"):
            run.add_part(part)


class Breaking(Solo):
    """Loses a worker before the control word of the next step, if it is told to."""

    breaks = False

    def settle(self) -> None:
        if self.breaks:
            self.breaks = False
            raise WorkerLost("rank 1 is gone")
        super().settle()
