import signal
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import TensorDataset

from unisono.data.loader import ShardLoader
from unisono.data.shards import ShardRequest, ShardSource

pytestmark = pytest.mark.procs


@pytest.fixture(autouse=True)
def child_signals_restored() -> Iterator[None]:
    before = signal.getsignal(signal.SIGCHLD)
    yield  # torch's loader keeps its handler for good
    signal.signal(signal.SIGCHLD, before)


def loader(workers: int) -> ShardLoader:
    source = ShardSource(TensorDataset(torch.arange(40)), seed=0)
    requests = ([ShardRequest(0, (step, step + 1)), ShardRequest(0, ())] for step in range(15))
    return ShardLoader(source, requests, workers)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_batches_come_in_order_from_any_number_of_processes(workers: int) -> None:
    steps = list(loader(workers))
    assert [batch[0].tolist() for batch, _ in steps] == [[step, step + 1] for step in range(15)]
    assert all(empty is None for _, empty in steps)


def test_a_loader_that_is_left_early_leaves_no_process_behind() -> None:
    batches = iter(loader(2))
    next(batches)
    batches.close()  # what stays is found by the check for leaks
