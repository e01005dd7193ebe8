"""A worker that was cut off writes nothing into the run folder of a job that goes on elsewhere."""

import fcntl
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from unisono.checkpoint.checkpoint_store import CheckpointStore
from unisono.checkpoint.folder import RunFolder
from unisono.checkpoint.snapshot import Snapshot
from unisono.checkpoint.writer import Writer, WriterOrder
from unisono.errors import LaunchError, Superseded, UnisonoWarning
from unisono.launch.outcome import JobEnd, open_folder, write_end

pytestmark = pytest.mark.unit

CUT_OFF = "no word from the coordinator for 150.2 s, so the job may go on without this worker"


class LateWriter(Writer):
    """It puts nothing in place before it may."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.may = threading.Event()

    @contextmanager
    def placing(self) -> Iterator[None]:
        assert self.may.wait(20)
        with super().placing():
            yield


class Worker:
    """The main worker of a generation, as it sees itself."""

    def __init__(self, path: Path, term: int, generation: int, kind: type[Writer] = Writer, **options: Any) -> None:
        self.turn, self.away = WriterOrder(term, generation), ""
        self.folder = RunFolder(path)
        self.writer = kind(path, lambda: self.turn, lambda: self.away, **options)
        self.folder.written_by(self.writer)
        self._store: CheckpointStore | None = None

    @property
    def store(self) -> CheckpointStore:
        if self._store is None:
            self._store = CheckpointStore(self.folder.checkpoints, writer=self.folder.writer)
        return self._store

    def save(self, step: int, value: float) -> None:
        self.store.save(Snapshot(step, {"weight": torch.full((2,), value)}, [], {}))
        self.store.wait()

    def close(self) -> None:
        self.folder.close()
        if self._store is not None:
            self._store.close()


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Any]:
    made: list[Worker] = []

    def make(term: int, generation: int, *args: Any, **options: Any) -> Worker:
        made.append(Worker(tmp_path, term, generation, *args, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def lines(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (path / "metrics.jsonl").read_text().splitlines()]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("later", [WriterOrder(1, 6), WriterOrder(2, 1), WriterOrder(2, 6)], ids=str)
def test_two_halves_of_a_job_that_write_into_one_folder_leave_what_the_later_one_wrote(
    workers: Any, tmp_path: Path, later: WriterOrder
) -> None:
    cut_off, goes_on = workers(1, 5), workers(later.term, later.generation)
    cut_off.folder.metrics.write({"step": 0})
    cut_off.save(1, 1.0)
    goes_on.folder.metrics.write({"step": 1})
    goes_on.save(2, 2.0)
    before = contents(tmp_path)
    who = f"process {os.getpid()} on host .*, in generation {later.generation} of start {later.term} of the job"
    writes: list[Callable[[], Any]] = [
        lambda: cut_off.folder.metrics.write({"step": 1}),
        lambda: cut_off.folder.metrics.truncate_after(0),
        lambda: cut_off.save(2, 3.0),
        lambda: cut_off.folder.write_result({"exit_code": 0}),
        lambda: cut_off.folder.ready(1.0),
    ]
    for write in writes:
        with pytest.raises(Superseded, match=f"is written by {who}; this worker, of generation 5 of start 1"):
            write()
    cut_off.folder.journal("finished")
    assert contents(tmp_path) == before
    goes_on.folder.metrics.write({"step": 2})
    goes_on.folder.write_result({"exit_code": 0})
    assert lines(tmp_path) == [0, 1, 2]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["term"], result["generation"]) == (later.term, later.generation)


def test_manifests_say_in_whose_turn_they_were_written_and_are_read_as_ever(workers: Any) -> None:
    worker = workers(3, 7)
    worker.save(4, 2.0)
    manifest = json.loads((worker.folder.checkpoints / "step-00000004" / "manifest.json").read_text())
    assert (manifest["term"], manifest["generation"]) == (3, 7)
    found = worker.store.newest()
    assert found is not None
    assert found.model["weight"].tolist() == [2.0, 2.0]


def test_a_worker_writes_on_when_its_generation_is_another(workers: Any, tmp_path: Path) -> None:
    worker = workers(1, 1)
    for generation in (1, 2, 5):
        worker.turn = WriterOrder(1, generation)
        worker.folder.metrics.write({"step": generation})
        worker.save(generation, 1.0)
    assert lines(tmp_path) == [1, 2, 5]
    assert worker.store.steps() == [1, 2, 5]


def test_a_member_that_leaves_finishes_its_checkpoint_while_the_others_go_on(workers: Any) -> None:
    leaves, stays = workers(1, 1, LateWriter), workers(1, 2)
    leaves.store.save(Snapshot(1, {"weight": torch.ones(1)}, [], {}))
    stays.folder.metrics.write({"step": 1})
    leaves.writer.may.set()
    leaves.store.wait()
    assert leaves.store.steps() == [1]


def test_a_checkpoint_under_way_when_the_job_is_started_again_elsewhere_is_not_put_in_place(workers: Any) -> None:
    cut_off, goes_on = workers(1, 1, LateWriter), workers(2, 2)
    cut_off.store.save(Snapshot(1, {"weight": torch.ones(1)}, [], {}))
    goes_on.folder.metrics.write({"step": 0})
    cut_off.writer.may.set()
    with pytest.warns(UnisonoWarning, match="the checkpoint of step 1 was not written: .* in generation 2 of start 2"):
        cut_off.store.wait()
    assert cut_off.store.steps() == []
    assert not list(cut_off.folder.checkpoints.glob(".tmp-*"))


# -- cut off, before anybody else writes


def test_whoever_hears_nothing_of_the_coordinator_writes_nothing_and_says_why_once(
    workers: Any, tmp_path: Path
) -> None:
    worker = workers(1, 1)
    worker.folder.metrics.write({"step": 0})
    worker.away = CUT_OFF
    before = contents(tmp_path)

    def write() -> None:
        worker.folder.metrics.write({"step": 1})
        worker.folder.metrics.write({"step": 2})
        worker.save(2, 1.0)
        worker.folder.write_result({"exit_code": 0})

    with pytest.warns(UnisonoWarning) as said:
        write()
    words = [str(one.message) for one in said]
    assert sum("no checkpoint, no result and no metrics are written" in one for one in words) == 1
    assert any(one == f"no checkpoint of step 2 is written: {CUT_OFF}" for one in words)
    assert {name: text for name, text in contents(tmp_path).items() if name != "journal.jsonl"} == before
    with pytest.raises(LaunchError, match="no word from the coordinator"):
        worker.folder.ready(0.1)


def test_lines_that_waited_are_written_when_the_coordinator_is_heard_of_again(workers: Any, tmp_path: Path) -> None:
    worker = workers(1, 1)
    worker.away = CUT_OFF
    with pytest.warns(UnisonoWarning, match="no metrics are written"):
        worker.folder.metrics.write({"step": 0})
    for step in (1, 2):
        worker.folder.metrics.write({"step": step})
    assert not (tmp_path / "metrics.jsonl").exists()
    worker.away = ""
    worker.folder.ready(0.1)
    worker.folder.metrics.write({"step": 3})
    assert lines(tmp_path) == [0, 1, 2, 3]


def test_lines_that_waited_are_not_written_if_the_job_went_on_meanwhile(workers: Any, tmp_path: Path) -> None:
    cut_off, goes_on = workers(1, 1), workers(1, 2)
    cut_off.away = CUT_OFF
    with pytest.warns(UnisonoWarning, match="no metrics are written"):
        cut_off.folder.metrics.write({"step": 0})
    goes_on.folder.metrics.write({"step": 0})
    cut_off.away = ""
    with pytest.raises(Superseded):
        cut_off.folder.metrics.write({"step": 1})
    assert lines(tmp_path) == [0]


# -- what is in the file is not believed


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"term": "9", "generation": 9}', '{"term": 9}', "[" * 10**5])
def test_a_damaged_file_is_written_anew(workers: Any, tmp_path: Path, text: str) -> None:
    (tmp_path / "writer.json").write_text(text)
    workers(1, 1).folder.metrics.write({"step": 0})
    assert json.loads((tmp_path / "writer.json").read_text())["generation"] == 1


def test_a_process_that_was_stopped_in_the_middle_holds_up_nobody_for_ever(workers: Any, tmp_path: Path) -> None:
    stopped = workers(1, 1)
    stopped.folder.metrics.write({"step": 0})
    with (tmp_path / "writer.json").open() as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        workers(2, 2, placing_s=0.1).folder.metrics.write({"step": 1})
    assert lines(tmp_path) == [0, 1]


# -- launchers


def test_a_launcher_whose_folder_was_taken_over_leaves_the_result_to_the_later_start(tmp_path: Path) -> None:
    folder = open_folder(tmp_path, "train")
    (tmp_path / "lock").write_text('{"term": 9, "pid": 1, "host": "b", "since": "now"}')
    (tmp_path / "result.json").write_text('{"exit_code": 0, "steps": 5}')
    said: list[str] = []

    class Terminal:
        def say(self, words: str) -> None:
            said.append(words)

    terminal: Any = Terminal()
    write_end(folder, JobEnd(1, {"message": "gone"}, 2, 1.0), terminal)
    assert json.loads((tmp_path / "result.json").read_text()) == {"exit_code": 0, "steps": 5}
    assert "process 1 on host b" in said[0]
    folder.close()
