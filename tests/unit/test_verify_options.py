"""Which words on the command line are verify's, and which are the script's."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from unisono.cli import verify_command as command
from unisono.cli.app import application
from unisono.cli.options import read_workers
from unisono.cli.verify_command import VerifyOptions
from unisono.errors import JobError
from unisono.launch.settings import Script
from unisono.settings.reading import settings_by_path
from unisono.settings.table import Settings

pytestmark = pytest.mark.unit

DEFAULTS = VerifyOptions()
Started = list[tuple[VerifyOptions, Settings, Script]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """What the command would start."""
    calls: Started = []

    def start(options: VerifyOptions, settings: Settings, script: Script) -> int:
        calls.append((options, settings, script))
        return 0

    monkeypatch.setattr(command, "start", start)
    return calls


def words(line: str) -> list[str]:
    return ["verify", *line.split()]


@pytest.mark.parametrize(
    ("line", "workers", "steps", "args"),
    [
        ("train.py", None, 20, ()),
        ("--steps 5 train.py --steps 1000 --lr 1", None, 5, ("--steps", "1000", "--lr", "1")),
        ("--workers 1,3 train.py --keep --help", "1,3", 20, ("--keep", "--help")),
        ("train.py --workers 1,2,3,5 --steps 7", "1,2,3,5", 7, ()),
        ("train.py data --lr 1 --workers=1,3 -v", "1,3", 20, ("data", "--lr", "1", "-v")),
        ("train.py --workers 1 --devices-per-worker 1,4", "1", 20, ()),
        ("train.py --lr 1 --steps 7 -- --steps 9 --", None, 7, ("--lr", "1", "--steps", "9", "--")),
        ("train.py --step 7", None, 20, ("--step", "7")),
    ],
)
def test_options_before_the_script_are_verifys_else_those_behind_it(
    started: Started,
    line: str,
    workers: str | None,
    steps: int,
    args: tuple[str, ...],
) -> None:
    result = CliRunner().invoke(application(), words(line))
    assert result.exit_code == 0, result.output
    ((options, _, script),) = started
    assert (options.workers, options.steps, script.target, script.args) == (workers, steps, "train.py", args)


def test_a_module_may_have_its_options_behind_it_too(started: Started) -> None:
    CliRunner().invoke(application(), words("-m package.train --workers 1,3"))
    ((options, _, script),) = started
    assert (options.workers, script) == ("1,3", Script("package.train", is_module=True))


@pytest.mark.parametrize(
    ("line", "tuned", "args"),
    [
        ("train.py", True, ()),
        ("--no-tuning train.py", False, ()),
        ("train.py --lr 1 --no-tuning", False, ("--lr", "1")),
        ("--steps 5 train.py --no-tuning", True, ("--no-tuning",)),
        ("train.py --tuning hard", True, ("--tuning", "hard")),
    ],
)
def test_runs_are_tuned_unless_told_otherwise(started: Started, line: str, tuned: bool, args: tuple[str, ...]) -> None:
    CliRunner().invoke(application(), words(line), env={"UNISONO_TUNING": None})
    ((_, settings, script),) = started
    assert (settings.launch.tuning, script.args) == (tuned, args)


def test_an_option_without_a_number_says_how_to_give_it_to_the_script() -> None:
    with pytest.raises(JobError, match="--steps.*'many'.*put -- before it"):
        CliRunner().invoke(application(), words("train.py --steps many"), catch_exceptions=False)


def test_numbers_of_workers_are_read() -> None:
    assert read_workers("1, 2,5") == (1, 2, 5)


@pytest.mark.parametrize("text", ["1,x", "", "1,", "1,,2", "1,-2", "two", "1e3", "1\n2", "1٣", "1234567"])
def test_what_is_no_number_of_workers_is_refused(text: str) -> None:
    with pytest.raises(JobError, match="is no number of workers"):
        read_workers(text)


@pytest.mark.parametrize(
    ("line", "sizes"),
    [
        ("", "1 2 3"),
        ("--workers 1,5,1", "1 5 1"),
        ("--workers 1,2 --devices-per-worker 2,4", "1x2 2x2 1x4 2x4"),
        ("--workers 1,2,3,4 --fsdp", "1 1x2 1x3 1x4 2x2"),
        ("--workers 6 --fsdp", "1 1x6 2x3 3x2"),
        ("--stages 1,2,4", "1 1x2 1x4"),
        ("--stages 3", "1 1x3"),
        ("--workers 1,2 --stages 1,2", "1 2 1x2 2x2"),
    ],
)
@pytest.mark.parametrize("ahead", [True, False])
def test_workers_and_devices_say_what_is_compared(started: Started, line: str, sizes: str, ahead: bool) -> None:
    result = CliRunner().invoke(application(), words(f"{line} train.py" if ahead else f"train.py {line}"))
    assert result.exit_code == 0, result.output
    found = [str(size.workers) + (f"x{size.devices}" if size.devices > 1 else "") for size in started[0][0].sizes()]
    assert " ".join(found) == sizes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (VerifyOptions("1", fsdp=True), "--workers 1: name two numbers at least"),
        (VerifyOptions("1,0", fsdp=True), "--workers 0: at least 1"),
        (VerifyOptions(stages="1"), "--stages 1: name two numbers at least"),
        (VerifyOptions(stages="1,0"), "--devices-per-worker 0"),
        (VerifyOptions(stages="1,x"), "--stages '1,x': 'x' is no number"),
        (VerifyOptions(devices_per_worker=""), "--devices-per-worker ''"),
        (VerifyOptions(stages="2", fsdp=True), "--stages and --fsdp both set"),
        (VerifyOptions("3"), "two numbers at least"),
        (VerifyOptions("1,2", 0), "--steps 0: at least 1"),
        (VerifyOptions("1,0"), "--workers 0: at least 1"),
        (VerifyOptions("1,5"), "--workers 5 with --shards 4"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_started(
    tmp_path: Path, options: VerifyOptions, message: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    with pytest.raises(JobError, match=message):
        options.request(Script(str(script)), settings_by_path({"shards": 4} if "--shards" in message else {}))


def test_a_script_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="there is no script"):
        DEFAULTS.request(Script(str(tmp_path / "nowhere.py")), Settings())
