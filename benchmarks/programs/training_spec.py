"""One worker of trainings whose accuracy counts."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, process_time

import torch
from torch import Tensor, nn

import unisono
from benchmarks.programs import serve
from benchmarks.training_spec import MOMENTUM, Learned, Look, TrainingSpec, TrainingSpecs, digits, held_out, network
from unisono.errors import NonFiniteLoss

WARM_UP = 2000


def work(task: TrainingSpecs, folder: Path) -> Learned:
    """One after the other, after a little of the first one, so that none pays for what is done once in a process."""
    learn(task.specs[0].model_copy(update={"samples": WARM_UP}), task.seed, folder / "warm-up")
    numbered = enumerate(task.specs)
    return Learned(runs=[learn(spec, task.seed, folder / f"run-{number}") for number, spec in numbered])


def learn(spec: TrainingSpec, seed: int, folder: Path) -> list[Look]:
    """One run."""
    policies = spec.policies()
    with unisono.init(
        batch_size=spec.batch_size, shards=spec.shards, seed=seed, run_dir=folder, policies=policies
    ) as run:
        try:
            return list(looks(run, spec))
        except NonFiniteLoss:
            return []


def looks(run: unisono.Run, spec: TrainingSpec) -> Iterator[Look]:
    """Train, and look: after each epoch, or in the end."""
    test, train = held_out(spec.noise), digits()[0]
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=spec.rate, momentum=MOMENTUM)
    run.prepare(model, optimizer)
    clock, used, looked, steps, size = Clock(), 0, 0, 0, 0
    for step in run.steps(train, epochs=-(-spec.samples // len(train))):
        optimizer.param_groups[0]["lr"] = spec.rate_at(step.position)
        step.run(spec.loss)
        used, steps, size = step.position + step.size, steps + 1, max(size, step.size)
        is_over = used >= spec.samples
        if is_over or (spec.looks and step.is_last_in_epoch):
            with clock.stopped():
                seconds = {"seconds": clock.seconds, "cpu_seconds": clock.cpu_seconds}
                yield Look(samples=used, steps=steps, batch_size=size, accuracy=accuracy(run, test), **seconds)
            looked, size = used, 0
        if is_over:
            return
    if looked < used:  # a policy has ended it
        clock.stop()
        seconds = {"seconds": clock.seconds, "cpu_seconds": clock.cpu_seconds}
        yield Look(samples=used, steps=steps, batch_size=size, accuracy=accuracy(run, test), **seconds)


class Clock:
    """Seconds on the wall, and of this process's work, that were spent on training."""

    def __init__(self) -> None:
        self.seconds = self.cpu_seconds = 0.0
        self._begun = perf_counter(), process_time()

    def stop(self) -> None:
        """Something else follows."""
        self.seconds += perf_counter() - self._begun[0]
        self.cpu_seconds += process_time() - self._begun[1]

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Meanwhile it stands still."""
        self.stop()
        yield
        self._begun = perf_counter(), process_time()


def accuracy(run: unisono.Run, test: object) -> float:
    """The share of images that are told right."""
    return run.evaluate(test, {"accuracy": right}, batch_size=1000)["accuracy"]


def right(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """The same for some of them."""
    images, labels = batch
    share: Tensor = (model(images).argmax(1) == labels).float().mean()
    return share


if __name__ == "__main__":
    serve(TrainingSpecs, work)
