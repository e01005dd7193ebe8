"""Checkpoints that several processes write together, each a share: here threads, whose stores meet at a barrier."""

import errno
import json
import os
import shutil
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from forged import forge, safetensors_of, state_json
from same_trees import same
from unisono.checkpoint.checkpoint_store import CheckpointStore
from unisono.checkpoint.snapshot import Snapshot, read_model, read_snapshot, read_some
from unisono.checkpoint.tensor_bytes import Share, copied, mapped_tensors, read_tensors
from unisono.errors import CheckpointError, UnisonoWarning, WorkerLost

pytestmark = pytest.mark.unit

COUNT = 3


def snapshot(step: int) -> Snapshot:
    """Seven tensors, of which two are one and the same."""
    model = {name: torch.randn(number + 1, 3) for number, name in enumerate("abcde")}
    model["tied"] = model["a"]
    return Snapshot(step, model, [{"state": {0: {"exp_avg": torch.randn(4)}}}], {"step": step, "mean": torch.ones(2)})


def hollow(whole: Snapshot, rank: int) -> tuple[Snapshot, Callable[[Tensor], Tensor | None]]:
    """A process's share: each tensor is on the meta device but on one of them."""
    owners = {id(value): number % COUNT for number, value in enumerate(whole.model.values())}
    places = {id(value): value.to("meta") for value in whole.model.values() if owners[id(value)] != rank}
    model = {name: places.get(id(value), value) for name, value in whole.model.items()}
    ours = {value.data_ptr() for value in whole.model.values() if owners[id(value)] == rank}

    def copy(tensor: Tensor) -> Tensor | None:
        is_ours = tensor.data_ptr() in ours or (rank == 0 and not any(tensor is each for each in places.values()))
        return copied(tensor) if is_ours else None

    return Snapshot(whole.step, model, whole.optimizer, whole.state), copy


class Together:
    """The stores of some processes, and how they meet."""

    def __init__(self, folder: Path) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._told: list[Any] = [None] * COUNT
        self._barrier = threading.Barrier(COUNT)
        self.stores = [
            CheckpointStore(folder, on_event=lambda event, **about: self.events.append((event, about)))
            for _ in range(COUNT)
        ]

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._told[rank] = json.loads(json.dumps(value))
        try:
            self._barrier.wait(30)
            told = list(self._told)
            self._barrier.wait(30)
        except threading.BrokenBarrierError:
            raise WorkerLost("another device is gone") from None
        return told

    def lose_one(self) -> None:
        self._barrier.abort()

    def save(self, whole: Snapshot) -> list[str]:
        """Save it; returns what each store warns of."""

        def one(rank: int) -> None:
            own, copy = hollow(whole, rank)
            self.stores[rank].save(own, share=Share(rank, copy, lambda value: self.gather(rank, value)))

        with warnings.catch_warnings(record=True) as caught, ThreadPoolExecutor(COUNT) as pool:
            warnings.simplefilter("always")
            list(pool.map(one, range(COUNT)))
            for store in self.stores:
                store.wait()
        return [str(each.message) for each in caught]

    def close(self) -> None:
        for store in self.stores:
            store.close()


@pytest.fixture
def together(tmp_path: Path) -> Any:
    found = Together(tmp_path)
    yield found
    found.close()


def test_each_process_writes_its_share_and_any_reads_all(together: Together, tmp_path: Path) -> None:
    whole = snapshot(5)
    assert together.save(whole) == []
    folder = tmp_path / "step-00000005"
    assert same(vars(read_snapshot(folder)), vars(whole))
    assert same(read_model(folder), whole.model)
    files = {path.name for path in folder.iterdir()}
    assert files >= {"model.safetensors", "model-1.safetensors", "model-2.safetensors", "optimizer.safetensors"}
    assert files.isdisjoint({"optimizer-1.safetensors", "state-1.safetensors"})
    assert [event for event, _ in together.events] == ["checkpoint"]


def test_what_a_process_reads_are_copies_of_what_it_wants(together: Together, tmp_path: Path) -> None:
    whole = snapshot(5)
    together.save(whole)

    def cut(found: Snapshot) -> Snapshot:
        return Snapshot(found.step, {"e": found.model["e"][1:3]}, [], {})

    found = read_some(tmp_path / "step-00000005", cut)
    assert found.model["e"].untyped_storage().nbytes() == 24
    shutil.rmtree(tmp_path / "step-00000005")
    found.model["e"].add_(1)
    assert torch.equal(found.model["e"], whole.model["e"][1:3] + 1)


