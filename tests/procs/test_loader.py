"""Loader processes: what they hand over, and how they end."""

import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

import unisono
from unisono.data.generators import generators_kept
from unisono.data.loading import DEPTH, Loaded, Processes, load
from unisono.data.sample_order import KeyedOrder
from unisono.data.shards import ShardSource, ShardsRequest
from unisono.errors import DataError, JobError

pytestmark = pytest.mark.procs

PATIENCE_S = 60.0


def loading(dataset: Any, workers: int, steps: int = 12, collate: Any = None, timeout_s: float = PATIENCE_S) -> Loaded:
    """Steps of two samples each, in two shards of which the second is empty."""
    source = ShardSource(dataset, KeyedOrder(len(dataset), seed=0), collate)
    places = (range(2 * step, 2 * step + 2) for step in range(steps))
    return load(source, (ShardsRequest(0, (place, place[2:])) for place in places), Processes(workers, timeout_s))


def loaded(dataset: Any, workers: int, steps: int = 12, collate: Any = None) -> list[Any]:
    """The first shard of every step; all are kept."""
    with generators_kept(), closing(loading(dataset, workers, steps, collate)) as batches:
        return [shards[0] for shards in _all(batches)]


def _all(batches: Loaded) -> Iterator[list[Any]]:
    while (shards := next(batches, None)) is not None:
        yield shards


class Sampled(Dataset[Any]):
    """A data set from a function of the index."""

    def __init__(self, sample: Callable[[int], Any]) -> None:
        self._sample = sample

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Any:
        return self._sample(index)


# -- what is handed over ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 2, 3, 5])
def test_steps_come_in_order_from_any_number_of_processes(workers: int) -> None:
    with closing(loading(TensorDataset(torch.arange(40)), workers, steps=15)) as batches:
        steps = [next(batches) for _ in range(15)]
        assert next(batches, None) is None
    assert [batch[0].tolist() for batch, _ in steps] == [[2 * step, 2 * step + 1] for step in range(15)]
    assert all(empty is None for _, empty in steps)


def test_what_a_sample_draws_does_not_depend_on_where_it_is_loaded() -> None:
    noise = Sampled(lambda index: (torch.randn(3), np.random.rand(), random.random()))
    expected = [[part.tolist() for part in batch] for batch in loaded(noise, 0)]
    for workers in (1, 2, 3):
        found = loaded(noise, workers)
        assert [[part.tolist() for part in batch] for batch in found] == expected


class Pair(NamedTuple):
    image: Any
    name: str


