"""Modules come back from a checkpoint with all that their ``state_dict`` says."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import unisono
from kept_states import captured
from same_trees import same
from unisono.checkpoint.checkpoint_store import CheckpointStore
from unisono.checkpoint.snapshot import Snapshot
from unisono.errors import CheckpointError
from unisono.train.model.prepared import Prepared
from unisono.train.state.model_state import restore_models

pytestmark = pytest.mark.unit


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointStore]:
    opened = CheckpointStore(tmp_path / "checkpoints")
    yield opened
    opened.close()


def prepared(model: Any) -> Prepared:
    modules = model if isinstance(model, list) else [model]
    return Prepared.of(model, [optim.SGD([p for module in modules for p in module.parameters()], 0.1)])


def kept(store: CheckpointStore, model: Any) -> Snapshot:
    store.save(captured(prepared(model)))
    found = store.newest()
    assert found is not None
    return found


class Versioned(nn.Linear):
    """Like several networks of torchvision: refuses weights that do not say which version they are of."""

    _version = 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *others: Any) -> None:
        if local_metadata.get("version") != self._version:
            raise ValueError(f"version {local_metadata.get('version')}")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)


class Remembering(nn.Linear):
    """Keeps something besides tensors."""

    notes: Any = ("none",)

    def get_extra_state(self) -> Any:
        return self.notes

    def set_extra_state(self, state: Any) -> None:
        self.notes = state


def test_a_module_learns_which_version_its_weights_are_of(store: CheckpointStore, tmp_path: Path) -> None:
    model, again = nn.Sequential(Versioned(2, 2)), nn.Sequential(Versioned(2, 2))
    restore_models(prepared(again), kept(store, model))
    assert same(again.state_dict(), model.state_dict())
    assert same(unisono.load(nn.Sequential(Versioned(2, 2)), tmp_path).state_dict(), model.state_dict())


def test_what_a_module_keeps_besides_tensors_comes_back(store: CheckpointStore, tmp_path: Path) -> None:
    model, again = nn.Sequential(Remembering(2, 2)), nn.Sequential(Remembering(2, 2))
    notes = {"seen": ("a", 3), "scale": torch.tensor(2.0)}
    model[0].set_extra_state(notes)
    restore_models(prepared(again), kept(store, model))
    assert same(again[0].notes, notes)
    assert same(unisono.load(nn.Sequential(Remembering(2, 2)), tmp_path)[0].notes, notes)


def test_several_modules_are_loaded_as_they_were_prepared(store: CheckpointStore, tmp_path: Path) -> None:
    pair = [nn.Linear(2, 3), nn.BatchNorm1d(3)]
    kept(store, pair)
    again = unisono.load([nn.Linear(2, 3), nn.BatchNorm1d(3)], tmp_path)
    assert all(same(ours.state_dict(), theirs.state_dict()) for ours, theirs in zip(again, pair, strict=True))
    with pytest.raises(CheckpointError, match="holds another model"):
        unisono.load(nn.Linear(2, 3), tmp_path)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: nn.Linear(2, 4), r"weight: float32\[4, 2\] here, float32\[3, 2\] in the checkpoint"),
        (lambda: nn.Linear(2, 3).double(), r"weight: float64\[3, 2\] here, float32\[3, 2\] in the checkpoint"),
        (lambda: nn.Linear(2, 3, bias=False), r"bias: absent here, float32\[3\] in the checkpoint"),
    ],
    ids=["shape", "dtype", "names"],
)
def test_another_model_is_refused_with_the_first_difference(store: CheckpointStore, other: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        restore_models(prepared(other()), kept(store, nn.Linear(2, 3)))


def test_tied_weights_are_on_disk_once(store: CheckpointStore, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    model[1].weight = model[0].weight
    kept(store, model)
    size = (tmp_path / "checkpoints" / "step-00000000" / "model.safetensors").stat().st_size
    assert 64 * 64 * 4 < size < 64 * 64 * 5
    untied = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    assert same(unisono.load(untied, tmp_path).state_dict(), model.state_dict())
