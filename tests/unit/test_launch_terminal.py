import io
import json
import re
import shutil
from pathlib import Path

import pytest

from unisono.checkpoint.folder import RunFolder
from unisono.errors import JobError
from unisono.host.status_line import as_line, without_status
from unisono.launch.failure import Failure
from unisono.launch.outcome import JobEnd, Outcome, WorkerExit, open_folder, report
from unisono.launch.terminal import Terminal

pytestmark = pytest.mark.unit


def shown(*lines: str, rank: int = 1, colours: bool = False) -> str:
    out = io.StringIO()
    Terminal(out, io.StringIO(), colours=colours).show(rank, "out", lines)
    return out.getvalue()


def test_streams_stay_apart() -> None:
    out, err = io.StringIO(), io.StringIO()
    terminal = Terminal(out, err)
    terminal.show(0, "out", ["o"])
    terminal.show(0, "err", ["e"])
    terminal.say("words")
    assert (out.getvalue(), err.getvalue()) == ("[rank 0] o\n", "[rank 0] e\nunisono: words\n")


def test_each_rank_has_a_colour_on_a_terminal_and_a_workers_colour_ends_with_its_line() -> None:
    assert shown("one", rank=0, colours=True) == "\x1b[36m[rank 0]\x1b[0m one\n"
    assert shown("one", rank=1, colours=True) != shown("one", rank=2, colours=True).replace("2]", "1]")
    assert shown("\x1b[31mred", colours=True).endswith("\x1b[31mred\x1b[0m\n")


def test_a_worker_cannot_move_the_cursor() -> None:
    assert shown("\x1b[A\x1b[2Kbar\x1b[?25l") == "[rank 1] bar\n"


def screen(text: str) -> list[str]:
    """The lines that a screen shows of a text."""
    lines = [""]
    for part in re.split(r"(\r\x1b\[K|\n)", text):
        if part == "\n":
            lines.append("")
        elif part == "\r\x1b[K":
            lines[-1] = ""
        else:
            lines[-1] += part
    return lines


def test_the_newest_status_stays_below_the_lines_of_all_workers_on_a_screen_and_goes_in_the_end() -> None:
    out = io.StringIO()
    terminal = Terminal(out, out, is_screen=True)
    terminal.show(0, "out", ["one", as_line("bar 1").rstrip("\n")])
    assert screen(out.getvalue()) == ["[rank 0] one", "bar 1"]
    terminal.show(1, "err", ["two"])
    terminal.say("words")
    assert screen(out.getvalue()) == ["[rank 0] one", "[rank 1] two", "unisono: words", "bar 1"]
    terminal.show(0, "out", [as_line("bar 2").rstrip("\n"), as_line("bar \x1b[2A3" + "." * 500).rstrip("\n")])
    *lines, bar = screen(out.getvalue())
    assert len(lines) == 3
    assert bar.startswith("bar [2A3...")
    assert len(bar) < shutil.get_terminal_size().columns
    terminal.conclude("the end\n")
    assert screen(out.getvalue()) == [*lines, "the end", ""]


def test_a_status_is_shown_on_a_screen_alone_and_is_in_no_log() -> None:
    assert shown("one", as_line("bar").rstrip("\n")) == "[rank 1] one\n"
    printed = f"one\n{as_line('bar ━')}two\n\x1b]9;other\x07\n"
    assert without_status(printed.encode()).decode() == "one\ntwo\n\x1b]9;other\x07\n"


def outcome(*exits: WorkerExit, interrupted: int | None = None) -> Outcome:
    return Outcome(exits, len(exits), "a", 1.0, interrupted)


FAILURE = Failure(1, "a", 7, "ValueError", "boom", "Traceback …\nValueError: boom\n", False, 1.0)


