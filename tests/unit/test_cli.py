import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from unisono.cli import app as cli
from unisono.errors import CheckpointError, JobError
from unisono.named import extensions

pytestmark = pytest.mark.unit


def unisono(*args: str) -> int:
    """Call the console entry in this process; its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["unisono", *args])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    return int(ended.value.code or 0)


ALL = [*cli.COMMANDS, *extensions("command")]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("UNISONO_RUN_DIR", "UNISONO_SHARDS", "UNISONO_THREADS", "UNISONO_TUNING", "UNISONO_ALLOW_JOB_CHANGE"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "train.py"
    path.write_text("print('hello')\n")
    return path


OF_LAUNCHERS = {"asyncio", "psutil", "torch"}


@pytest.mark.parametrize(
    ("program", "unloaded"),
    [
        ("import unisono.cli.app as cli; cli.application()", {"torch"}),
        ("import unisono.cli.jobs", OF_LAUNCHERS),
        ("import unisono.launch.worker", OF_LAUNCHERS),
        (
            "from unisono.cli.app import application; application(['status'])",
            {"unisono.cli.run_command", "unisono_lab.commands.study"},
        ),
    ],
)
def test_commands_begin_without_what_only_others_need(program: str, unloaded: set[str]) -> None:
    program += f"; import sys; sys.exit(bool({unloaded} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert unisono("--help") == 0
    text = capsys.readouterr().out
    assert re.findall(r"^\W*(\S+) {2,}[A-Z]", text.partition("Commands")[2], re.MULTILINE) == ALL
    assert "..." not in text.partition("Commands")[2]  # a line holds the first sentence of each


@pytest.mark.parametrize("command", ALL)
def test_a_command_is_found_when_it_alone_is_loaded(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert unisono(command, "--help") == 0
    assert f"unisono {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nope.py"], "there is no script nope.py"),
        (["-n", "0", "train.py"], "--workers 0: at least 1"),
        (["-n", "3", "--shards", "2", "train.py"], "set --shards 4, or start at most 2 workers"),
        (["--threads", "0", "train.py"], "--threads 0"),
        (["-m", "nope"], "there is no module nope"),
        (["--run-dir", "train.py", "train.py"], "run folder train.py cannot be used"),
        (["x" * 5000], "cannot be read: File name too long"),
        (["-n", "4097", "train.py"], "--workers 4097: at most 4096 on one host"),
        (["-n", "1:4097", "train.py"], "--workers 4097: at most 4096 on one host"),
        (["--failure-timeout-s", "1e300", "train.py"], "--failure-timeout-s 1e+300: needs"),
        (["--grace-s", "1e300", "train.py"], "--grace-s 1e+300: needs"),
    ],
)
def test_what_cannot_work_is_one_clear_line_and_exit_code_2(
    script: Path, capsys: pytest.CaptureFixture[str], args: list[str], words: str
) -> None:
    assert unisono("run", *args) == 2
    captured = capsys.readouterr()
    said = [line for line in captured.err.splitlines() if "error" in line]
    assert len(said) == 1
    assert words in said[0]
    assert "Traceback" not in captured.err


def test_a_script_of_faults_that_makes_no_sense_starts_nothing(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = script.with_name("faults.toml")
    faults.write_text('[[fault]]\nkind = "kill"\nrank = -1\nat_step = 0\n')
    assert unisono("run", "--faults", str(faults), "--run-dir", "started", "train.py") == 2
    assert "fault 1 (kill): rank = -1: needs to be greater than or equal to 0" in capsys.readouterr().err
    assert not Path("started").exists()


@pytest.mark.parametrize("command", [("run", "train.py"), ("join", "train.py"), ("chaos", "train.py"), ("status",)])
def test_a_run_folder_without_a_name_is_a_usage_error(
    command: tuple[str, ...], script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert unisono(command[0], "--run-dir", "", *command[1:]) == 2
    assert "the name is empty" in " ".join(capsys.readouterr().err.replace("│", "").split())
    assert [path.name for path in script.parent.iterdir()] == ["train.py"]


def test_everything_after_the_script_is_the_scripts(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert unisono("run", "--dry-run", "-n", "1", "train.py", "-n", "9", "--help", "--", "--dry-run", "") == 0
    assert capsys.readouterr().out.endswith("train.py -n 9 --help -- --dry-run ''\n")


def test_a_dry_run_starts_nothing_and_leaves_nothing(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert unisono("run", "--dry-run", "-n", "2", "--shards", "4", "--threads", "2", "train.py") == 0
    text = capsys.readouterr().out
    assert text.count("unisono.launch.worker train.py") == 2
    assert "UNISONO_SHARDS=4" in text
    assert "OMP_NUM_THREADS=2" in text
    assert list(script.parent.iterdir()) == [script]


def test_tuning_can_be_switched_off_by_an_option_and_by_a_variable(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.36"))
    for name in ("MALLOC_ARENA_MAX", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    assert unisono("run", "--dry-run", "train.py") == 0
    assert " MALLOC_ARENA_MAX=1 " in capsys.readouterr().out
    assert unisono("run", "--dry-run", "--no-tuning", "train.py") == 0
    assert "MALLOC" not in capsys.readouterr().out
    monkeypatch.setenv("UNISONO_TUNING", "0")
    assert unisono("run", "--dry-run", "train.py") == 0
    assert "# no tuning: switched off\n" in capsys.readouterr().out
    assert unisono("run", "--dry-run", "--tuning", "train.py") == 0
    assert " MALLOC_ARENA_MAX=1 " in capsys.readouterr().out


@pytest.mark.parametrize(("error", "code"), [(JobError("a setting"), 2), (CheckpointError("a file"), 1)])
def test_an_error_on_purpose_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    def fails(words: list[str], **how: Any) -> None:
        raise error

    monkeypatch.setattr(cli, "application", lambda words: fails)
    assert unisono() == code
    assert capsys.readouterr().err == f"unisono: error: {error}\n"


# --- help


def test_the_help_of_run_has_the_ten_options_that_people_use_first_and_names_the_groups_of_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert unisono("run", "--help") == 0
    text = capsys.readouterr().out
    assert len(re.findall(r"^  (?:-\w, )?--", text.partition("Options:")[2], re.MULTILINE)) == 11  # ten, and --help
    assert "unisono run --help-all shows the others: " in text
    assert max(map(len, text.splitlines())) <= 80

    assert unisono("run", "--help-all") == 0
    whole = capsys.readouterr().out
    shown = set(re.findall(r"--[a-z][a-z-]+", whole))
    assert "…" not in re.sub("NAME,…|NAME=N,…|NAME=VALUE,…", "", whole)  # no name is cut
    assert {"--shards", "--failure-timeout-s", "--no-tuning", "--resources-per-worker", "--coordinator"} <= shown
    assert "[env var: UNISONO_SHARDS]" in " ".join(whole.split())


@pytest.mark.parametrize("command", ALL)
def test_every_option_of_a_command_is_in_its_whole_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert unisono(command, "--help-all") == 0
    text = capsys.readouterr().out
    group: Any = typer.main.get_command(cli.application([command]))
    options = [option for option in group.commands[command].params if option.param_type_name == "option"]
    assert [option.name for option in options if not option.hidden and option.opts[-1] not in text] == []


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("run",), "unisono: error: Missing argument 'SCRIPT'. (unisono run --help shows what there is)"),
        (("run", "--sharts", "4", "train.py"), "unisono: error: No such option: --sharts"),
        (("replay",), "unisono: error: Missing argument 'RUN'. (unisono replay --help shows what there is)"),
        (("nothing",), "unisono: error: No such command 'nothing'. (unisono --help shows what there is)"),
        (("resize", "many"), "unisono: error: Invalid value for 'N': "),
    ],
)
def test_what_is_wrong_with_the_words_of_a_command_is_one_line(
    words: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert unisono(*words) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert told.err.startswith(line)
