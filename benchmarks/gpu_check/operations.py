"""Computes operations in several processes at once, and prints a line of JSON about each way.

They are those of which ``unisono doctor`` shows one digest, and some that fill a GPU.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from multiprocessing.context import ForkContext
from multiprocessing.synchronize import Barrier, Event
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.gpu_check.forked import loaded_context
from unisono.device import builds, choose_device, described
from unisono.job import Job
from unisono.train.config.bits import OPERATIONS, Operation, computed, with_gradients
from unisono.train.config.numerics import apply_numerics

LARGE: Mapping[str, Operation] = {
    "a product that fills the device": lambda draw: with_gradients(torch.matmul, draw(1024, 2000), draw(2000, 1024)),
    "the same in bfloat16": lambda draw: with_gradients(
        torch.matmul, draw(1024, 2000).bfloat16(), draw(2000, 1024).bfloat16()
    ),
    "a product with a long sum": lambda draw: draw(64, 50_000) @ draw(50_000, 64),
    "convolutions of many images": lambda draw: with_gradients(
        lambda x, w: F.conv2d(x, w, padding=1), draw(16, 64, 28, 28), draw(64, 64, 3, 3)
    ),
    "batch normalisation of many images": lambda draw: with_gradients(
        lambda x: F.batch_norm(x, None, None, training=True), draw(16, 64, 28, 28)
    ),
    "causal attention": lambda draw: with_gradients(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        *(draw(4, 8, 256, 64) for _ in range(3)),
    ),
    "causal attention in bfloat16": lambda draw: with_gradients(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        *(draw(4, 8, 256, 64).bfloat16() for _ in range(3)),
    ),
    "an embedding whose words come again": lambda draw: with_gradients(
        lambda table: table[torch.arange(20_000, device=table.device) % 97], draw(97, 64)
    ),
    "cross-entropy over many words": lambda draw: with_gradients(
        lambda x: F.cross_entropy(x, torch.arange(64, device=x.device)), draw(64, 20_000)
    ),
    "a sum of a million": lambda draw: draw(1_000_003).sum(),
}

Digests = Mapping[str, str]

FAILS = "fails:"
"""In place of a digest, before the reason."""

PATIENCE_S = 60.0
"""How long processes wait for each other to begin."""

_at_once: Barrier


def main() -> None:
    """Print what it computes with; then what each way computes."""
    options = _options()
    processes = loaded_context()
    calm: list[Digests] = []
    for name, is_busy in (("in several processes at once", False), ("beside a process that keeps it busy", True)):
        if is_busy and options.share:
            break
        barrier = processes.Barrier(options.processes)
        with (
            _busy(processes, options) if is_busy else nullcontext(),
            ProcessPoolExecutor(options.processes, processes, _begin, (barrier,)) as pool,
        ):
            asked = [pool.submit(_computed, options) for _ in range(options.processes)]
            found: list[Digests] = [digests for each in asked for digests in each.result()]
        calm = calm or [found[0]]
        told = {
            "check": name,
            "differing": differing([*calm, *found]),
            "missing": missing(found[0]),
            "digests": found[0],
        }
        print(json.dumps(told), flush=True)
    device = choose_device(options.device, 0)
    facts = {"torch": torch.__version__, "device": str(device), "devices": described(), **builds()}
    print(json.dumps({"facts": facts}), flush=True)


def differing(found: Sequence[Digests]) -> list[str]:
    """The operations that have more than one digest."""
    return [name for name in found[0] if len({each[name] for each in found}) > 1]


def missing(found: Digests) -> list[str]:
    """The operations that the device does not have, or not in a deterministic way."""
    return [name for name, digest in found.items() if digest.startswith(FAILS)]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5, help="in each process")
    parser.add_argument("--small", action="store_true", help="few operations, none of which fills a GPU")
    parser.add_argument("--share", action="store_true", help="this process has a share of the device: no busy one")
    parser.add_argument("--green", action="store_true", help="in a green context of half of the multiprocessors")
    return parser.parse_args()


def _begin(barrier: Barrier) -> None:
    global _at_once  # noqa: PLW0603 (a barrier comes into a process of a pool in no other way)
    _at_once = barrier


def _computed(options: argparse.Namespace) -> list[dict[str, str]]:
    device = choose_device(options.device, 0)
    apply_numerics(Job.create(batch_size=8), device)
    if options.green:
        half = torch.cuda.get_device_properties(device).multi_processor_count // 2
        green: Any = torch.cuda.green_contexts.GreenContext
        green.create(num_sms=half // 8 * 8, device_id=device.index).set_context()
    operations = dict([*OPERATIONS.items()][::3]) if options.small else {**OPERATIONS, **LARGE}
    _at_once.wait(PATIENCE_S)
    return [
        {name: _digest(name, operation, device) for name, operation in operations.items()}
        for _ in range(options.rounds)
    ]


def _digest(name: str, operation: Operation, device: torch.device) -> str:
    try:
        return computed({name: operation}, device)[name]
    except (NotImplementedError, RuntimeError) as error:  # a device that lacks an operation
        return f"{FAILS} {str(error).splitlines()[0][:100]}"


@contextmanager
def _busy(processes: ForkContext, options: argparse.Namespace) -> Iterator[None]:
    begun = processes.Event()
    process = processes.Process(target=_keep_busy, args=(options, begun), daemon=True)
    process.start()
    try:
        if not begun.wait(PATIENCE_S):
            raise RuntimeError("the process that keeps the device busy does not begin")
        yield
    finally:
        process.kill()
        process.join()


def _keep_busy(options: argparse.Namespace, begun: Event) -> None:
    device = choose_device(options.device, 0)
    torch.set_num_threads(1)
    numbers = torch.rand(64 if options.small else 4096, 64 if options.small else 4096, device=device)
    while True:
        for _ in range(10):
            numbers = (numbers @ numbers).tanh()
        numbers.sum().item()
        begun.set()


if __name__ == "__main__":
    main()
