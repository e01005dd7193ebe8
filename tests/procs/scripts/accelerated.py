"""Trains a small network on the digits, on the accelerator that there is; counts what a step asks of it."""

import gzip
import json
import os
import sys
from importlib.util import find_spec  # to import scikit-learn takes longer than the training
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono

MODEL = os.environ.get("MODEL", "mlp")
EPOCHS = int(os.environ.get("EPOCHS", "2"))
OPTIMIZER = os.environ.get("OPTIMIZER", "AdamW")
EARLY_STATE = "EARLY_STATE" in os.environ
"""Whether the optimizer has a state before ``run.prepare``, and the script counts what it sees."""

HALVES = "HALVES" in os.environ
"""Whether the loop's body writes to a weight in a way that torch does not count."""

COUNTED_FROM = 10
"""The first step whose waits and memory are counted: those before it look at more."""

with gzip.open(Path(str(find_spec("sklearn").origin)).parent / "datasets/data/digits.csv.gz", "rt") as file:  # type: ignore[union-attr]
    digits = torch.tensor([[float(word) for word in str(next(file)).split(",")] for _ in range(160)])
data = TensorDataset(digits[:, :64].reshape(-1, 1, 8, 8) / 16, digits[:, 64].long())


class Cnn(nn.Module):
    """It has running statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.Linear(54, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(
            F.dropout(F.max_pool2d(self.norm(self.conv(x)), 2).flatten(1), 0.1, self.training)
        )
        return out


class Gpt(nn.Module):
    """It reads rows of an image as words."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.places = nn.Linear(8, 16), nn.Parameter(torch.zeros(8, 16))
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True) for _ in range(2))
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.read(x.flatten(1).view(-1, 8, 8)) + self.places
        for layer in self.layers:
            out = layer(out)
        answer: torch.Tensor = self.head(out.mean(1))
        return answer


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))


def optimizer_of(model: nn.Module) -> Any:
    if OPTIMIZER == "LBFGS":
        raise ValueError("it wants a closure")
    made = getattr(torch.optim, OPTIMIZER)(model.parameters(), lr=1e-2)
    if EARLY_STATE:
        model(data.tensors[0][:4]).sum().backward()
        made.step()
        made.zero_grad()
    return made


def counts() -> dict[str, int]:
    from fakedev import _C  # type: ignore[import-not-found]

    live, peak = _C.memory()[:2]
    return {**_C.counts(), "live": live, "peak": peak}


precision: Any = os.environ.get("PRECISION", "float32")
run = unisono.init(
    batch_size=32, seed=0, shards=6, device=os.environ.get("DEVICE") or None, arithmetic={"precision": precision}
)
model = {"mlp": mlp, "cnn": Cnn, "gpt": Gpt}[MODEL]()
optimizer = optimizer_of(model)


class Seen:
    """What shards have seen."""

    def __init__(self) -> None:
        self.right, self.answers = torch.tensor(0), list[torch.Tensor]()


seen = Seen()
run.prepare(model, optimizer, state={"seen": (seen, {"right": "sum", "answers": "cat"})} if EARLY_STATE else None)
first: dict[str, int] = {}


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    answers = model(batch[0])
    run.log("right", (answers.argmax(1) == batch[1]).float().mean())
    if EARLY_STATE:
        seen.right += (answers.argmax(1) == batch[1]).sum()
        seen.answers.append(answers.detach()[:1])
    return F.cross_entropy(answers, batch[1])


for step in run.steps(data, epochs=EPOCHS, shuffle=True, loader_workers=int(os.environ.get("LOADERS", "0"))):
    step.run(loss_of, clip_norm=1.0)
    if HALVES and step.number == 3:
        next(model.parameters()).data.mul_(0.5)
    if "fakedev" in sys.modules and step.number == COUNTED_FROM:
        first = counts()
    if first and step.is_last:
        last = counts()
        told = {name: (last[name] - first.get(name, 0)) / (step.number - COUNTED_FROM) for name in last}
        told |= {"live at first": first["live"], "live": last["live"], "peak": last["peak"]}
        print(f"counted {json.dumps(told)}", flush=True)
place = next(model.parameters()).device
own = torch.full((3,), float(run.rank), device=place)
given = run.broadcast({"a": own, "b": own.cpu()}, run.world_size - 1)
assert (given["a"].device, given["b"].device) == (place, torch.device("cpu")), given
given = run.together(lambda workers: workers.all_reduce(own, "sum") + workers.broadcast(own))
assert given.tolist() == [float(sum(range(run.world_size)))] * 3, given
assert given.device == place, given
if EARLY_STATE:
    run.print(f"seen {int(seen.right)} {unisono.digest(nn.ParameterList(seen.answers))}")
print(f"computed on {next(model.parameters()).device}", flush=True)
run.finish()