def test_a_checkpoint_that_a_running_job_removes_while_it_is_read_is_passed_over(tmp_path: Path) -> None:
    store, whole = CheckpointStore(tmp_path), snapshot(5)
    store.save(whole, verified=whole.digests())
    store.save(replace(whole, step=6), verified=whole.digests())
    store.wait()

    def read(folder: Path) -> Snapshot:
        def removed(path: Path) -> dict[str, torch.Tensor]:
            if path.name == "state.safetensors" and folder.name.endswith("6"):  # the last of its files
                shutil.rmtree(folder)
            return read_tensors(path)

        return read_snapshot(folder, removed)

    found = store.newest(read)
    store.close()
    assert found is not None
    assert found.step == 5


@pytest.mark.parametrize("rank", range(COUNT))
def test_a_disk_that_is_full_for_one_of_them_leaves_the_older_checkpoint(
    rank: int, together: Together, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together.save(snapshot(5))
    name = f"model-{rank}.safetensors" if rank else "model.safetensors"
    full = next((tmp_path / "step-00000005").glob(name)).name
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().name == full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fsync)
        (said,) = together.save(snapshot(6))
    assert "step 6 could not be written" in said
    assert "No space left" in said
    assert (f"device {rank} of its worker" in said) == (rank > 0)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]
    assert together.save(snapshot(7)) == []
    assert together.stores[1].steps() == [5, 7]


def test_a_process_that_is_gone_ends_the_save_of_the_others(together: Together, tmp_path: Path) -> None:
    together.save(snapshot(5))
    together.lose_one()
    with pytest.raises(WorkerLost):
        together.save(snapshot(6))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


def test_a_state_that_one_of_them_cannot_keep_is_refused_on_all(together: Together, tmp_path: Path) -> None:
    whole = snapshot(5)

    def one(rank: int) -> str:
        own, copy = hollow(whole, rank)
        own.state["meter"] = object() if rank == 0 else 0
        with pytest.raises(CheckpointError) as refused:
            together.stores[rank].save(
                Snapshot(5, own.model, own.optimizer, {**own.state, "meter": object() if rank == 0 else 0}),
                share=Share(rank, copy, lambda value: together.gather(rank, value)),
            )
        return str(refused.value)

    with ThreadPoolExecutor(COUNT) as pool:
        said = list(pool.map(one, range(COUNT)))
    assert said[0].startswith("meter is a builtins.object")
    assert all(each.startswith("device 0 of its worker: meter is") for each in said[1:])


def test_a_tensor_that_nobody_writes_or_two_is_no_checkpoint(together: Together, tmp_path: Path) -> None:
    whole = snapshot(5)
    for copies, words in ((lambda tensor: None, "by 0 devices"), (copied, "by 3 devices")):

        def one(rank: int, copies: Any = copies) -> None:
            share = Share(rank, copies, lambda value: together.gather(rank, value))
            together.stores[rank].save(whole, share=share)

        with ThreadPoolExecutor(COUNT) as pool:
            list(pool.map(one, range(COUNT)))
        with pytest.warns(UnisonoWarning, match=f"a of its model was written {words}"):
            together.close()
        assert not list(tmp_path.iterdir())


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    data = safetensors_of({"a": torch.ones(2)})
    text = state_json({"a": {"~": ["tensor", "a"]}}, [], {})
    changes = {"model.safetensors": data, "model-7.safetensors": data, "state.json": text}
    with pytest.raises(CheckpointError, match=r"'a' is in model-7\.safetensors and in another file"):
        read_snapshot(forge(tmp_path / "forged", changes))


@pytest.mark.parametrize("name", ["model-0.safetensors", "model-01.safetensors", "../model-1.safetensors", "model-1"])
def test_files_of_other_names_are_let_alone(name: str, tmp_path: Path) -> None:
    text = state_json({"a": {"~": ["tensor", "a"]}}, [], {})
    data = safetensors_of({"a": torch.ones(2)})
    with pytest.raises(CheckpointError, match="there is no tensor 'a'"):
        read_snapshot(forge(tmp_path / "forged", {name: data, "state.json": text}))


def test_tensors_of_a_file_are_mapped_so_that_no_memory_is_charged_for_them(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"weight": torch.arange(4.0)}, path)
    tensors = mapped_tensors(path)
    (line,) = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    assert line.split()[1] == "r--s"  # a private mapping could not be larger than the machine's memory
    assert tensors["weight"].tolist() == [0.0, 1.0, 2.0, 3.0]
