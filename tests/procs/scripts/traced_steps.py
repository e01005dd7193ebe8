"""Traces which functions of the house run in an ordinary call of ``step.run``, and in one in which a worker is killed.

Each worker that was there for both writes ``traced-RANK.json`` into the run folder: the functions of all its threads,
in the order of their first call, and the number of calls.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

ORDINARY, STRUCK = 12, 14
CALLS: dict[int, list[str]] = {}
NOW: list[int] = []
HOUSE = ""


def heard(frame: FrameType, event: str, argument: Any) -> None:
    if event == "call" and NOW and frame.f_code.co_filename.startswith(HOUSE):
        CALLS[NOW[0]].append(f"{frame.f_code.co_filename[len(HOUSE) :]}:{frame.f_code.co_qualname}")


threading.setprofile(heard)

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

import unisono  # noqa: E402

HOUSE = f"{Path(unisono.__file__).parent}/"
strikes = int(os.environ["STRIKES"]) if "STRIKES" in os.environ else None

run = unisono.init(batch_size=64, seed=1, shards=4)
model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8))
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(1280, 32, generator=generator), torch.randint(0, 8, (1280,), generator=generator))


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


for step in run.steps(data, epochs=1):
    if step.number == STRUCK and run.rank == strikes and run.world_size == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if step.number in (ORDINARY, STRUCK):
        CALLS[step.number] = []
        NOW[:] = [step.number]
        sys.setprofile(heard)
        step.run(loss_fn)
        sys.setprofile(None)
        NOW.clear()
    else:
        step.run(loss_fn)
run.finish(model)
traced = {
    name: {"functions": list(dict.fromkeys(CALLS[step])), "calls": len(CALLS[step])}
    for name, step in (("ordinary", ORDINARY), ("struck", STRUCK))
    if step in CALLS
}
if len(traced) == 2:  # a worker that took a killed one's place may have come after both
    (run.dir / f"traced-{run.rank}.json").write_text(json.dumps(traced))
