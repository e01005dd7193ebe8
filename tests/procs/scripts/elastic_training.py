"""A script with nearly everything: two loops, two updates per batch, a scheduler, state of its own, calls between.

``FAULTS`` is a list of ``{"rank", "step", "place", "signal"}``: whoever has that rank sends itself the signal, once
(of several devices the first one, or that of ``"device"``);
with ``"signal": "raise"`` it raises an exception, with ``"resize 3"`` it asks for 3 workers. With ``"size": 2`` it
happens in the first step from ``step`` on in which 2 workers train; with ``"later": true`` in the first one in which
that place is passed. With ``"behind": 0`` it
does not before the first of the list has. Outside of steps, ``step`` says how many there have been. A ``place`` may be
a failpoint, too.
"""

import json
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import unisono
from unisono.failpoints import POINTS, listen

FAULTS = json.loads(os.environ.get("FAULTS", "[]"))
PACE_S = float(os.environ.get("PACE_S", "0.01"))
HURRY = Path(os.environ.get("HURRY", "hurry"))
"""Once this file is there, no step takes longer than it has to."""

STOP_BELOW = float(os.environ.get("STOP_BELOW", "0"))
EPOCHS = int(os.environ.get("EPOCHS", "6"))
MATRICES = "MATRICES" in os.environ
"""Whether the first optimizer updates whole matrices."""

STAGES = os.environ.get("STAGES", "")
"""The schedule of stages, if the model is to be cut into some."""


FIXED = [torch.randn(16, generator=torch.Generator().manual_seed(number)) for number in range(300)]


class Noisy(torch.utils.data.Dataset[Any]):
    """Samples that are drawn anew each time, as augmentation does."""

    def __len__(self) -> int:
        return 300

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        return FIXED[number] + 0.1 * torch.randn(16), number % 5


@unisono.whole_matrix
class Orthogonal(torch.optim.SGD):
    """Momentum of gradients, of which those of matrices are made orthogonal."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.ndim == 2:
                    left, _, right = torch.linalg.svd(parameter.grad, full_matrices=False)
                    parameter.grad = left @ right
        super().step()


class Seen:
    """The script's own state: how much it has seen, and an average of the losses."""

    def __init__(self) -> None:
        self.steps = 0
        self.average = 0.0

    def state_dict(self) -> dict[str, Any]:
        fault("capture", self.steps)
        return vars(self).copy()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


run = unisono.init(batch_size=64, shards=8, seed=3, faults={"timeout_s": 30})
body = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2))
head = nn.Linear(32, 5)
models: Any = [body, head]
if STAGES:
    models = run.pipeline(nn.Sequential(body, head), ["0.1", "1"], schedule=STAGES)
else:  # which leaves them whole where workers have one device
    run.fully_shard(head)
    run.fully_shard(body)
device = run.inside.membership.workers.devices.rank
first: Any = Orthogonal(body.parameters(), 1e-2, 0.9) if MATRICES else torch.optim.AdamW(body.parameters(), lr=1e-2)
optimizers = [first, torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)]
run.prepare(models, optimizers)
schedulers = [torch.optim.lr_scheduler.StepLR(one, 7, 0.8) for one in optimizers]
for number, scheduler in enumerate(schedulers):
    run.register(f"scheduler {number}", scheduler)
seen = run.register("seen", Seen())
data = Noisy()


def fault(place: str, step: int) -> None:
    for number, one in enumerate(FAULTS):
        if (one["place"], one["rank"], one.get("device", 0)) != (place, run.rank, device) or not is_now(one, step):
            continue
        mark = Path(run.dir) / f"fault-{number}"
        if not mark.exists():
            mark.touch()
            what = one.get("signal", "SIGKILL")
            if what == "raise":
                raise ValueError(f"boom in {place} of step {step}")
            if what.startswith("resize "):
                run.resize(int(what.removeprefix("resize ")))
            else:
                os.kill(os.getpid(), getattr(signal, what))


def is_now(one: dict[str, Any], step: int) -> bool:
    if "behind" in one and not (Path(run.dir) / f"fault-{one['behind']}").exists():
        return False
    if "size" in one:
        return bool(step >= one["step"] and run.world_size == one["size"])
    return bool(step >= one["step"] if "later" in one else step == one["step"])


def failing_sync(fd: Any) -> None:
    """What makes a file last; a checkpoint is written with it."""
    if threading.current_thread().name.startswith("unisono-checkpoint"):
        fault("write", seen.steps)
    sync(fd)


sync, os.fsync = os.fsync, failing_sync
if {one["place"] for one in FAULTS} & set(POINTS):
    listen(lambda point: fault(point, seen.steps))


def loss_of(models: Any, batch: Any) -> torch.Tensor:
    time.sleep(0 if HURRY.exists() else PACE_S)
    return F.cross_entropy(head(body(batch[0])), batch[1])


def failing(place: str, number: int, models: Any, batch: Any) -> torch.Tensor:
    fault(place, number)
    return loss_of(models, batch)


def metrics(models: Any, batch: Any) -> dict[str, torch.Tensor]:
    fault("in evaluate", seen.steps)
    return {"loss": F.cross_entropy(head(body(batch[0])), batch[1])}


print("before", run.evaluate(data, metrics))
for step in run.steps(data, epochs=EPOCHS):
    fault("begin", step.number)
    loss = step.run(partial(failing, "first", step.number), optimizer=optimizers[0], clip_norm=1.0)
    fault("between", step.number)
    step.run(partial(failing, "second", step.number), optimizer=optimizers[1])
    fault("after", step.number)
    for scheduler in schedulers:
        scheduler.step()
    seen.steps += 1
    seen.average = 0.9 * seen.average + 0.1 * loss
    if step.is_last_in_epoch:
        fault("evaluate", step.number)
        found = run.evaluate(data, metrics)
        fault("sum", step.number)
        total = run.all_reduce(seen.steps, "max")
        fault("predict", step.number)
        outputs = run.predict(data, lambda models, batch: head(body(batch[0])))
        run.print(f"epoch {step.epoch}: {found['loss']} {total} {float(outputs.sum())} on {run.world_size}")
        if found["loss"] < STOP_BELOW:
            break
middle = run.evaluate(data, metrics)
for step in run.steps(data, epochs=1, shuffle=False):
    fault("begin", step.number)
    step.run(loss_of)
    seen.steps += 1
seen.average += middle["loss"]
print("between", run.evaluate(data, metrics))
for step in run.steps(data, epochs=1):
    fault("begin", step.number)
    step.run(loss_of, optimizer=optimizers[0])
    seen.steps += 1
    fault("after", step.number)
run.print("after", run.evaluate(data, metrics), seen.steps, seen.average, schedulers[0].get_last_lr())
run.finish()
