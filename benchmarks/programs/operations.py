"""Computes operations when it is told their names, and prints what each took: ``operations.py LEVEL``."""

import sys
import time
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from benchmarks.workloads import WORKLOADS
from unisono.train.config.bits import KERNELS, require_portable

Work = Callable[[], object]

LEAST_S = 0.02
"""How long a turn takes at least: the clock of processor time is coarse."""


def _product(rows: int, inside: int, columns: int) -> Work:
    a, b = torch.randn(rows, inside), torch.randn(inside, columns)
    return lambda: a @ b


def _batches() -> Work:
    a, b = torch.randn(32, 128, 64), torch.randn(32, 64, 128)
    return lambda: a @ b


def _convolution() -> Work:
    images, kernel = torch.randn(8, 64, 56, 56), torch.randn(64, 64, 3, 3)
    return lambda: F.conv2d(images, kernel, padding=1)


def _root() -> Work:
    numbers = torch.rand(1_000_000)
    return numbers.sqrt


def _lstm() -> Work:
    lstm, sequences = torch.nn.LSTM(64, 128), torch.randn(32, 16, 64)
    return lambda: lstm(sequences)[0].sum().backward()


def _step(name: str, batch_size: int, optimizer: Callable[..., torch.optim.Optimizer], **settings: object) -> Work:
    workload = WORKLOADS[name]
    model, data = workload.build(), workload.data(batch_size)
    batch = tuple(each[:batch_size] for each in data.tensors)
    chosen = optimizer(model.parameters(), lr=1e-4, **settings)

    def step() -> None:
        chosen.zero_grad()
        workload.loss(model, batch).backward()
        chosen.step()

    return step


OPERATIONS: Mapping[str, Callable[[], Work]] = {
    "a matrix product, 1024 x 1024 x 1024": lambda: _product(1024, 1024, 1024),
    "a matrix product, 64 x 64 x 64": lambda: _product(64, 64, 64),
    "products of 32 batches, 128 x 64 x 128": _batches,
    "a convolution, 8 x 64 x 56 x 56, 3 x 3": _convolution,
    "sqrt of a million numbers": _root,
    "an LSTM, 32 x 16 x 64, 128 wide, with gradients": _lstm,
    "a training step, MLP, Adam": lambda: _step("mlp", 64, torch.optim.Adam),
    "a training step, MLP, fused Adam": lambda: _step("mlp", 64, torch.optim.Adam, fused=True),
    "a training step, ResNet shape, SGD": lambda: _step("resnet", 32, torch.optim.SGD, momentum=0.9),
    "a training step, small GPT, AdamW": lambda: _step("gpt", 4, torch.optim.AdamW),
}


def main() -> None:
    """Serve until the input ends."""
    torch.set_num_threads(1)
    if sys.argv[1] == "portable":
        require_portable(torch.device("cpu"))
        KERNELS.put(True)
    made = dict[str, Work]()
    for line in sys.stdin:
        name = line.strip()
        if name not in made:
            torch.manual_seed(0)
            made[name] = OPERATIONS[name]()
        print(_seconds(made[name]), flush=True)


def _seconds(work: Work) -> float:
    count, began = 0, time.process_time()
    while (took := time.process_time() - began) < LEAST_S:
        work()
        count += 1
    return took / count


if __name__ == "__main__":
    main()
