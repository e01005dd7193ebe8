"""One worker on a host of its own, whose connections change at some step; a policy may do something about it."""

import subprocess
import time
from pathlib import Path

import torch
from pydantic import BaseModel
from torch import Tensor, nn

import unisono
from benchmarks.programs import serve


class Task(BaseModel):
    """What a worker is told.

    Attributes:
        topology: to begin with.
        policy: whether there is a policy that chooses another one.
        steps: to train.
        at_step: when the commands are given.
        commands: of each rank, in the words of ``tc``.
        elements: of the model.
        compute_s: of each shard.
    """

    topology: str
    policy: bool
    steps: int
    at_step: int
    commands: dict[int, list[str]]
    elements: int
    compute_s: float


class Found(BaseModel):
    """What a worker tells: seconds and topology of each step."""

    seconds: list[float]
    topologies: list[str]


def work(task: Task, folder: Path) -> Found:
    """Train to the end."""
    policies = [unisono.TopologyPolicy()] if task.policy else []
    run = unisono.init(
        batch_size=24, shards=3, seed=0, communication={"transport": "process_group", "topology": task.topology},
        policies=policies, run_dir=folder / "run",
    )  # fmt: skip
    model = nn.Linear(task.elements // 64, 64, bias=False)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    data = torch.utils.data.TensorDataset(torch.randn(24, task.elements // 64))

    def loss_of(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        time.sleep(task.compute_s)
        loss: Tensor = model(batch[0]).square().mean()
        return loss

    found = Found(seconds=[], topologies=[])
    begun = time.perf_counter()
    for step in run.steps(data, epochs=task.steps):
        step.run(loss_of)
        if step.number == task.at_step and run.rank in task.commands:
            subprocess.run(task.commands[run.rank], check=True)
        now = time.perf_counter()
        found.seconds.append(now - begun)
        found.topologies.append(run.inside.membership.workers.transport.topology)
        begun = now
    run.finish()
    return found


if __name__ == "__main__":
    serve(Task, work)
