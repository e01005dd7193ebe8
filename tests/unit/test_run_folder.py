import errno
import json
import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from unisono.checkpoint.folder import MetricsFile, RunFolder, new_run_folder, write_json
from unisono.errors import JobError, UnisonoWarning
from unisono_lab.faults.injector import FOLDER, _claim

pytestmark = pytest.mark.unit


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def strict(path: Path) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


# --- job and result


def test_a_job_and_a_result_come_back(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert folder.read_job() is None
    assert folder.read_result() is None
    folder.write_job({"batch_size": 8})
    folder.write_result({"steps": 3, "error": None})
    assert folder.read_job() == {"batch_size": 8}
    assert folder.read_result() == {"steps": 3, "error": None}


def test_a_folder_that_is_only_looked_at_is_not_made(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.read_job()
    folder.metrics.truncate_after(3)
    folder.close()
    assert not (tmp_path / "run").exists()


def test_the_folder_stays_the_same_when_the_script_changes_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = RunFolder("run ß 🎻")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    folder.journal("moved")
    assert (tmp_path / "run ß 🎻" / "journal.jsonl").is_file()


@pytest.mark.parametrize(
    "content", [b"", b'{"batch_size": 8', b"[1]", b"\xff"], ids=["empty", "cut off", "list", "bytes"]
)
def test_a_damaged_job_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "job.json").write_bytes(content)
    with pytest.raises(JobError, match=r"job\.json .*use another run folder"):
        RunFolder(tmp_path).read_job()


def test_a_place_where_nothing_can_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JobError, match=r"file/run cannot be a run folder: .*run_dir="):
        RunFolder(tmp_path / "file" / "run").write_job({})
    with pytest.raises(JobError, match=r"no run folder can be made in .*run_dir="):
        new_run_folder(tmp_path / "file" / "runs", "train")
    with pytest.raises(JobError, match=r"no run folder can be made in .*run_dir="):
        new_run_folder(tmp_path / "file", "train")


def test_runs_that_start_in_the_same_second_get_a_folder_each(tmp_path: Path) -> None:
    made = {new_run_folder(tmp_path / "runs", "train") for _ in range(5)}
    assert len(made) == 5
    assert all(path.is_dir() and "-train" in path.name for path in made)


def test_a_reader_sees_the_old_json_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    write_json(path, {"steps": 1})

    def cut_off(source: Path, target: Path) -> None:
        assert json.loads(Path(source).read_text()) == {"steps": 2}
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", cut_off)
    with pytest.raises(KeyboardInterrupt):
        write_json(path, {"steps": 2})
    assert json.loads(path.read_text()) == {"steps": 1}
    assert list(tmp_path.iterdir()) == [path]


# --- lines


