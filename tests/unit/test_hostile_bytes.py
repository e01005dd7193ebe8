"""Whatever stands in a checkpoint or comes from another worker: a value comes of it, or an error that says so."""

import base64
import json
import os
import resource
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hostile
from forged import forge, state_json
from unisono.checkpoint.codec import DEEPEST, flatten, unflatten
from unisono.checkpoint.snapshot import read_snapshot
from unisono.checkpoint.tensor_bytes import KEPT, is_kept, tensors_of
from unisono.errors import CheckpointError, JobError, JobMismatch, Unreadable
from unisono.membership.rendezvous import Generation
from unisono.plan.split import Split
from unisono.train.group.publisher import packed, unpacked
from unisono.train.group.workers import Workers

pytestmark = pytest.mark.unit

DATA = json.loads((Path(__file__).parents[1] / "hostile_seeds.json").read_text())
SEEDS: list[int] = DATA["seeds"]
CASES: dict[str, int] = DATA["cases"]
ROOM = 2**30
"""Bytes that a test may take besides what its process has."""

LEAVES = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """Whoever asks for more fails: nothing here needs a GiB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def each(kind: str, seed: int, try_one: Callable[[Random], Any]) -> None:
    """All cases of a seed: each ends in a value that is known, or in an error of ours."""
    for number in range(CASES[kind]):
        chance = Random(f"{kind} {seed} {number}")
        try:
            value = try_one(chance)
        except (CheckpointError, JobMismatch, Unreadable):
            continue
        except BaseException as error:
            raise AssertionError(f"{kind}, seed {seed}, case {number}: {error!r}") from error
        require_parameters(value)


def require_parameters(value: Any) -> None:
    """A state is made of what can be kept, down to the last part."""
    kind = type(value)
    if isinstance(value, Tensor):
        assert kind is Tensor
        assert value.dtype in KEPT
        assert value.untyped_storage().nbytes() <= 2**20
        assert value.dtype != torch.bool or not value.numel() or int(value.view(torch.uint8).max()) <= 1
    elif isinstance(value, np.ndarray | np.generic):
        assert is_kept(value.dtype)
        assert value.nbytes <= 2**20
        assert value.dtype.kind == "M" or repr(value)  # of times without a unit NumPy has no words
    elif kind in (dict, OrderedDict, Counter):
        for key, part in value.items():
            require_parameters(key)
            require_parameters(part)
    elif kind in (list, tuple, set, frozenset, deque):
        for part in value:
            require_parameters(part)
    else:
        assert value is None or kind in LEAVES


def test_there_are_twenty_thousand_cases() -> None:
    assert len(SEEDS) * sum(CASES.values()) >= 20_000


@pytest.mark.parametrize("seed", SEEDS)
def test_a_hostile_skeleton_becomes_a_state_or_an_error(seed: int) -> None:
    tensors = hostile.tensors_to_choose()
    each("skeletons", seed, lambda chance: unflatten(hostile.skeleton(chance), tensors))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_state_with_one_part_exchanged_becomes_a_state_or_an_error(seed: int) -> None:
    skeleton, tensors = flatten(hostile.example())
    each("states", seed, lambda chance: unflatten(hostile.changed(chance, skeleton), tensors))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_hostile_safetensors_file_becomes_tensors_or_an_error(seed: int) -> None:
    _, data = hostile.safetensors_of(hostile.example())

    def read(chance: Random) -> Any:
        return tensors_of(hostile.header(chance) if chance.random() < 0.5 else hostile.mutated(chance, data))

    each("tensors", seed, read)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_checkpoint_with_right_digests_and_hostile_files_becomes_a_state_or_an_error(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # thousands take minutes
    skeleton, data = hostile.safetensors_of(hostile.example())
    text = state_json(skeleton, [], {})

    def read(chance: Random) -> Any:
        changes = {"model.safetensors": data, "state.json": text}
        if chance.random() < 0.2:
            changes["manifest.json"] = hostile.mutated(chance, b'{"format": 1, "files": {}, "sha256": ""}')
        name = chance.choice([*changes, "state.json"])
        changes[name] = hostile.mutated(chance, changes[name])
        found = read_snapshot(forge(tmp_path / str(chance.random()), changes))
        return [found.step, found.model, found.optimizer, found.state]

    each("checkpoints", seed, read)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_hostile_value_that_was_made_known_becomes_a_value_or_an_error(seed: int) -> None:
    text = base64.b64decode(packed(hostile.example()))

    def read(chance: Random) -> Any:
        told = hostile.as_text(hostile.changed(chance, json.loads(text)))
        told = hostile.mutated(chance, told) if chance.random() < 0.5 else told
        encoded = base64.b64encode(told)
        try:
            return unpacked((hostile.mutated(chance, encoded) if chance.random() < 0.1 else encoded).decode("latin-1"))
        except JobError:  # somebody made it known that the value is not known
            return None

    each("published", seed, read)


class Told:
    """The part of a transport that a broadcast needs, at whose other end somebody says what it likes.

    Args:
        chance: decides what bytes arrive.
        text: that arrives in place of a JSON value.
    """

    def __init__(self, chance: Random, text: bytes) -> None:
        self._chance = chance
        self._length = chance.choice([*hostile.HUGE[-2:], 2**62, 2**40]) if chance.random() < 0.1 else len(text)
        self._text = text
        self._is_announced = False

    def all_gather(self, row: Tensor) -> Tensor:
        if not self._is_announced:
            self._is_announced = True
            return torch.tensor([row.tolist(), [self._length]])
        theirs = torch.zeros_like(row)
        text = torch.frombuffer(bytearray(self._text or b" "), dtype=torch.uint8)
        theirs[: min(len(text), len(theirs))] = text[: len(theirs)]
        return torch.stack([row, theirs])

    def broadcast(self, tensor: Tensor, source: int) -> None:
        data = bytearray(self._chance.randbytes(tensor.nbytes))
        tensor.view(torch.uint8).copy_(torch.frombuffer(data, dtype=torch.uint8))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_hostile_broadcast_becomes_a_value_or_an_error(seed: int) -> None:
    skeleton, tensors = flatten(hostile.example())
    forms = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()}

    def receive(chance: Random) -> Any:
        text = hostile.as_text(hostile.changed(chance, [skeleton, forms, "ab"]))
        text = hostile.mutated(chance, text) if chance.random() < 0.3 else text
        transport: Any = Told(chance, text)
        return Workers(Generation(1, 0, Split.even(2, 2)), transport).broadcast(None, source=1)

    each("broadcasts", seed, receive)


NESTED: dict[str, Any] = {
    "lists": lambda inner: [inner],
    "objects": lambda inner: {"a": inner},
    "tuples": lambda inner: {"~": ["tuple", [inner]]},
    "dicts": lambda inner: {"~": ["items", [[1, inner]]]},
    "ordered dicts": lambda inner: {"~": ["ordered", {"a": inner}, None]},
    "keys": lambda inner: {"~": ["items", [[inner, 1]]]},
    "kinds": lambda inner: {"~": inner},
}


@pytest.mark.parametrize("wrap", NESTED.values(), ids=NESTED.keys())
@pytest.mark.parametrize("levels", [3 * DEEPEST, 20_000])
def test_what_is_nested_without_end_is_an_error_and_no_overflow(wrap: Callable[[Any], Any], levels: int) -> None:
    skeleton: Any = None
    for _ in range(levels):
        skeleton = wrap(skeleton)

    with pytest.raises(CheckpointError):
        unflatten(skeleton, {})


def test_a_few_names_do_not_stand_for_any_amount_of_memory() -> None:
    tensors = {"a": torch.zeros(2**24, dtype=torch.uint8)}
    skeleton = [{"~": ["array", "|u1", [2**24], "a"]}] * 1000

    found = unflatten(skeleton, tensors)

    assert all(np.shares_memory(found[0], array) for array in found)


@pytest.mark.parametrize(
    "strides", [[0, 0], [1, 1], [2**40, 1], [-1, 1], [1], [1, 1, 1], [3.0, 1], [2**63, 1], "ab"], ids=repr
)
def test_strides_that_leave_the_tensor_are_refused(strides: Any) -> None:
    with pytest.raises(CheckpointError):
        unflatten({"~": ["tensor", "a", strides]}, {"a": torch.zeros(4, 3)})


@pytest.mark.parametrize("name", ["flags", "text"])
@pytest.mark.parametrize("dtype", ["|b1", "<U1"])
def test_bytes_that_are_no_values_of_a_dtype_are_refused(name: str, dtype: str) -> None:
    tensors = hostile.tensors_to_choose()
    shape = [tensors[name].numel() // np.dtype(dtype).itemsize]
    with pytest.raises(CheckpointError, match="neither true nor false|no character"):
        unflatten({"~": ["array", dtype, shape, name]}, tensors)


def test_a_tensor_of_bool_with_other_bytes_is_refused() -> None:
    _, data = hostile.safetensors_of({"flag": torch.tensor([True])})
    with pytest.raises(CheckpointError, match="neither true nor false"):
        tensors_of(data[:-1] + b"\x02")
