"""What reading only some blocks of a gradient does to the figures: beside the same run that reads all of it."""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import unisono
from benchmarks.noise import NoiseMeter
from benchmarks.report import Grid, Report
from benchmarks.workloads import BATCHES, WORKLOADS
from unisono.adapt.norms import Monitoring

NAMES = ("gradient_norm", "gradient_variance", "noise_scale")
SHARDS = 4


@dataclass(frozen=True, slots=True)
class Choice:
    """How the benchmark is run.

    Attributes:
        model: a name in ``WORKLOADS``.
        steps: to train.
        batch_size: of them.
    """

    model: str = "mlp"
    steps: int = 60
    batch_size: int = 64


def run(choice: Choice) -> Report:
    """Train twice; the weights are the same, and so is what there is to measure."""
    whole, sampled = (lines_of(choice, one_in) for one_in in (1, 0))
    rows = []
    for name in NAMES:
        errors = [
            abs(part[name] / all_[name] - 1)
            for part, all_ in zip(sampled, whole, strict=True)
            if part.get(name) and all_.get(name)
        ]
        rows.append((name, str(len(errors)), *(f"{100 * each:.3f} %" for each in spread(errors))))
    meter = NoiseMeter()
    meter.calibrate()
    grid = Grid(
        f"{choice.model}, batch {choice.batch_size}: error of figures from sampled blocks, {choice.steps} steps",
        ("", "steps", "median", "95th of 100", "largest", "last step"),
        rows,
        ("Relative, beside the same steps with all of the gradient read. Variance and noise scale are averages.",),
    )
    return Report("sampling", asdict(choice), meter.read(), [grid], {"whole": whole, "sampled": sampled})


def lines_of(choice: Choice, one_in: int) -> list[dict[str, float]]:
    """What a run measured in each step; 0 leaves it to the run how many blocks are read."""
    workload = WORKLOADS[choice.model]
    with TemporaryDirectory(prefix="benchmark-") as name:
        monitor, folder = Monitoring(1, one_in), Path(name) / "run"
        with unisono.init(
            batch_size=choice.batch_size, shards=SHARDS, records={"monitor": monitor}, run_dir=folder
        ) as run:
            torch.manual_seed(0)
            model = workload.build()
            run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9))
            data = workload.data(choice.batch_size * BATCHES)
            for step in run.steps(data, epochs=math.ceil(choice.steps / BATCHES)):
                step.run(workload.loss)
            run.finish()
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in NAMES if key in line} for line in lines]


def spread(errors: Sequence[float]) -> tuple[float, float, float, float]:
    """Median, 95th of 100, largest, last."""
    ordered = sorted(errors)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], ordered[-1], errors[-1]