def test_a_journal_line_has_its_event_and_its_time_in_utc(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.journal("resumed", step=5)
    [line] = lines(tmp_path / "journal.jsonl")
    assert line["time"].endswith("+00:00")
    assert (line["event"], line["step"]) == ("resumed", 5)


def test_what_json_does_not_have_becomes_null_and_the_file_stays_json(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write(
        {"step": 0, "loss": float("nan"), "losses": [1.0, float("inf")], "seconds": {"a": -float("inf")}}
    )
    folder.write_result({"loss": float("nan")})
    folder.close()
    assert strict(tmp_path / "metrics.jsonl") == {
        "step": 0,
        "loss": None,
        "losses": [1.0, None],
        "seconds": {"a": None},
    }
    assert strict(tmp_path / "result.json") == {"loss": None}


@pytest.mark.parametrize("name", ["journal.jsonl", "metrics.jsonl"])
def test_a_line_after_a_torn_one_stands_on_its_own(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b'{"step": 1}\n{"step": 2, "lo')
    folder = RunFolder(tmp_path)
    folder.journal("resumed", step=3)
    folder.metrics.write({"step": 3})
    folder.close()
    found = (tmp_path / name).read_bytes().splitlines()
    assert found[:2] == [b'{"step": 1}', b'{"step": 2, "lo']
    assert json.loads(found[2])["step"] == 3


def test_lines_of_several_threads_do_not_mix(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)

    def note() -> None:
        for _ in range(25):
            folder.journal("note", text="x" * 50_000)  # long enough to be seen half written

    threads = [threading.Thread(target=note) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(line["text"]) for line in lines(tmp_path / "journal.jsonl")] == [50_000] * 100


def test_a_run_that_resumes_drops_what_it_will_write_again_and_what_is_torn(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    kept = [b'{"step": 0}', b'{"name": "no step"}', b'{"step": null}', b'{"step": 2}']
    dropped = [b'{"step": 3}', b"{torn", b"[1]", b"\xff", b'{"step": 1, "lo']
    path.write_bytes(b"\n".join([*kept[:3], *dropped, kept[3]]))
    metrics = MetricsFile(path)
    metrics.truncate_after(2)
    assert path.read_bytes().splitlines() == kept
    metrics.write({"step": 3})
    metrics.close()
    assert lines(path)[-1] == {"step": 3}


# --- a full disk


def no_room(*args: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_costs_lines_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write({"step": 0})
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", no_room)
        with pytest.warns(UnisonoWarning, match=r"metrics\.jsonl is incomplete: .*No space left"):
            folder.metrics.write({"step": 1})
        with pytest.warns(UnisonoWarning, match=r"journal\.jsonl is incomplete: .*No space left"):
            folder.journal("checkpoint failed")
        patched.setattr(os, "fsync", no_room)
        with pytest.raises(OSError, match="No space left"):
            folder.write_result({"steps": 1})
    folder.metrics.write({"step": 2})
    folder.close()
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 0}, {"step": 2}]


@pytest.mark.parametrize("before", [[], [{"step": 0}]], ids=["the first", "behind a whole one"])
def test_half_a_line_on_a_full_disk_does_not_spoil_the_next(
    before: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics, whole = MetricsFile(tmp_path / "metrics.jsonl"), os.write
    for line in before:
        metrics.write(line)
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda descriptor, data: whole(descriptor, data[:5]))
        with pytest.warns(UnisonoWarning, match="No space left"):
            metrics.write({"step": 1})
    metrics.write({"step": 2})
    assert metrics.truncate_after(5) == lines(tmp_path / "metrics.jsonl") == [*before, {"step": 2}]


def test_half_a_line_of_another_process_does_not_spoil_the_next(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.write({"step": 1})
    with (tmp_path / "metrics.jsonl").open("ab") as another:
        another.write(b'{"step": 2, "lo')
    metrics.write({"step": 3})
    assert metrics.truncate_after(5) == [{"step": 1}, {"step": 3}]


def test_a_file_that_fails_when_it_is_closed_is_closed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.write({"step": 1})
    close = os.close

    def closed(descriptor: int) -> None:
        close(descriptor)
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as patched:
        patched.setattr(os, "close", closed)
        with pytest.raises(OSError, match="quota"):
            metrics.close()
    metrics.write({"step": 2})
    metrics.close()
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize("name", ["journal.jsonl", "metrics.jsonl"])
def test_lines_are_not_written_to_where_a_link_leads(name: str, tmp_path: Path) -> None:
    behind = tmp_path / "behind"
    behind.write_bytes(b"somebody else's")
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    (folder.path / name).symlink_to(behind)
    writes = partial(folder.journal, "begun") if name == "journal.jsonl" else partial(folder.metrics.write, {"step": 1})
    with pytest.warns(UnisonoWarning, match="symbolic link"):
        writes()
    assert behind.read_bytes() == b"somebody else's"


def test_a_json_file_is_not_written_to_where_a_link_leads(tmp_path: Path) -> None:
    behind = tmp_path / "behind"
    behind.write_bytes(b"somebody else's")
    path = tmp_path / "result.json"
    (tmp_path / f".result.json.{os.getpid()}.{threading.get_ident()}").symlink_to(behind)
    with pytest.raises(OSError, match="symbolic"):
        write_json(path, {})
    assert behind.read_bytes() == b"somebody else's"


def test_nobody_claims_a_fault_in_a_run_folder_that_is_gone(tmp_path: Path) -> None:
    assert _claim(tmp_path / "run" / FOLDER / "1") is False
