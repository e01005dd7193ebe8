"""A plug-in of pytest for Keras' own tests: with ``--workers N`` their models train on a run of Unisono."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from keras.src.backend.torch.trainer import TorchTrainer

import unisono

ROUTED = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, help="the workers of a run; 0 for Keras alone")


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
    if not request.config.getoption("--workers"):
        yield
        return
    adapters: dict[int, Any] = {}
    settings: dict[str, Any] = {"run_dir": tmp_path / "run", "shards": 1}  # for the first of a test's models

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
        adapter.run.close()
