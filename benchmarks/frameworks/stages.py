"""A language model in stages on two devices: torch's 1F1B by itself, and with Unisono; and whole, in a plain loop."""

import warnings
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import unisono
from benchmarks.frameworks import PLAIN, Note
from benchmarks.frameworks.fsdp import DEPTH, LENGTH, WIDTH, WORDS, Language, loss_of, train_whole

STOCK = "1f1b"
MICRO_BATCHES = 4


def train(way: str, batch_size: int, workers: int, note: Note) -> None:
    """Train until the process is stopped; the workers are the devices of one."""
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    if way == PLAIN:
        train_whole(batch_size, note)
    (_stock if way == STOCK else _with_unisono)(batch_size, workers, note)


def _stock(batch_size: int, workers: int, note: Note) -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    dist.init_process_group("gloo")
    rank, model, size = dist.get_rank(), Language(), batch_size // MICRO_BATCHES
    layers = list(model.layers)[rank * DEPTH // workers : (rank + 1) * DEPTH // workers]
    is_first, is_last = rank == 0, rank == workers - 1
    module = nn.Sequential(*chain([model.embedding] * is_first, layers, [model.head] * is_last))
    between = torch.zeros(size, LENGTH, WIDTH, requires_grad=True)
    inputs = torch.zeros(size, LENGTH, dtype=torch.int64) if is_first else between
    outputs = torch.zeros(size, LENGTH, WORDS, requires_grad=True) if is_last else between
    stage = PipelineStage(module, rank, workers, torch.device("cpu"), input_args=inputs, output_args=outputs)
    schedule = Schedule1F1B(stage, n_microbatches=MICRO_BATCHES, loss_fn=_error)
    optimizer = torch.optim.AdamW(module.parameters(), foreach=True)
    while True:
        words = torch.randint(0, WORDS, (batch_size, LENGTH))
        given: tuple[Any, ...] = (words,) if is_first else ()
        schedule.step(*given, target=words if is_last else None, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        note()


def _error(found: Tensor, words: Tensor) -> Tensor:
    return nn.functional.cross_entropy(found.flatten(0, 1), words.flatten())


def _with_unisono(batch_size: int, workers: int, note: Note) -> None:
    run = unisono.init(batch_size=batch_size, shards=MICRO_BATCHES, communication={"devices_per_worker": workers})
    cuts = [f"layers.{device * DEPTH // workers}" for device in range(1, workers)]
    model = run.pipeline(Language(), cuts, schedule="1f1b")
    model, _ = run.prepare(model, torch.optim.AdamW(model.parameters(), foreach=True))
    words = TensorDataset(torch.randint(0, WORDS, (64 * batch_size, LENGTH)))
    for step in run.steps(words, epochs=10**6):
        step.run(lambda model, batch: loss_of(model, batch[0]))
        note()