def test_faults_that_were_mended_are_told_at_the_end(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.journal("healed", step=3, what="weights", ranks=[1], hosts=["a"])
    folder.journal("rolled back", step=9, to=5, why="a bit")
    folder.journal("rolled back", step=12, to=10, why="a bit", proven=True)
    folder.journal("rolled back", step=12, to=10, why="a loss", fault=False)
    text = report(outcome(WorkerExit(0, 0, 1.0)), folder)
    assert "found and mended: 1 rolled back" in text
    assert "1 healed, 1 rolled back" in text
    failed = report(outcome(WorkerExit(0, 1, 1.0, FAILURE)), folder)
    assert failed.startswith(text)
    assert failed != text


def test_the_report_ends_with_the_traceback_of_the_cause(tmp_path: Path) -> None:
    text = report(outcome(WorkerExit(0, -15, 2.0, told_at=1.5), WorkerExit(1, 1, 1.1, FAILURE)), RunFolder(tmp_path))
    assert text.startswith("unisono: rank 1 on host a failed (exit code 1, log ")
    assert text.endswith("\nTraceback …\nValueError: boom\n")


def test_the_report_of_a_death_without_words_shows_the_end_of_the_log(tmp_path: Path) -> None:
    folder = open_folder(tmp_path, "train")
    folder.log_of(0).write_bytes(b"".join(b"line %d\n" % number for number in range(99)) + b"\xff")
    text = report(outcome(WorkerExit(0, -9, 1.0)), RunFolder(tmp_path))
    assert "  | line 98\n  | \ufffd\n" in text
    assert "line 80\n" not in text
    assert text.splitlines()[-1].startswith("unisono: rank 0 on host a was killed by SIGKILL: likely the memory")


def test_the_report_of_an_interruption_is_one_line(tmp_path: Path) -> None:
    text = report(outcome(WorkerExit(0, 130, 1.0), interrupted=2), RunFolder(tmp_path))
    assert text == f"unisono: ended by SIGINT (exit code 130, run folder {tmp_path})\n"


def result(folder: Path) -> dict[str, object]:
    found = json.loads((folder / "result.json").read_text())
    assert isinstance(found, dict)
    return found


def test_the_launcher_writes_the_result_that_no_worker_wrote(tmp_path: Path) -> None:
    JobEnd(137, {"message": "killed"}, workers=2, seconds=1.5).write(RunFolder(tmp_path))
    assert result(tmp_path) == {
        "weights_sha256": None,
        "steps": None,
        "samples": None,
        "world_size": 2,
        "seconds": 1.5,
        "exit_code": 137,
        "error": {"message": "killed"},
        "healed": [],
        "rolled_back": [],
        "wrong_results": [],
    }
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_the_main_workers_result_stands_if_the_job_ended_as_it_says(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"exit_code": 0, "steps": 9}')
    JobEnd(0, None, workers=2, seconds=1.5).write(RunFolder(tmp_path))
    assert result(tmp_path) == {"exit_code": 0, "steps": 9}


def test_a_job_that_failed_after_its_main_worker_was_done_says_both(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"exit_code": 0, "steps": 9, "world_size": 2, "error": null}')
    JobEnd(1, {"message": "boom"}, workers=2, seconds=1.5).write(RunFolder(tmp_path))
    found = result(tmp_path)
    assert (found["steps"], found["exit_code"], found["error"]) == (9, 1, {"message": "boom"})


def test_a_result_that_is_no_json_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("{")
    JobEnd(0, None, workers=1, seconds=0.1).write(RunFolder(tmp_path))
    assert result(tmp_path)["exit_code"] == 0


def test_what_an_earlier_start_said_about_its_end_is_taken_away_and_the_rest_stays(tmp_path: Path) -> None:
    open_folder(tmp_path, "train").close()
    for name in ("result.json", "journal.jsonl", "logs/rank-0.error.json", "logs/rank-0.log"):
        (tmp_path / name).write_text("x")
    open_folder(tmp_path, "train")
    kept = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert kept == {"journal.jsonl", "lock", "logs/rank-0.log"}


def test_a_run_folder_that_is_a_file_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(JobError, match=r"run folder .*x cannot be used"):
        open_folder(tmp_path / "x", "train")


def test_a_place_where_no_run_folder_can_be_made_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").write_text("a file")
    with pytest.raises(JobError, match=r"no run folder can be made in .*runs: .*--run-dir"):
        open_folder(None, "train")
