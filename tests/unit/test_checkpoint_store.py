import errno
import hashlib
import json
import os
import re
import shutil
import stat
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from same_trees import same
from unisono.checkpoint.checkpoint_store import CheckpointStore, load_weights
from unisono.checkpoint.snapshot import FrozenSnapshot, Snapshot
from unisono.checkpoint.writer import Writer, WriterOrder, mark_of, origin
from unisono.errors import CheckpointError, UnisonoWarning

pytestmark = pytest.mark.unit

Events = list[tuple[str, dict[str, Any]]]


def snapshot(step: int, value: float | None = None) -> Snapshot:
    weight = torch.full((3, 4), float(step) if value is None else value)
    return Snapshot(
        step=step,
        model={"weight": weight, "tied": weight, "count": torch.tensor(step)},
        optimizer=[{"state": {0: {"exp_avg": weight / 3}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]}],
        state={"progress": {"step": step}, "best": float("inf"), "average": weight * 2},
    )


@pytest.fixture
def events() -> Events:
    return []


@pytest.fixture
def store(tmp_path: Path, events: Events) -> Iterator[CheckpointStore]:
    opened = CheckpointStore(tmp_path / "checkpoints", keep=3, on_event=lambda name, **f: events.append((name, f)))
    yield opened
    opened.close()


def saved(store: CheckpointStore, *steps: int) -> None:
    for step in steps:
        store.save(snapshot(step))
    store.wait()


def newest(store: CheckpointStore) -> Snapshot:
    found = store.newest()
    assert found is not None
    return found


def folder_of(store: CheckpointStore, step: int) -> Path:
    return store._folder / f"step-{step:08d}"


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store._folder.iterdir())


# --- what is written


