"""Runs of a single worker in the process of the test."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import unisono
from unisono.data.streams import generators_kept

Start = Callable[..., unisono.Run]


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