def of_many_kinds(samples: list[int]) -> Any:
    first = samples[0]
    image = torch.arange(24.0).reshape(1, 2, 3, 4) + first
    return OrderedDict(
        pair=Pair(image.to(memory_format=torch.channels_last), f"sample {first}"),
        twice=(image, image),
        dtypes=[torch.full((3,), first).to(dtype) for dtype in (torch.bool, torch.bfloat16, torch.complex64)],
        scalar=torch.tensor(first),
        empty=torch.zeros(0, 3),
        permuted=image[0].permute(2, 0, 1),
        overlapping=torch.tensor([first]).expand(5),
        sparse=torch.eye(3).to_sparse() * first,
        array=np.arange(first),
        nothing=None,
    )


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_batches_of_many_kinds_arrive_as_they_are_made() -> None:
    batches = [loaded(Sampled(int), workers, 6, of_many_kinds) for workers in (2, 0)]
    for found, expected in zip(*batches, strict=True):
        assert type(found) is OrderedDict
        assert type(found["pair"]) is Pair
        assert found["pair"].name == expected["pair"].name
        assert found["twice"][0] is found["twice"][1]
        assert np.array_equal(found["array"], expected["array"])
        assert found["nothing"] is None
        for one, other in zip(tensors(found), tensors(expected), strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert one.is_sparse or one.stride() == other.stride()
            assert torch.equal(one.to_dense(), other.to_dense())


def tensors(batch: Any) -> list[Tensor]:
    found = [batch["pair"].image, *batch["twice"], *batch["dtypes"]]
    return found + [batch[name] for name in ("scalar", "empty", "permuted", "overlapping", "sparse")]


def test_batches_of_growing_size_arrive_whole() -> None:
    found = loaded(Sampled(int), 2, 12, lambda samples: torch.full((4 ** (samples[0] // 2), 3), samples[0]))
    assert [len(batch) for batch in found] == [4**step for step in range(12)]
    assert all(bool((batch == 2 * step).all()) for step, batch in enumerate(found))


def test_a_part_of_a_batch_that_is_kept_is_never_overwritten_either() -> None:
    with closing(loading(TensorDataset(torch.arange(200)), 2, steps=80)) as batches:
        parts = [next(batches)[0][0].view(2, 1)[1:] for _ in range(80)]
    assert [int(part) for part in parts] == [2 * step + 1 for step in range(80)]


def test_batches_that_nobody_keeps_lie_in_the_same_memory_in_turn_and_are_not_copied() -> None:
    with closing(loading(TensorDataset(torch.arange(200)), 2, steps=80)) as batches:
        places = [next(batches)[0][0].data_ptr() for _ in range(80)]
    assert len(set(places)) <= 2 * DEPTH + 2


def test_a_loop_is_told_what_is_there_already() -> None:
    with closing(loading(TensorDataset(torch.arange(40)), 1, steps=2)) as batches:
        next(batches)
        while not batches.is_ready():
            os.sched_yield()
        next(batches)
        assert not batches.is_ready()
    assert not loading(TensorDataset(torch.arange(40)), 0).is_ready()


# -- how they end -----------------------------------------------------------------------------------------------------


def test_a_loader_that_is_left_while_a_sample_takes_for_ever_leaves_no_process_behind() -> None:
    with closing(loading(Sampled(lambda index: index if index < 2 else threading.Event().wait()), 2)) as batches:
        next(batches)


@pytest.mark.usefixtures("torch_settings_restored")
def test_a_run_that_is_closed_ends_its_loader_processes_although_the_loop_is_kept(tmp_path: Path) -> None:
    with generators_kept(), unisono.init(batch_size=32, shards=2, run_dir=tmp_path) as run:
        model = torch.nn.Linear(1, 1)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        steps = run.steps(TensorDataset(torch.ones(100, 1)), loader_workers=2)
        next(steps).run(lambda model, batch: model(batch[0]).mean())
    assert next(steps, None) is None


@pytest.mark.usefixtures("torch_settings_restored")
def test_a_number_of_loader_processes_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    with generators_kept(), unisono.init(batch_size=32, run_dir=tmp_path) as run:
        model = torch.nn.Linear(1, 1)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(JobError, match="loader_workers=-1"):
            run.steps(TensorDataset(torch.ones(100, 1)), loader_workers=-1)


def failing(at: int, how: Callable[[], Any]) -> Dataset[Any]:
    return Sampled(lambda index: how() if index == at else index)


def steps_until_error(dataset: Any, timeout_s: float = PATIENCE_S) -> tuple[int, DataError]:
    steps = 0
    with closing(loading(dataset, 2, timeout_s=timeout_s)) as batches, pytest.raises(DataError) as caught:
        while next(batches):
            steps += 1
    return steps, caught.value


def test_an_error_in_a_loader_process_names_the_sample_and_comes_in_its_turn() -> None:
    def how() -> Any:
        raise FileNotFoundError("cat.png")

    steps, error = steps_until_error(failing(7, how))
    assert steps == 3
    assert "loader process 1 could not load places 6 … 7 of epoch 0: FileNotFoundError: cat.png" in str(error)
    assert "in how" in str(error)
    assert "while sample 7 of the data set was loaded" in str(error)


def test_samples_that_cannot_be_collated_say_the_same_as_without_processes() -> None:
    ragged = Sampled(lambda index: torch.zeros(5 if index == 3 else 6))
    with pytest.raises(DataError) as expected:
        loaded(ragged, 0)
    assert str(steps_until_error(ragged)[1]) == str(expected.value)


def test_a_batch_that_cannot_be_sent_is_an_error_too() -> None:
    with pytest.raises(DataError, match="loader process 0 could not load .*pickle"):
        loaded(Sampled(int), 1, collate=lambda samples: threading.Lock())


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), r"was ended by SIGKILL while .* out of memory"),
        (lambda: os.kill(os.getpid(), signal.SIGXCPU), r"was ended by SIGXCPU while it loaded places 6 … 7 of epoch 0"),
        (lambda: os._exit(3), r"ended with exit code 3 while it loaded places 6 … 7"),
    ],
    ids=["killed", "out of time", "exit"],
)
def test_a_loader_process_that_dies_is_an_error_that_says_how(how: Any, message: str) -> None:
    steps, error = steps_until_error(failing(7, how))
    assert steps == 3
    assert re.search(message, str(error))


def test_a_loader_process_that_hangs_is_an_error_and_shows_where(capfd: pytest.CaptureFixture[str]) -> None:
    def wait_for_a_mount_that_is_gone() -> Any:
        threading.Event().wait()

    _, error = steps_until_error(failing(1, wait_for_a_mount_that_is_gone), timeout_s=0.5)
    assert "gave nothing for 0.5 s while it loaded places 0 … 1 of epoch 0" in str(error)
    assert "wait_for_a_mount_that_is_gone" in capfd.readouterr().err


def test_signals_for_the_whole_group_leave_loader_processes_to_their_worker() -> None:
    def how() -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        return 7

    assert [batch.tolist() for batch in loaded(failing(7, how), 2)][3] == [6, 7]


SCRIPT = """
import sys, threading
import psutil, torch
import unisono
from unisono.data.loading import load
from unisono.data.loading import Processes
from unisono.data.sample_order import KeyedOrder
from unisono.data.shards import ShardSource, ShardsRequest

class Slow(torch.utils.data.Dataset):
    def __len__(self): return 100
    def __getitem__(self, index):
        return index if index == 0 else threading.Event().wait()

source = ShardSource(Slow(), KeyedOrder(100, 0))
batches = load(source, (ShardsRequest(0, (range(n, n + 1),)) for n in range(9)), Processes(2, 60.0))
next(batches)
print(*(child.pid for child in psutil.Process().children()), flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def script() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        yield process
        process.kill()


@pytest.mark.parametrize("end", ["killed", "over"])
def test_loader_processes_end_with_their_worker(script: subprocess.Popen[str], end: str) -> None:
    assert script.stdout is not None
    children = [psutil.Process(int(pid)) for pid in script.stdout.readline().split()]
    assert len(children) == 2
    if end == "killed":
        script.kill()
    _, errors = script.communicate("\n", timeout=PATIENCE_S)
    assert (script.returncode, errors) == (-signal.SIGKILL if end == "killed" else 0, "")
    assert not psutil.wait_procs(children, timeout=PATIENCE_S)[1]
