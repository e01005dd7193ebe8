"""A gradient that is NaN or infinite, though the loss is finite: nothing is updated from it, whoever computes."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono
from script_cluster import Cluster, Done
from unisono.errors import UnisonoWarning
from unisono.words import SHORT, Finiteness, is_finite

pytestmark = pytest.mark.cluster

Start = Callable[..., unisono.Run]

SCRIPT = Path(__file__).parents[1] / "procs" / "scripts" / "not_finite.py"
ODD_STEPS = [4, 10]
EXACT = ["plain", "clipped", "own", "compressed", "parameter-server:", "whole"]
LOOSE = ["local-sgd:every=2", "diloco:every=2", "pair-averaging:", "parameter-server:synchronous=false"]


def train(folder: Path, workers: int, on_nan: str, way: str, /, **settings: Any) -> Done:
    return Cluster(folder)(SCRIPT, workers, shards=1 if way == "whole" else 4, arguments=[on_nan, way], **settings)


def steps(done: Done) -> list[tuple[float, bool, bool]]:
    """Of each step: the loss, whether the weights are finite then, and whether they have changed."""
    found = re.findall(r"loss (\S+) is_finite=(\w+) changed=(\w+)", done.printed)
    return [(float(loss), finite == "True", changed == "True") for loss, finite, changed in found]


@pytest.mark.parametrize("way", EXACT)
def test_a_step_with_a_gradient_that_is_not_finite_is_skipped_alike_on_any_number_of_workers(
    way: str, tmp_path: Path
) -> None:
    most = 1 if way == "whole" else 3  # one shard
    serial, *others = (train(tmp_path / str(workers), workers, "skip", way) for workers in range(1, most + 1))
    seen = steps(serial)
    assert [number for number, (loss, _, changed) in enumerate(seen) if math.isnan(loss) or not changed] == ODD_STEPS
    assert all(finite for _, finite, _ in seen)
    assert len(seen) == 12
    for other in others:
        assert other.digest == serial.digest
        assert other.metrics == serial.metrics
    for done in (serial, *others):
        told = [(line["step"], re.sub(r" \(rank \d\)", "", line["why"])) for line in done.journal("skipped")]
        shard = 0 if way == "whole" else 3
        assert told == [(step, f"the gradient of body.weight is nan in shard {shard}") for step in ODD_STEPS]


@pytest.mark.parametrize(
    ("way", "workers", "where"),
    [
        ("plain", 1, "3 (rank 0)"),
        ("plain", 3, "3 (rank 2)"),
        ("whole", 1, "0 (rank 0)"),
        ("own", 2, "3 (rank 1)"),
        ("local-sgd:every=2", 1, "3 (rank 0)"),
    ],
)
def test_it_stops_the_job_with_the_weights_as_before_and_names_step_parameter_shard_and_rank(
    way: str, workers: int, where: str, tmp_path: Path
) -> None:
    done = train(tmp_path, workers, "stop", way)
    assert (
        f"after True step 4: the gradient of body.weight is nan in shard {where}; nothing was updated" in done.printed
    )
    assert len(steps(done)) == 4


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("way", LOOSE)
def test_a_worker_with_weights_of_its_own_skips_its_part_and_says_so(way: str, workers: int, tmp_path: Path) -> None:
    done = train(tmp_path, workers, "skip", way)
    assert len(steps(done)) == 12
    assert all(finite for _, finite, _ in steps(done))
    told = re.findall(
        r"step (\d+) skipped on this worker: the gradient of body.weight is nan in shard 3 \(rank \d\)", done.printed
    )
    assert told == ["4", "10"]
    if workers == 1 and "synchronous" not in way:  # whose weights come with the next step
        assert [number for number, (_, _, changed) in enumerate(steps(done)) if not changed] == ODD_STEPS


def test_a_run_whose_weights_have_become_nan_resumes_from_the_newest_checkpoint_before(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(tmp_path, 2, "skip", "spoiled", folder=folder, UNISONO_CHECKPOINT_EVERY="1", UNISONO_STOP_AFTER="12")
    done = train(tmp_path, 1, "skip", "own", folder=folder)
    assert [line["step"] for line in done.journal("resumed")] == [7]
    found = {(line["step"], line["tensors"]) for line in done.journal("checkpoint not finite")}
    assert found == {(step, "'out.bias'") for step in (10, 11, 12)}
    assert done.digest == train(tmp_path, 1, "skip", "own").digest


def test_ten_steps_skipped_in_a_row_are_warned_of_and_so_are_those_before_the_end(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    run = start(arithmetic={"on_nan": "skip"}, batch_size=1, shards=1)
    model = nn.Linear(1, 1)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    good = {0, 9, 20}  # so the second row alone is long enough

    def train(steps: range) -> None:
        for step in run.steps([torch.ones(1)] * len(steps), shuffle=False):
            step.run(lambda model, batch: model(batch).mean() * (1.0 if step.number in good else math.nan))  # noqa: B023

    train(range(19))
    with pytest.warns(UnisonoWarning, match=r"10 steps in a row were skipped until step 19, and nothing was trained"):
        train(range(19, 23))
    run.close()
    assert "unisono: 2 steps in a row were skipped until the run ends" in capsys.readouterr().out


# -- what tells it ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 3, SHORT, SHORT + 1])
def test_one_value_that_is_not_finite_is_seen_and_large_ones_raise_no_alarm(dtype: torch.dtype, size: int) -> None:
    assert is_finite([torch.full((size,), torch.finfo(dtype).max, dtype=dtype), torch.zeros(2, 3, dtype=dtype)])
    for odd in (math.nan, math.inf, -math.inf):
        values = torch.zeros(size, dtype=dtype)
        values[size // 2] = odd
        assert not is_finite([torch.zeros(2), values])
    opposite = torch.tensor([math.inf, -math.inf], dtype=dtype)
    assert not is_finite([opposite])


def test_what_took_the_place_of_other_values_counts_alone() -> None:
    looking = Finiteness()
    looking.look(torch.tensor([math.nan]), 0)
    looking.look(torch.tensor([1.0]), 0)
    assert looking.start_check()()
    looking.look(torch.tensor([math.inf]))
    assert not looking.start_check()()
    looking.forget()
    assert looking.start_check()()
    assert is_finite([torch.tensor([2**31 - 1]), torch.tensor([True])])
