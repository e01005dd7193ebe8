"""The time of a step: Unisono on one worker, plain torch, and plain torch that is deterministic, in alternating rounds.

Each has a process of its own, and computes when it is told to. ``python -m benchmarks.gpu_check.speed MODEL``
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext
from typing import Any

import torch
from torch.utils.data import TensorDataset

import unisono
from benchmarks.gpu_check.forked import loaded_context
from benchmarks.gpu_check.models import SMALL, TIMED, Task, loss_of
from unisono.device import choose_device, wait_for

UNISONO, DETERMINISTIC, PLAIN = CONTENDERS = ("Unisono", "deterministic torch", "torch")
WARM_UP = 12
"""Steps: in its first eight Unisono looks at more."""


def main() -> None:
    """Print the median time of each, and the medians of the ratios within a round."""
    options = _options()
    processes = loaded_context()
    with ExitStack() as opened:
        folder = opened.enter_context(tempfile.TemporaryDirectory())
        contenders = {name: opened.enter_context(_contender(processes, name, options, folder)) for name in CONTENDERS}
        times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
        for number in range(options.rounds):
            for name in CONTENDERS[number % 3 :] + CONTENDERS[: number % 3]:
                contenders[name].send(options.steps)
                took = contenders[name].recv()
                if isinstance(took, str):
                    raise RuntimeError(f"{name}: {took}")
                times[name].append(took)
    print(
        json.dumps(
            {"ms": {name: 1000 * statistics.median(times[name]) for name in CONTENDERS}, "ratios": ratios(times)}
        )
    )


def ratios(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """How many times as long as each of the others Unisono takes, by the other's name."""
    return {
        name: statistics.median(own / other for own, other in zip(times[UNISONO], times[name], strict=True))
        for name in (DETERMINISTIC, PLAIN)
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=list(TIMED))
    parser.add_argument("--device")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=15, help="in a round")
    parser.add_argument("--small", action="store_true")
    return parser.parse_args()


@contextmanager
def _contender(processes: ForkContext, name: str, options: argparse.Namespace, folder: str) -> Iterator[Connection]:
    here, there = processes.Pipe()
    process = processes.Process(target=_serve, args=(name, there, options, folder), daemon=True)
    process.start()
    there.close()
    try:
        yield here
    finally:
        process.kill()
        process.join()


def _serve(name: str, channel: Connection, options: argparse.Namespace, folder: str) -> None:
    try:
        _take_turns(name, channel, options, folder)
    except Exception as error:
        channel.recv()
        channel.send(f"{type(error).__name__}: {error}")
        raise


def _take_turns(name: str, channel: Connection, options: argparse.Namespace, folder: str) -> None:
    device = choose_device(options.device, 0)
    task = (SMALL if options.small else TIMED)[options.model]
    torch.set_num_threads(1)
    steps = _unisono(task, device, folder) if name == UNISONO else _plain(task, device, name == DETERMINISTIC)
    for _ in range(2 if options.small else WARM_UP):
        next(steps)
    while True:
        count = channel.recv()
        wait_for(device)
        begun = time.perf_counter()
        for _ in range(count):
            next(steps)
        wait_for(device)
        channel.send((time.perf_counter() - begun) / count)


def _unisono(task: Task, device: torch.device, folder: str) -> Iterator[None]:
    run = unisono.init(
        batch_size=task.batch_size,
        shards=1,
        seed=0,
        device=device,
        arithmetic={"precision": "bf16"},
        run_dir=f"{folder}/run",
    )
    model = task.model()
    run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    batch = _batch(task, device)
    # The samples are numbers, and all batches are one that lies on the device: no loader is measured.
    for step in run.steps(TensorDataset(torch.arange(100 * task.batch_size)), epochs=1000, shuffle=False):
        step.run(lambda model, _: loss_of(model, batch))
        yield


def _plain(task: Task, device: torch.device, deterministic: bool) -> Iterator[None]:
    if deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
        determinism: Any = torch.utils.deterministic
        determinism.fill_uninitialized_memory = False
        torch.backends.cudnn.deterministic = True
    torch.manual_seed(0)
    model = task.model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = _batch(task, device)
    while True:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        yield


def _batch(task: Task, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = (tensor.to(device) for tensor in task.data(task.batch_size).tensors)
    return inputs, targets


if __name__ == "__main__":
    main()
