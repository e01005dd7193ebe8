"""A job whose weights have one digest on any number of workers: ``unisono run -m benchmarks.gpu_check.job MODEL``."""

import argparse
import json
import os

import torch

import unisono
from benchmarks.gpu_check.counts import counter_of, live_bytes
from benchmarks.gpu_check.models import COMPARED, SMALL, loss_of

FIRST = 10
"""The step from which on waits and memory are counted: those before it look at more."""

COUNTED = 20
"""Steps in which waits are counted."""


def main() -> None:
    """Train it."""
    options = _options()
    # Where NCCL is to take several workers on one device, an older one than 2.30 is told that each is another host.
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        os.environ["NCCL_HOSTID"] = f"worker {os.getpid()}"
    task = (SMALL if options.small else COMPARED)[options.model]
    run = unisono.init(batch_size=task.batch_size, shards=8, seed=0, device=options.device)
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run.prepare(model, optimizer)
    counter = counter_of(run.device) if options.counted else None
    figures: dict[str, float] = {}
    steps = run.steps(task.data(4 * task.batch_size), epochs=options.steps, max_steps=options.steps)
    for number, step in enumerate(steps, 1):
        step.run(loss_of, clip_norm=1.0)
        if counter is not None and number == FIRST:
            figures["live bytes at first"] = live_bytes(run.device)
            counter.start()
        if counter is not None and number == FIRST + COUNTED:
            figures["host waits"] = counter.stop() / COUNTED
        if counter is not None and number == options.steps:
            figures["live bytes"] = live_bytes(run.device)
    if figures:
        print(json.dumps(figures), flush=True)
    run.print(f"computed on {run.device}")
    run.finish(model)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=list(COMPARED))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--device")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--counted", action="store_true", help="waits for the device, and the bytes that live on it")
    return parser.parse_args()


if __name__ == "__main__":
    main()