def test_a_copy_that_is_not_what_all_workers_held_gets_no_name(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(snapshot(1), snapshot(1).digests())
    store.save(snapshot(2), snapshot(2, value=0.5).digests())
    with pytest.warns(UnisonoWarning, match="checkpoint of step 2 could not be written: .* a bit has flipped"):
        store.close()
    assert store.steps() == [1]


def test_an_interrupt_in_the_last_checkpoint_of_a_process_that_exits_keeps_nobody_waiting(tmp_path: Path) -> None:
    def interrupt(event: str, **fields: object) -> None:
        if fields["step"] == 2:
            raise KeyboardInterrupt

    store = CheckpointStore(tmp_path, on_event=interrupt)
    saved(store, 1)
    store._executor.shutdown()  # type: ignore[union-attr]  # as Python does when it exits
    with pytest.raises(KeyboardInterrupt):
        store.save(snapshot(2))
    store.close()


def test_a_checkpoint_whose_contents_are_not_what_all_workers_held_is_passed_over(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        store.save(snapshot(step), snapshot(step).digests())
    store.close()
    digests = json.loads((folder_of(store, 2) / "manifest.json").read_text())["digests"]
    rewrite_manifest(folder_of(store, 2), digests={**digests, "model": "0" * 16})
    with pytest.warns(UnisonoWarning, match="goes on from step 1, since .* its model is not what all workers held"):
        assert newest(store).step == 1


def test_a_snapshot_comes_back_to_the_last_bit(store: CheckpointStore) -> None:
    saved(store, 5)
    found = newest(store)
    assert same(vars(found), vars(snapshot(5)))
    assert found.model["weight"] is found.model["tied"]


def test_a_checkpoint_is_a_folder_of_files_whose_digests_are_in_its_manifest(store: CheckpointStore) -> None:
    saved(store, 5)
    folder = folder_of(store, 5)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    assert (manifest["format"], manifest["step"]) == (1, 5)
    assert {path.name for path in folder.iterdir()} == {*manifest["files"], "manifest.json"}
    for name, entry in manifest["files"].items():
        data = (folder / name).read_bytes()
        assert entry == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def test_others_may_read_a_checkpoint_as_far_as_the_umask_allows(store: CheckpointStore) -> None:
    mask = os.umask(0o027)
    try:
        saved(store, 5)
    finally:
        os.umask(mask)
    folder = folder_of(store, 5)
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o640}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o750


def test_an_event_tells_of_each_checkpoint_and_its_size(store: CheckpointStore, events: Events) -> None:
    saved(store, 5)
    size = sum(path.stat().st_size for path in folder_of(store, 5).iterdir())
    ((event, fields),) = events
    assert (event, fields.pop("seconds") > 0) == ("checkpoint", True)
    assert fields == {"step": 5, "bytes": size}


class LateWriter(Writer):
    """It writes nothing before it may."""

    may = threading.Event()

    @property
    def about(self) -> dict[str, int]:
        """Asked for when writing begins."""
        assert self.may.wait(30)
        return super().about


def test_updates_after_save_do_not_reach_what_is_written(tmp_path: Path) -> None:
    writer, changing = LateWriter(tmp_path, lambda: WriterOrder(1, 1)), snapshot(5)
    with closing(CheckpointStore(tmp_path / "checkpoints", writer=writer)) as store:
        store.save(changing)
        for values in (changing.model["weight"], changing.optimizer[0]["state"][0]["exp_avg"]):
            values.fill_(-1)
        changing.state["average"].fill_(-1)
        changing.state["progress"]["step"] = -1
        changing.optimizer[0]["param_groups"].clear()
        writer.may.set()
        assert same(vars(newest(store)), vars(snapshot(5)))


def test_a_state_that_cannot_be_kept_is_refused_at_once_and_harms_nothing(store: CheckpointStore) -> None:
    saved(store, 5)
    with pytest.raises(CheckpointError, match=r"meter\.value is a builtins\.object"):
        store.save(Snapshot(6, {}, [], {"meter": {"value": object()}}))
    saved(store, 7)
    assert store.steps() == [5, 7]


def test_the_folder_stays_the_same_when_the_script_changes_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = CheckpointStore(Path("checkpoints"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    saved(store, 5)
    store.close()
    assert (tmp_path / "checkpoints" / "step-00000005").is_dir()


def test_everything_is_on_the_disk_before_it_counts(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: dict[int, int] = {}

    def note(descriptor: int) -> None:
        status = os.fstat(descriptor)
        synced[status.st_ino] = status.st_size

    monkeypatch.setattr(os, "fsync", note)
    saved(store, 5)
    for path in folder_of(store, 5).iterdir():
        assert synced[path.stat().st_ino] == path.stat().st_size
    assert {folder_of(store, 5).stat().st_ino, store._folder.stat().st_ino} <= synced.keys()


# --- which ones stay


def test_the_newest_stay_and_older_ones_go(store: CheckpointStore) -> None:
    saved(store, 1, 2, 3, 4, 5)
    assert store.steps() == [3, 4, 5]
    assert names(store) == ["step-00000003", "step-00000004", "step-00000005"]


def test_steps_are_ordered_as_numbers_beyond_eight_digits(store: CheckpointStore) -> None:
    saved(store, 99_999_999, 100_000_000, 9_999_999_999, 100_000_001)
    assert store.steps() == [99_999_999, 100_000_000, 100_000_001, 9_999_999_999]
    assert newest(store).step == 9_999_999_999


def test_the_same_step_again_takes_the_place_of_the_first(store: CheckpointStore) -> None:
    saved(store, 4, 5)
    store.save(snapshot(5, value=0.5))
    assert same(vars(newest(store)), vars(snapshot(5, value=0.5)))
    assert names(store) == ["step-00000004", "step-00000005"]


def test_one_that_is_about_to_be_replaced_counts_until_the_new_one_is_in_place(store: CheckpointStore) -> None:
    saved(store, 4, 5)
    folder_of(store, 5).rename(store._folder / "step-00000005.old")
    found = newest(store)
    assert (found.step, store.steps()) == (5, [4, 5])
    store.save(snapshot(5, value=0.5))
    assert same(vars(newest(store)), vars(snapshot(5, value=0.5)))
    assert names(store) == ["step-00000004", "step-00000005"]


def test_the_new_one_counts_before_the_one_that_it_replaced(store: CheckpointStore) -> None:
    saved(store, 5)
    shutil.copytree(folder_of(store, 5), store._folder / "aside")
    store.save(snapshot(5, value=0.5))
    store.wait()
    (store._folder / "aside").rename(store._folder / "step-00000005.old")
    found = newest(store)
    assert found.model["weight"][0, 0] == 0.5
    saved(store, 5)
    assert names(store) == ["step-00000005"]


def test_with_keep_1_a_checkpoint_before_a_damaged_newer_one_is_not_removed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    saved(store, 20)
    shutil.copytree(tmp_path / "step-00000020", tmp_path / "step-00000030")
    (tmp_path / "step-00000030" / "manifest.json").unlink()
    saved(store, 25)
    assert store.steps() == [25, 30]
    with pytest.warns(UnisonoWarning, match="goes on from step 25"):
        assert newest(store).step == 25
    store.close()


def test_a_failure_to_remove_an_old_one_does_not_harm_the_new_one(
    store: CheckpointStore, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(store, 1, 2, 3)

    def refuse(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    store.save(snapshot(4))
    with pytest.warns(UnisonoWarning, match=r"step 4 is written, but an older one could not be removed.*denied"):
        store.wait()
    assert [name for name, _ in events[-2:]] == ["checkpoint", "checkpoint not removed"]
    assert newest(store).step == 4


def test_a_checkpoint_that_was_moved_elsewhere_and_linked_loses_only_its_link(
    store: CheckpointStore, tmp_path: Path
) -> None:
    saved(store, 1)
    folder_of(store, 1).rename(tmp_path / "elsewhere")
    folder_of(store, 1).symlink_to(tmp_path / "elsewhere")
    assert newest(store).step == 1
    saved(store, 2, 3, 4)
    assert names(store) == ["step-00000002", "step-00000003", "step-00000004"]
    assert (tmp_path / "elsewhere" / "manifest.json").is_file()


def test_names_that_are_no_checkpoints_are_let_alone(store: CheckpointStore) -> None:
    saved(store, 1)
    for name in ("step-5", "step-00000009.bak", "step-\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0667", "step-best"):
        (store._folder / name).mkdir()
    (store._folder / "step-00000008").write_text("a file")
    assert store.steps() == [1]
    assert newest(store).step == 1


# --- when writing fails


def full_disk(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_warned_of_and_the_older_checkpoints_stay_whole(
    store: CheckpointStore, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(store, 1, 2, 3)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full_disk)
        store.save(snapshot(4))
        with pytest.warns(UnisonoWarning, match=r"checkpoint of step 4 could not be written: .*No space left"):
            store.wait()
    assert events[-1][0] == "checkpoint failed"
    assert events[-1][1]["step"] == 4
    assert names(store) == ["step-00000001", "step-00000002", "step-00000003"]
    assert same(vars(newest(store)), vars(snapshot(3)))
    saved(store, 5)
    assert store.steps() == [2, 3, 5]


def test_a_failed_write_is_reported_by_the_next_save_on_the_thread_that_calls_it(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full_disk)
        store.save(snapshot(1))
        pending = store._pending
        assert pending is not None
        pending.result(30)
    with pytest.warns(UnisonoWarning, match="step 1 could not be written"):
        store.save(snapshot(2))
    store.wait()
    assert store.steps() == [2]


def test_a_failure_of_the_last_save_is_reported_by_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    monkeypatch.setattr(os, "fsync", full_disk)
    store.save(snapshot(1))
    with pytest.raises(UnisonoWarning, match="step 1 could not be written"), warnings.catch_warnings():
        warnings.simplefilter("error")
        store.close()
    assert not any("unisono-checkpoint" in thread.name for thread in threading.enumerate())
    store.close()


def test_a_folder_that_cannot_be_made_is_a_failed_write_and_no_end_of_training(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    store = CheckpointStore(tmp_path / "checkpoints")
    store.save(snapshot(1))
    with pytest.warns(UnisonoWarning, match="could not be written"):
        store.close()


def test_an_error_of_ours_is_raised_and_not_taken_for_a_full_disk(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(descriptor: int) -> None:
        raise AssertionError("broken")

    monkeypatch.setattr(os, "fsync", broken)
    store.save(snapshot(1))
    with pytest.raises(AssertionError, match="broken"):
        store.wait()
    assert names(store) == []


# --- what dead writers left


def leftover(folder: Path, pid: int, host: str) -> Path:
    path = folder / f".tmp-{pid}-0badcafe-{host}"
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"half of it")
    return path


NO_PID = 2**30  # beyond any system's largest


@pytest.mark.parametrize(
    ("pid", "stays"),
    [(NO_PID, False), (os.getpid(), False), (os.getppid(), True)],
    ids=["of the dead", "of our number, as each start in a container has", "of the living"],
)
def test_what_a_dead_writer_left_is_removed_at_the_next_start(pid: int, stays: bool, tmp_path: Path) -> None:
    left = leftover(tmp_path, pid, origin())
    CheckpointStore(tmp_path)
    assert left.exists() == stays


def test_what_a_container_of_the_same_name_has_under_way_is_let_alone(tmp_path: Path) -> None:
    """Its process has a number that is nobody's here."""
    left = CheckpointStore(tmp_path)._temporary().name.replace(f"-{os.getpid()}-", f"-{NO_PID}-")
    ours, theirs = (
        tmp_path / left.replace(origin(), mark) for mark in (origin(), mark_of("the same kernel", 4026531836))
    )
    for one in (ours, theirs):
        one.mkdir()
    CheckpointStore(tmp_path)
    assert (ours.exists(), theirs.exists()) == (False, True)


def test_kernels_their_starts_and_namespaces_of_processes_are_told_apart() -> None:
    marks = {mark_of("a", 1), mark_of("a", 2), mark_of("b", 1), origin()}
    assert len(marks) == 4
    assert all(re.fullmatch("[0-9a-f]{16}", mark) for mark in marks)


def test_what_another_host_has_under_way_is_let_alone_until_it_is_silent_for_an_hour(tmp_path: Path) -> None:
    busy, silent = leftover(tmp_path, NO_PID, "other-host.example"), leftover(tmp_path, NO_PID, "third")
    for path in (silent / "model.safetensors", silent):
        os.utime(path, (0, path.stat().st_mtime - 3700))
    os.utime(busy, (0, busy.stat().st_mtime - 3700))  # its newest file counts
    (notes := tmp_path / ".tmp-notes").mkdir()
    CheckpointStore(tmp_path)
    assert busy.exists()
    assert notes.exists()  # which nobody here has made
    assert not silent.exists()


# --- damage

Damage = Callable[[Path], object]


def rewrite_manifest(folder: Path, **fields: Any) -> None:
    """Forge a manifest that is whole in itself."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text()) | fields
    manifest.pop("sha256")
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(manifest | {"sha256": digest}))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE: dict[str, tuple[Damage, str]] = {
    "cut off": (lambda folder: cut(folder / "model.safetensors"), r"model\.safetensors has \d+ bytes instead of \d+"),
    "bit flipped": (
        lambda folder: flip(folder / "optimizer.safetensors"),
        r"optimizer\.safetensors has another sha256",
    ),
    "file missing": (
        lambda folder: (folder / "state.safetensors").unlink(),
        r"state\.safetensors cannot be read: No such",
    ),
    "manifest missing": (lambda folder: (folder / "manifest.json").unlink(), r"has no manifest\.json"),
    "manifest garbage": (
        lambda folder: (folder / "manifest.json").write_bytes(b"\xff{"),
        r"manifest\.json cannot",
    ),
    "manifest cut off": (lambda folder: cut(folder / "manifest.json"), r"manifest\.json cannot be read"),
    "manifest without a file": (
        lambda folder: rewrite_manifest(folder, files={}),
        r"manifest\.json does not list state\.json",
    ),
    "other format": (
        lambda folder: rewrite_manifest(folder, format=2),
        r"has format 2, this version .* reads format 1",
    ),
    "format of escape codes": (
        lambda folder: rewrite_manifest(folder, format="\x1b[31m" + 5000 * "x"),
        r"has format '\\x1b\[31mx{1,200}\.\.\.x{1,200}', this version",
    ),
}


@pytest.mark.parametrize(("damage", "words"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_named_and_the_checkpoint_before_it_is_used(
    store: CheckpointStore, events: Events, damage: Damage, words: str
) -> None:
    saved(store, 1, 2)
    damage(folder_of(store, 2))
    with pytest.warns(UnisonoWarning, match=f"(?s)goes on from step 1, since .*step-00000002.*{words}") as caught:
        found = newest(store)
    assert len(caught) == 1
    assert same(vars(found), vars(snapshot(1)))
    assert events[-1][0] == "checkpoint damaged"
    assert events[-1][1]["step"] == 2


def test_when_all_are_damaged_the_error_lists_each(store: CheckpointStore) -> None:
    saved(store, 1, 2, 3)
    cut(folder_of(store, 1) / "model.safetensors")
    flip(folder_of(store, 2) / "optimizer.safetensors")
    (folder_of(store, 3) / "manifest.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        store.newest()
    lines = str(caught.value).splitlines()
    for line, name in zip(lines[1:4], ("step-00000003", "optimizer.safetensors", "model.safetensors"), strict=True):
        assert name in line


def test_where_there_is_none_there_is_none(store: CheckpointStore, tmp_path: Path) -> None:
    assert store.newest() is None
    assert store.steps() == []
    assert not (tmp_path / "checkpoints").exists()


def test_a_flipped_bit_anywhere_in_the_manifest_is_blamed_on_the_manifest(store: CheckpointStore) -> None:
    saved(store, 1)
    path = folder_of(store, 1) / "manifest.json"
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        try:
            unchanged = json.loads(path.read_bytes()) == json.loads(whole)
        except ValueError:
            unchanged = False
        if not unchanged:
            with pytest.raises(CheckpointError, match=r"manifest\.json|has format"):
                load_weights(folder_of(store, 1))


def test_contents_that_do_not_fit_together_are_damage_too(store: CheckpointStore) -> None:
    saved(store, 1)
    text = folder_of(store, 1) / "state.json"
    text.write_text(text.read_text().replace('"weight"', '"height"'))
    manifest = json.loads((folder_of(store, 1) / "manifest.json").read_text())
    manifest["files"]["state.json"] |= {"sha256": hashlib.sha256(text.read_bytes()).hexdigest()}
    rewrite_manifest(folder_of(store, 1), **manifest)
    with pytest.raises(CheckpointError, match=r"its model cannot be read: there is no tensor 'height'"):
        store.newest()


# --- weights for inference


def test_weights_come_from_a_run_folder_its_checkpoints_or_one_of_them(store: CheckpointStore, tmp_path: Path) -> None:
    saved(store, 1, 2)
    for place in (tmp_path, tmp_path / "checkpoints"):
        assert same(dict(load_weights(place)), snapshot(2).model)
    assert load_weights(folder_of(store, 1))["count"] == 1


def test_weights_come_from_a_copy_with_another_name_and_through_links(store: CheckpointStore, tmp_path: Path) -> None:
    saved(store, 1)
    shutil.copytree(folder_of(store, 1), tmp_path / "best — ß 🎻")
    (tmp_path / "link").symlink_to(tmp_path / "best — ß 🎻")
    assert load_weights(tmp_path / "link")["count"] == 1


def test_weights_need_only_the_files_of_the_model(store: CheckpointStore) -> None:
    saved(store, 1)
    (folder_of(store, 1) / "optimizer.safetensors").unlink()
    (folder_of(store, 1) / "state.safetensors").unlink()
    assert load_weights(folder_of(store, 1))["count"] == 1


def test_weights_of_a_damaged_newest_come_from_the_one_before_it(store: CheckpointStore, tmp_path: Path) -> None:
    saved(store, 1, 2)
    cut(folder_of(store, 2) / "model.safetensors")
    with pytest.warns(UnisonoWarning, match="goes on from step 1"):
        assert load_weights(tmp_path)["count"] == 1
    with pytest.raises(CheckpointError, match="bytes instead of"):
        load_weights(folder_of(store, 2))


@pytest.mark.parametrize(
    ("name", "words"),
    [("nowhere", "does not exist"), ("empty", "holds no checkpoint"), ("model.safetensors", "is a file")],
)
def test_a_path_without_weights_is_named_with_what_to_give(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"{name} {words}.*: name a run folder"):
        load_weights(tmp_path / name)


# -- weights that are not finite --------------------------------------------------------------------------------------


def spoiled(step: int, name: str = "weight") -> Snapshot:
    found = {"weight": torch.zeros(3), "mask": torch.full((2,), -torch.inf), "mean": torch.zeros(2)}
    found[name] = torch.tensor([1.0, torch.nan if name != "weight" else torch.inf])
    return Snapshot(step, found, [{"state": {}}], {"trained": ["weight"]})


def healthy(step: int) -> Snapshot:
    return Snapshot(step, {**spoiled(0).model, "weight": torch.zeros(2)}, [{"state": {}}], {"trained": ["weight"]})


def test_checkpoints_with_weights_that_are_not_finite_do_not_push_out_the_newest_healthy_one(tmp_path: Path) -> None:
    told: Events = []
    with closing(CheckpointStore(tmp_path, keep=2, on_event=lambda event, **of: told.append((event, of)))) as store:
        for one in (healthy(1), healthy(2), spoiled(3), spoiled(4, "mean"), spoiled(5)):
            store.save(one)
        store.wait()
        assert store.steps() == [2, 4, 5]
        manifests = [json.loads((folder_of(store, step) / "manifest.json").read_text()) for step in (2, 4, 5)]
        assert [one["not_finite"] for one in manifests] == [
            {"tensors": 0, "first": []}, {"tensors": 1, "first": ["mean"]}, {"tensors": 1, "first": ["weight"]},
        ]  # fmt: skip
        with pytest.warns(
            UnisonoWarning, match="goes on from step 2, since .*step-00000004 holds .* NaN or infinite: 'mean'"
        ):
            assert newest(store).step == 2
        assert [fields["step"] for event, fields in told if event == "checkpoint not finite"] == [4, 5]


def test_where_none_is_healthy_the_newest_is_used_and_manifests_that_say_nothing_are_healthy(tmp_path: Path) -> None:
    with closing(CheckpointStore(tmp_path, keep=2)) as store:
        for one in (spoiled(1), spoiled(2)):
            store.save(one)
        store.wait()
        assert newest(store).step == 2
        rewrite_manifest(folder_of(store, 1), not_finite=None)
        with pytest.warns(UnisonoWarning, match="goes on from step 1"):
            assert newest(store).step == 1


def test_names_of_a_forged_manifest_move_no_cursor_and_fill_no_terminal(tmp_path: Path) -> None:
    forged = {"tensors": 10**6, "first": ["\x1b[2Jweight\n", "w" * 10**5] * 10**3}
    with closing(CheckpointStore(tmp_path)) as store:
        for one in (healthy(1), spoiled(2)):
            store.save(one)
        store.wait()
        rewrite_manifest(folder_of(store, 2), not_finite=forged)
        with pytest.warns(UnisonoWarning, match="goes on from step 1") as told:
            store.newest()
        words = str(told[0].message)
        assert words.isprintable()
        assert len(words) < 2000


def test_a_bit_that_flips_in_the_copy_of_registered_objects_keeps_a_checkpoint_from_its_name() -> None:
    average = torch.arange(8.0)
    frozen = FrozenSnapshot.of(Snapshot(3, {}, [], {"registered": {"average": {"values": average}}}))
    frozen.require_verified()
    next(iter(frozen.tensors["state"].values()))[2] += 1
    with pytest.raises(CheckpointError, match="registered objects"):
        frozen.require_verified()
