"""With audits a worker whose memory flips a bit is not taken for one that computes wrongly."""

import itertools
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import unisono
from benchmarks.thread_crew import Trade, train
from unisono.errors import MemoryFault
from unisono.job import Job
from unisono.plan.audits import audited
from unisono.plan.split import Split
from unisono.train.config.run_config import Execution
from unisono.train.recovery.integrity import Integrity
from unisono.train.recovery.known_states import AgreedState, KnownStates, StateCopies
from unisono.train.run import Run
from unisono.train.state.registry import Attribute
from unisono_lab.faults.faults import WrongResult
from unisono_lab.faults.injector import flip_in, inject

pytestmark = [
    pytest.mark.unit,
    pytest.mark.usefixtures("torch_settings_restored"),
    pytest.mark.filterwarnings("ignore::unisono.errors.UnisonoWarning"),
]

Start = Callable[..., unisono.Run]

JOB = Job.create(batch_size=16, shards=4)
SAMPLES = torch.linspace(-2, 2, 8 * 16 * 4).sin().view(-1, 4)


def prepared(run: Run) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
    run.prepare(model, torch.optim.Adam(model.parameters(), lr=0.05))
    return model


def loss(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), (batch[0][:, 0] > 0).long())


def script(at: int | None, run: Run) -> str:
    prepared(run)
    done = run.rank != 1
    for step in run.steps(TensorDataset(SAMPLES), epochs=1):
        if step.number == at and not done:
            done = True
            flip_in(run, "weights", 22)
        step.run(loss)
    return run.finish()


def crew(folder: Path, workers: int, share: float, work: Callable[[Run], Any]) -> list[Any]:
    execution = Execution(overlap=False, audit=share, looks=True)
    return train(Trade(JOB, workers, folder, execution, verify_every=2), work)


@pytest.mark.parametrize("workers", [2, 3])
def test_a_flipped_weight_is_healed_or_gone_back_from_and_no_processor_is_blamed(workers: int, tmp_path: Path) -> None:
    (expected,) = crew(tmp_path / "serial", 1, 0.0, partial(script, None))
    folder = tmp_path / "struck"
    assert crew(folder, workers, 1.0, partial(script, 5)) == [expected] * workers
    result = json.loads((folder / "result.json").read_text())
    assert result["wrong_results"] == []
    assert len(result["healed"]) + len(result["rolled_back"]) == 1


def average_script(at: int | None, run: Run) -> tuple[str, list[float]]:
    """A bit flips in the weights of rank 0 before they are averaged, in the last step before all is compared."""
    model = prepared(run)
    average = run.register("average", Average(model))
    done = run.rank != 0
    for step in run.steps(TensorDataset(SAMPLES), epochs=1):
        step.run(loss)
        if step.number == at and not done:
            done = True
            flip_in(run, "weights", 22)
        average.update(model)
    return run.finish(), average.values.tolist()


class Average:
    """Of the weights of the first layer."""

    def __init__(self, model: Any) -> None:
        self.values = model[0].weight.detach().clone()

    def update(self, model: Any) -> None:
        self.values.lerp_(model[0].weight.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values.copy_(state["values"])


def test_what_the_script_has_made_of_wrong_weights_is_right_again_too(tmp_path: Path) -> None:
    (expected,) = crew(tmp_path / "serial", 1, 0.0, partial(average_script, None))
    assert crew(tmp_path / "struck", 3, 0.0, partial(average_script, 3)) == [expected] * 3


def two_loops(wrong: int | None, run: Run) -> str:
    """From the first loop on a worker computes wrongly; only audits in the second one find it.

    The first one is left early: it has no last step, in which everybody would be audited.
    """
    prepared(run)
    struck = False
    for _loop in range(2):
        for step in run.steps(TensorDataset(SAMPLES), epochs=2):
            if run.rank == wrong and step.number == 7 and not struck:
                struck = True
                inject(WrongResult(rank=0, at_step=7, bit=22), run)
            if step.number == 12:
                assert list(run.dir.glob("checkpoints/step-*")), "there were some"
            step.run(loss)
            if step.is_last_in_epoch:
                break
    return run.finish()


def audits_late(seed: int) -> bool:
    """Whether the first shard that is audited is of the last of three workers, when there are checkpoints."""
    drawn = [audited(seed, SHARE, step, 0, JOB.shards) for step in range(13)]
    return not any(drawn[:12]) and not set(Split.even(JOB.shards, 3).of(2)).isdisjoint(drawn[12])


SHARE = 0.03
LATE = next(seed for seed in itertools.count() if audits_late(seed))


@pytest.mark.parametrize(("elastic", "words"), [(True, "of a loop that is over"), (False, "without that host")])
def test_where_wrong_results_are_found_too_late_no_checkpoint_is_left_that_has_them(
    elastic: bool, words: str, tmp_path: Path
) -> None:
    folder, execution = tmp_path / "struck", Execution(overlap=False, audit=SHARE, looks=True)
    trade = Trade(replace(JOB, seed=LATE), 3, folder, execution, verify_every=2, checkpoint_every=2, is_elastic=elastic)
    with pytest.raises(MemoryFault, match=words):
        train(trade, partial(two_loops, 2))
    assert [path.name for path in (folder / "checkpoints").glob("step-*")] == []


def test_a_worker_that_joins_knows_which_state_audits_have_confirmed(start: Start) -> None:
    run = start(faults={"audit": 1.0})
    prepared(run)
    first, joiner = (Integrity(run.inside.trained, StateCopies(run.inside.trained), 2, audits=True) for _ in range(2))
    digests = run.inside.trained.capture().digests()
    first.know(0, digests)
    Attribute(joiner, "known", KnownStates).load_state_dict(asdict(first.known))
    for one in (first, joiner):
        one.know(2, digests)
    assert joiner.known == first.known
    assert first.known.right == AgreedState(0, digests)
    assert first.known.waits == AgreedState(2, digests)
