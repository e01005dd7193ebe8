"""What a training worker is told, and what it tells in the end."""

from typing import Literal

from pydantic import BaseModel, ConfigDict
from torch import nn
from torch.optim import SGD, Optimizer
from torch.utils.data import TensorDataset

from benchmarks.workloads import BATCHES, WORKLOADS, LossFunction

Update = Literal["default", "foreach", "fused"]
Option = bool | int | float | str


class Task(BaseModel):
    """One contender's training, the same for all of its workers.

    Attributes:
        contender: which module of ``benchmarks.contenders``.
        options: the contender's own.
        workload: a name in ``WORKLOADS``.
        batch_size: samples of a global batch, over all workers.
        threads: torch threads of each worker.
        update: which of torch's implementations of SGD.
        warm_up: steps that are not counted.
        steps: steps that are.
    """

    model_config = ConfigDict(frozen=True)

    contender: str
    options: dict[str, Option] = {}
    workload: str
    batch_size: int
    threads: int = 1
    update: Update = "default"
    warm_up: int = 3
    steps: int = 10

    @property
    def loss(self) -> LossFunction:
        """The workload's."""
        return WORKLOADS[self.workload].loss

    def model(self) -> nn.Module:
        """The model; its initial weights follow from torch's seed."""
        return WORKLOADS[self.workload].build()

    def optimizer(self, model: nn.Module) -> Optimizer:
        """SGD with momentum."""
        chosen = {} if self.update == "default" else {self.update: True}
        return SGD(model.parameters(), lr=0.01, momentum=0.9, **chosen)

    def data(self) -> TensorDataset:
        """``BATCHES`` global batches, read in this order, again and again."""
        return WORKLOADS[self.workload].data(self.batch_size * BATCHES)


class Trained(BaseModel):
    """What one worker found.

    Attributes:
        seconds: of each counted step, the whole of it.
        losses: of each step from the first on: over this worker's samples, or over all.
        parts: what the contender says of its counted steps: seconds by name.
    """

    seconds: list[float]
    losses: list[float]
    parts: list[dict[str, float]] = []
