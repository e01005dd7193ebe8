"""Three workers do things together, and refuse what they cannot do together; prints one line of findings each."""

import json
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import unisono
from unisono.errors import DataError, JobMismatch, NonFiniteLoss

found: dict[str, Any] = {}


def refusal(work: Callable[[], Any]) -> str:
    try:
        work()
    except (DataError, JobMismatch, NonFiniteLoss) as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def mean_loss(model: Any, batch: Any) -> Tensor:
    loss: Tensor = model(batch[0]).pow(2).mean()
    return loss


warnings.simplefilter("ignore")
run = unisono.init(batch_size=24, shards=6, seed=1)
rank, workers = run.rank, run.world_size
numbers = TensorDataset(torch.arange(50.0).reshape(50, 1))

found["sum"] = run.all_reduce(rank + 1, "sum")
found["mean"] = run.all_reduce(float(rank))
found["max"] = run.all_reduce(torch.tensor([rank, -rank]), "max").tolist()
found["min"] = run.all_reduce(torch.tensor([rank, -rank]), "min").tolist()
found["broadcast"] = run.broadcast({"from": rank, "tensor": torch.full((2,), float(rank))}, source=1)["from"]
found["broadcast tensor"] = run.broadcast(torch.full((2, 2), rank, dtype=torch.bfloat16), source=2).tolist()
run.barrier()

model = nn.Linear(1, 1)
with torch.no_grad():
    model.weight.fill_(float(rank))  # prepare gives everybody the weights of rank 0
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4))
found["warnings of the main worker"] = run.broadcast([str(warning.message) for warning in said])
found["weight after prepare"] = model.weight.item()
found["predictions in order"] = run.predict(numbers, lambda model, batch: batch[0]).flatten().tolist() == list(
    range(50)
)
found["three samples"] = run.predict(TensorDataset(torch.arange(3.0)), lambda model, batch: {"x": batch[0] * 2})[
    "x"
].tolist()
found["mean of all"] = run.evaluate(numbers, lambda model, batch: {"mean": batch[0].mean()})["mean"]

found["other metrics"] = refusal(lambda: run.evaluate(numbers, lambda model, batch: {f"from {rank}": 1.0}))
mine = TensorDataset(torch.zeros(40 + rank, 1))
found["other data set"] = refusal(lambda: next(iter(run.steps(mine))))
wide = nn.Linear(1, 1 + (rank == 2))
found["other model"] = refusal(lambda: run.prepare(wide, torch.optim.SGD(wide.parameters())))


def nan_on_the_last_shard(model: Any, batch: Any) -> Tensor:
    return mean_loss(model, batch) * (float("nan") if batch[0].max() == 23 else 1.0)


def train_into_nan() -> None:
    for step in run.steps(numbers, shuffle=False):
        step.run(nan_on_the_last_shard)


found["nan"] = refusal(train_into_nan)
found["other job"] = refusal(lambda: unisono.init(batch_size=24 + rank, shards=6))
print(f"FOUND {json.dumps(found)}", flush=True)
