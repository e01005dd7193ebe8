"""A run folder has one start of a job at a time, and whoever comes second is told who has it."""

import errno
import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import unisono
from unisono.checkpoint.folder import RunFolder
from unisono.checkpoint.writer import Hold, Writer, WriterOrder
from unisono.errors import JobError
from unisono.launch.outcome import open_folder

pytestmark = pytest.mark.unit

Start = Callable[..., unisono.Run]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def another_process(folder: Path) -> Iterator[None]:
    """Has the folder: a lock belongs to whoever has opened the file, here as there."""
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        json.dump({"term": 4, "pid": 4711, "host": "a", "since": "2026-01-02T03:04:05+00:00"}, lock)
        lock.flush()
        yield


IN_USE = r"in use: process 4711 on host a has held it since 2026-01-02T03:04:05\+00:00\. .*--run-dir"


def test_a_second_start_in_a_folder_says_who_has_it_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "result.json").write_text("{}")
    (tmp_path / "logs" / "rank-0.error.json").write_text("{}")
    with another_process(tmp_path):
        before = contents(tmp_path)
        with pytest.raises(JobError, match=rf"the run folder {re.escape(str(tmp_path))} is {IN_USE}"):
            open_folder(tmp_path, "train")
        assert contents(tmp_path) == before
    open_folder(tmp_path, "train").close()
    assert not (tmp_path / "result.json").exists()


def test_each_start_in_a_folder_has_a_term_one_above_the_one_before(tmp_path: Path) -> None:
    terms = []
    for _ in range(3):
        folder = RunFolder(tmp_path)
        folder.hold()
        terms.append(folder.term)
        folder.close()
    assert terms == [1, 2, 3]
    assert RunFolder(tmp_path).term == 3


@pytest.mark.usefixtures("one_worker")
def test_a_script_without_a_launcher_holds_its_folder_until_its_run_has_ended(start: Start, tmp_path: Path) -> None:
    with another_process(tmp_path / "run"):
        before = contents(tmp_path)
        with pytest.raises(JobError, match=IN_USE):
            start()
        assert contents(tmp_path) == before
    run = start()
    with (tmp_path / "run" / "lock").open() as lock:
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        run.close()
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.usefixtures("one_worker")
def test_a_process_that_begins_again_takes_the_folder_from_its_own_earlier_run(start: Start, tmp_path: Path) -> None:
    start()
    start()
    assert RunFolder(tmp_path / "run").term == 2


@pytest.mark.usefixtures("one_worker")
def test_a_worker_leaves_the_folder_to_its_launcher_and_holds_one_that_its_script_names(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = open_folder(tmp_path / "run", "train")
    monkeypatch.setenv("UNISONO_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("UNISONO_TERM", str(launched.term))
    start(run_dir=None)
    start(run_dir=tmp_path / "run" / "run-2")
    assert RunFolder(tmp_path / "run" / "run-2").term == 0
    start(run_dir=tmp_path / "named")
    assert [RunFolder(tmp_path / name).term for name in ("run", "named")] == [1, 1]


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"term": "x", "pid": []}', '{"term": -3}', "x" * 10**5])
def test_a_damaged_lock_is_no_obstacle_and_its_words_are_not_believed(tmp_path: Path, text: str) -> None:
    (tmp_path / "lock").write_text(text)
    hold = Hold(tmp_path)
    assert hold.term == 1
    assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    hold.release()
    with another_process(tmp_path):
        (tmp_path / "lock").write_text(text)
        with pytest.raises(JobError, match="is in use"):
            Hold(tmp_path)


def test_a_folder_whose_lock_was_removed_is_gone_on_in(tmp_path: Path) -> None:
    for generation in (6, 1):
        folder = open_folder(tmp_path, "train")
        turn = WriterOrder(folder.term, generation)
        folder.written_by(Writer(tmp_path, lambda turn=turn: turn))  # type: ignore[misc]
        folder.metrics.write({"step": generation})
        folder.close()
        (tmp_path / "lock").unlink()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert RunFolder(tmp_path).term == 2


def test_a_folder_of_a_group_can_be_gone_on_in_by_all_of_it(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        folder = open_folder(tmp_path / "run", "train")
        folder.written_by(Writer(folder.path, lambda: WriterOrder(folder.term, 1)))
        folder.metrics.write({"step": 0})
        folder.journal("started")
        folder.close()
    finally:
        os.umask(before)
    names = ("lock", "writer.json", "metrics.jsonl", "journal.jsonl")
    assert {oct((folder.path / name).stat().st_mode & 0o777) for name in names} == {"0o664"}


def test_a_lock_that_is_a_link_leads_nowhere(tmp_path: Path) -> None:
    behind = tmp_path / "behind"
    behind.write_text("another file")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").symlink_to(behind)
    with pytest.raises(JobError, match="cannot be used"):
        open_folder(tmp_path / "run", "train")
    assert behind.read_text() == "another file"


def test_where_the_file_system_has_no_locks_a_job_starts_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(descriptor: Any, *how: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with another_process(tmp_path):
        monkeypatch.setattr(fcntl, "flock", no_locks)
        hold = Hold(tmp_path)
        assert hold.term == 5
        hold.release()
