"""Runs of a single worker in the process of the test."""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch

import unisono
from struck_run import JOB
from unisono.data.generators import generators_kept
from unisono.train.config.numerics import apply_numerics

Start = Callable[..., unisono.Run]


@pytest.fixture(autouse=True)
def accelerate_as_new() -> Iterator[None]:
    """accelerate keeps what its first user in a process said, transformers' arguments among them: no test hears it."""
    yield
    if accelerate := sys.modules.get("accelerate.state"):
        for state in (accelerate.AcceleratorState, accelerate.PartialState, accelerate.GradientState):
            state._reset_state()


@pytest.fixture
def one_worker(monkeypatch: pytest.MonkeyPatch, torch_settings_restored: None) -> Iterator[None]:
    names = ("RUN_DIR", "TERM", "STOP_AFTER", "STOP_AFTER_EPOCHS", "TRACE", "STUDY", "BATCH_SCALE")
    further = ("RANK", "WORLD_SIZE", "UNISONO_RANK", "UNISONO_BATCH_SIZE", "UNISONO_BATCH_SCALE_WARMUP")
    for name in (*further, *(f"UNISONO_{each}" for each in names)):
        monkeypatch.delenv(name, raising=False)
    with generators_kept():
        yield


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    runs: list[unisono.Run] = []

    def started(**settings: Any) -> unisono.Run:
        run = unisono.init(**{"batch_size": 32, "shards": 2, "run_dir": tmp_path / "run", **settings})
        runs.append(run)
        return run

    yield started
    for run in reversed(runs):
        run.close()


@pytest.fixture
def numerics() -> Iterator[None]:
    """Torch's switches as a job of one thread sets them, for workers that are threads of the test."""
    before, threads = apply_numerics(JOB, torch.device("cpu")), torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    before.apply()


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for all worlds of struck runs: starting some anew for each takes longer than the world."""
    before, threads, most = apply_numerics(JOB, torch.device("cpu")), torch.get_num_threads(), 16
    torch.set_num_threads(1)
    with ThreadPoolExecutor(most) as pool:
        all_there = Barrier(most)
        for each in [pool.submit(all_there.wait) for _ in range(most)]:
            each.result()
        yield pool
    torch.set_num_threads(threads)
    before.apply()
