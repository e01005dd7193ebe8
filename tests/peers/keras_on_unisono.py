"""A plug-in of pytest for Keras' own tests: with ``--shards N`` their models train on a run of Unisono."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import keras
import pytest
from keras.src.backend.torch.trainer import TorchTrainer

import unisono

ROUTED = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shards", type=int, default=0, help="the shards of a run; 0 for Keras alone")
    parser.addoption("--digests", help="a file for the digests of each test's weights; a run has the launcher's folder")


@pytest.fixture(autouse=True)
def _without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = TorchTrainer.compile

    def compile(model: Any, *values: Any, **options: Any) -> None:
        usual(model, *values, **options)
        model.jit_compile = False

    monkeypatch.setattr(TorchTrainer, "compile", compile)


@pytest.fixture(autouse=True)
def _on_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, _without_compiler: None
) -> Iterator[None]:
    shards, digests = request.config.getoption("--shards"), request.config.getoption("--digests")
    if not shards:
        yield
        return
    adapters: dict[int, Any] = {}
    settings: dict[str, Any] = {"shards": shards}  # for the first of a test's models
    if digests is None:
        settings["run_dir"] = tmp_path / "run"
    keras.utils.set_random_seed(crc32(request.node.name.encode()) % 2**31)  # the same data on all workers

    def routed(name: str) -> Any:
        def method(model: Any, *values: Any, **options: Any) -> Any:
            if id(model) not in adapters:
                adapters[id(model)] = unisono.keras.Model(model, **settings)
                settings.clear()
            return getattr(adapters[id(model)], name)(*values, **options)

        return method

    for name in ROUTED:
        monkeypatch.setattr(TorchTrainer, name, routed(name))
    yield
    for adapter in adapters.values():
        if digests is not None and adapter.run.is_main:
            weights = b"".join(weight.tobytes() for weight in adapter.get_weights())
            with Path(digests).open("a") as file:
                file.write(f"{request.node.name} {crc32(weights):08x}\n")
        adapter.run.close()
