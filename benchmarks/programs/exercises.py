"""One worker of trainings under synchronisation strategies."""

import importlib
import json
import math
import statistics
import sys
import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

import unisono
from benchmarks import training_spec
from benchmarks.crew import ROOT
from benchmarks.exercise import Exercise, Exercises, Outcome, Outcomes
from benchmarks.programs import serve
from unisono.errors import NonFiniteLoss
from unisono.sync import strategy_of
from unisono_lab.faults.faults import Faults
from unisono_lab.faults.injector import FaultInjector

WATCHED = 10
"""Steps from one whose bytes are noted to the next, where every step is an exchange of its own."""

HELD_OUT = 1000
"""Documents."""


@dataclass(frozen=True)
class Subject:
    """What is trained, and by what it is judged."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    training: Dataset[Any]
    held_out: Dataset[Any]
    loss: Any
    judged: Any
    clip_norm: float | None = None


def work(task: Exercises, folder: Path) -> Outcomes:
    """One after the other."""
    sys.path.insert(0, str(ROOT / "examples"))
    numbered = enumerate(task.exercises)
    return Outcomes(outcomes=[train(one, folder / f"run-{number}") for number, one in numbered])


def train(exercise: Exercise, folder: Path) -> Outcome | None:
    """One run."""
    monitor = WATCHED if strategy_of(exercise.strategy).is_exact else 0
    with unisono.init(
        batch_size=exercise.batch_size,
        shards=exercise.shards,
        seed=exercise.seed,
        run_dir=folder,
        records={"monitor": monitor},
        strategy=exercise.strategy,
    ) as run:
        if exercise.slow > 1:
            FaultInjector(Faults().slow(rank=run.world_size - 1, factor=exercise.slow)).attach(run)
        try:
            return _outcome(run, exercise)
        except NonFiniteLoss:
            return None


def _outcome(run: unisono.Run, exercise: Exercise) -> Outcome:
    subject = _subject(exercise)
    run.prepare(subject.model, subject.optimizer)
    total = exercise.epochs * math.ceil(len(subject.training) / exercise.batch_size)  # type: ignore[arg-type]
    scheduler = torch.optim.lr_scheduler.LambdaLR(subject.optimizer, _schedule(exercise, total))

    def loss_of(model: nn.Module, batch: Any) -> Any:
        time.sleep(exercise.shard_ms / 1000)
        return subject.loss(model, batch)

    begun, samples, steps = perf_counter(), 0, 0
    for step in run.steps(subject.training, epochs=exercise.epochs):
        if step.epoch == min(1, exercise.epochs - 1) and not samples:
            begun = perf_counter()
        samples += step.size if step.epoch or exercise.epochs == 1 else 0
        step.run(loss_of, clip_norm=subject.clip_norm)
        scheduler.step()
        steps += 1
    seconds = perf_counter() - begun
    judged = run.evaluate(subject.held_out, subject.judged)
    digest = run.finish()
    traffic = Traffic.read(run.dir / "metrics.jsonl")
    return Outcome(
        accuracy=judged.get("accuracy", 0.0),
        loss=judged["loss"],
        samples=samples,
        seconds=seconds,
        steps=steps,
        sent_bytes=traffic.sent_bytes,
        sent_messages=traffic.sent_messages,
        staleness=traffic.staleness,
        digest=digest,
    )


@dataclass
class Traffic:
    """What a run's lines say of its traffic; per step, of all workers together."""

    sent_bytes: float = 0.0
    sent_messages: float = 0.0
    staleness: list[int] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> "Traffic":
        """From ``metrics.jsonl``."""
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        rounds = [line["round"] for line in lines if "round" in line]
        watched = [line["workers"] for line in lines if "workers" in line][1:]  # what is said is of the step before
        if rounds:
            steps = sum(one["steps"] for one in rounds)
            sent = [pair for one in rounds for pair in one["sent"]]
            stale = [tau for one in rounds for server in one.get("staleness", []) for tau in server]
            return cls(sum(pair[0] for pair in sent) / steps, sum(pair[1] for pair in sent) / steps, stale)
        if not watched:
            return cls()
        totals = (sum(one[name] for one in step) for name in ("sent_bytes", "sent_messages") for step in watched)
        means = list(totals)
        return cls(statistics.fmean(means[: len(watched)]), statistics.fmean(means[len(watched) :]))


def _schedule(exercise: Exercise, total: int) -> Any:
    if exercise.model == "char_lm":
        return importlib.import_module("char_lm").warm_up_then_cosine(total, warm_up=total // 10)
    return lambda step: 1.0


def _subject(exercise: Exercise) -> Subject:
    match exercise.model:
        case "digits":
            return _digits(exercise.rate)
        case "char_lm":
            return _char_lm(exercise)
    training, held_out = training_spec.digits()
    model = training_spec.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=exercise.rate)
    return Subject(model, optimizer, training, held_out, images_loss, {"accuracy": accuracy, "loss": images_loss})


def _digits(rate: float) -> Subject:
    example = importlib.import_module("digits")
    training, held_out = example.load()
    model = narrow()
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    return Subject(model, optimizer, training, held_out, images_loss, {"accuracy": accuracy, "loss": images_loss})


def narrow() -> nn.Module:
    """The example's network with a quarter of its channels: what a step costs is not what is asked here."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.3),
        nn.Linear(16 * 4 * 4, 10),
    )  # fmt: skip


def _char_lm(exercise: Exercise) -> Subject:
    example = importlib.import_module("char_lm")
    context = 32
    texts = example.library_texts(Path(sysconfig.get_path("stdlib")))
    whole = example.NextByte(example.documents(texts, longest=context), context)
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0)).tolist()
    training = Subset(whole, order[: exercise.documents])
    held_out = Subset(whole, order[exercise.documents : exercise.documents + HELD_OUT])
    model = example.Gpt(layers=1, width=32, context=context)
    groups = example.weight_decay_groups(model)
    optimizer = torch.optim.AdamW(groups, lr=exercise.rate, betas=(0.9, 0.95))
    return Subject(model, optimizer, training, held_out, example.loss_fn, {"loss": example.loss_fn}, clip_norm=1.0)


def images_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Of one shard."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def accuracy(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """The share of images that are told right."""
    images, labels = batch
    share: Tensor = (model(images).argmax(1) == labels).float().mean()
    return share


if __name__ == "__main__":
    serve(Exercises, work)
