"""A script in whose workers things go wrong, once each: ``TROUBLE`` is a list of ``{"what", "rank", "step"}``."""

import json
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import unisono

TROUBLE = json.loads(os.environ.get("TROUBLE", "[]"))
PACE_S = float(os.environ.get("PACE_S", "0.005"))
TIMEOUT_S = float(os.environ.get("TIMEOUT_S", "30"))

run = unisono.init(batch_size=64, shards=8, seed=5, faults={"timeout_s": TIMEOUT_S}, communication={"balance": "speed"})
model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 5))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
run.prepare(model, optimizer)
data = torch.utils.data.TensorDataset(
    torch.randn(300, 16, generator=torch.Generator().manual_seed(0)), torch.arange(300) % 5
)


def strikes(what: str, step: int) -> bool:
    for number, one in enumerate(TROUBLE):
        if (one["what"], one["step"], one["rank"]) == (what, step, run.rank):
            mark = Path(run.dir) / f"trouble-{number}"
            if not mark.exists():
                mark.touch()
                return True
    return False


def hang_for_good() -> None:
    while True:
        time.sleep(1)


def flip_a_bit() -> None:
    weights = model.get_parameter("3.weight")
    with torch.no_grad():
        weights.view(torch.int32)[2, 3] ^= 1 << 20


def loss_of(step: int, net: Any, batch: Any) -> torch.Tensor:
    # Slow is who was so from the start: a rank may be another's later.
    time.sleep(PACE_S * (8 if os.environ.get("UNISONO_WORKER") == os.environ.get("SLOW") else 1))
    if strikes("hang in a step", step):
        hang_for_good()
    return F.cross_entropy(net(batch[0]), batch[1])


for step in run.steps(data, epochs=int(os.environ.get("EPOCHS", "6"))):
    if strikes("hang between steps", step.number):
        hang_for_good()
    if strikes("kill", step.number):
        os.kill(os.getpid(), signal.SIGKILL)
    if strikes("bit flip", step.number):
        flip_a_bit()
    if any(one["what"] == "resize" and one["step"] == step.number for one in TROUBLE):
        run.resize(next(one["to"] for one in TROUBLE if one["step"] == step.number))
    step.run(partial(loss_of, step.number))
run.finish()
