from pathlib import Path
from traceback import format_exception

import pytest

from unisono.checkpoint.folder import RunFolder
from unisono.errors import CheckpointError, JobError, JobMismatch, LaunchError, LossError, UnisonoError, WorkerLost
from unisono.job import Job
from unisono.launch.failure import Failure

pytestmark = pytest.mark.unit


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def caught(raise_it: BaseException) -> BaseException:
    try:
        raise raise_it
    except BaseException as error:  # noqa: BLE001
        return error


def test_a_failure_is_read_as_it_was_written(folder: RunFolder) -> None:
    failure = Failure.of(caught(ValueError("größe \udc80")), rank=3)
    failure.write(folder)
    assert Failure.read(folder, 3) == failure
    assert [path.name for path in folder.logs.iterdir()] == ["rank-3.error.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rank": 1}', "\x00"])
def test_a_damaged_record_is_named(folder: RunFolder, text: str) -> None:
    path = folder.error_of(1)
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(LaunchError, match=r"rank 1, .*rank-1\.error\.json"):
        Failure.read(folder, 1)


def test_an_error_raised_from_a_lost_worker_is_a_consequence_too() -> None:
    wrapped = RuntimeError("training failed")
    wrapped.__cause__ = WorkerLost("gone")
    assert Failure.of(caught(wrapped), rank=0).consequence
    cleaning_up = OSError("cannot clean up")
    cleaning_up.__context__ = WorkerLost("gone")
    assert Failure.of(caught(cleaning_up), rank=0).consequence


def test_an_error_that_hides_its_context_stands_for_itself() -> None:
    other = ValueError("own")
    other.__context__ = WorkerLost("gone")
    other.__suppress_context__ = True
    assert not Failure.of(caught(other), rank=0).consequence


def test_an_error_that_cannot_say_its_message_is_recorded() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert "Mute" in Failure.of(caught(Mute()), rank=0).traceback


def test_a_setting_that_cannot_work_is_told_with_the_line_of_the_script_and_without_a_traceback() -> None:
    with pytest.raises(JobError) as refused:
        Job.create(batch_size=0)
    failure = Failure.of(refused.value, rank=0)
    place, words = failure.traceback.splitlines()
    assert place.startswith(f"  at {__file__}:")
    assert place.endswith(": Job.create(batch_size=0)")
    assert words == f"unisono.errors.JobError: {failure.message}"


@pytest.mark.parametrize("kind", [JobMismatch, CheckpointError])
def test_a_run_folder_or_checkpoint_that_is_refused_is_told_without_a_traceback(kind: type[UnisonoError]) -> None:
    place, words = Failure.of(caught(kind("the run folder a belongs to another job")), rank=0).traceback.splitlines()
    assert place.startswith(f"  at {__file__}:")
    assert words == f"unisono.errors.{kind.__name__}: the run folder a belongs to another job"
    assert "Traceback" in Failure.of(caught(LossError("no")), rank=0).traceback


def test_a_damaged_job_file_is_told_without_what_the_reader_of_json_said(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text("{")
    with pytest.raises(JobError) as refused:
        RunFolder(tmp_path).read_job()
    assert "Traceback" not in Failure.of(refused.value, rank=0).traceback
    assert "JSONDecodeError" not in "".join(format_exception(refused.value))


def test_only_our_own_errors_choose_the_exit_code() -> None:
    """Other libraries' errors have attributes of that name: 0 is no code of a failure, 75 is one that goes on."""
    for other in (0, 75, 256, -9, "3", object()):
        error = ValueError("no")
        vars(error)["exit_code"] = other
        assert Failure.of(caught(error), rank=0).exit_code == 1
    assert Failure.of(caught(JobError("no")), rank=0).exit_code == 2
