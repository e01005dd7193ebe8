"""Models in stages: the bits of the job that has none, by any schedule, on any number of devices and workers."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import python
from launches import Launches, launches

pytestmark = pytest.mark.procs

SCRIPT = str(Path(__file__).parent / "scripts" / "staged.py")
SCHEDULES = ("gpipe", "1f1b", "bfs", "looped", "zero")
CASES = (*SCHEDULES, "eight", "residual", "unused", "drawn", "again", "narrow")
QUICK = ("bfs", "residual", "unused", "again")

slow = pytest.mark.slow


def results(output: str) -> dict[str, list[str]]:
    """What the script has printed of each model: digest, last loss, error on all data, sum of predictions."""
    lines = [line.removeprefix("[rank 0] ").split() for line in output.splitlines()]
    return {words[0]: words[1:] for words in lines if words and words[0] in CASES}


@pytest.fixture(scope="module")
def launched() -> Iterator[Launches]:
    with launches({**os.environ, "PYTHONWARNINGS": "ignore::UserWarning"}) as found:
        yield found


@pytest.fixture(scope="module")
def serial(launched: Launches, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return results(launched(1, SCRIPT, *QUICK, "zero", folder=tmp_path_factory.mktemp("serial") / "run"))


@pytest.fixture(scope="module")
def all_serial(
    serial: dict[str, list[str]], launched: Launches, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[str]]:
    others = ("eight", "drawn", "narrow")
    found = results(launched(1, SCRIPT, *others, folder=tmp_path_factory.mktemp("serial") / "run"))
    assert len({tuple(each) for each in (serial | found).values()}) == 7  # some differ by their schedule alone
    return serial | found | dict.fromkeys(SCHEDULES, serial["zero"])


def test_models_in_stages_end_with_the_bits_of_whole_ones(
    serial: dict[str, list[str]], launched: Launches, tmp_path: Path
) -> None:
    found = results(launched(4, SCRIPT, *QUICK, folder=tmp_path / "run", UNISONO_DEVICES_PER_WORKER="2"))
    assert found == {name: serial[name] for name in QUICK}


@slow
@pytest.mark.parametrize(("workers", "devices"), [(1, 2), (1, 3), (1, 4), (2, 2), (3, 2), (2, 3)])
def test_any_schedule_gives_the_same_bits(
    workers: int, devices: int, all_serial: dict[str, list[str]], launched: Launches, tmp_path: Path
) -> None:
    told = {"UNISONO_DEVICES_PER_WORKER": str(devices)}
    fits = [name for name in CASES if devices < 4 or name != "unused"]  # which has three stages
    assert results(launched(workers * devices, SCRIPT, *fits, folder=tmp_path / "run", **told)) == {
        name: all_serial[name] for name in fits
    }


@slow
def test_a_checkpoint_goes_on_with_other_numbers_of_devices(
    serial: dict[str, list[str]], launched: Launches, tmp_path: Path
) -> None:
    told = {"UNISONO_STOP_AFTER": "3", "UNISONO_CHECKPOINT_EVERY": "2"}
    said = launched(4, SCRIPT, "zero", folder=tmp_path / "run", UNISONO_DEVICES_PER_WORKER="4", **told)
    assert results(said)["zero"] != serial["zero"]
    for processes, devices in ((1, 1), (4, 4), (3, 3), (6, 2)):
        folder = tmp_path / f"{processes}-{devices}"
        shutil.copytree(tmp_path / "run", folder)
        said = launched(processes, SCRIPT, "zero", folder=folder, UNISONO_DEVICES_PER_WORKER=str(devices))
        assert "resumes after step 3" in said
        assert results(said)["zero"] == serial["zero"]


@pytest.mark.slow
def test_what_cannot_be_cut_into_stages_is_refused_with_the_cure(launched: Launches, tmp_path: Path) -> None:
    anywhere = launched(1, SCRIPT, "refused", folder=tmp_path / "one")
    devices = launched(2, SCRIPT, "refused-on-devices", folder=tmp_path / "two", UNISONO_DEVICES_PER_WORKER="2")
    begins = [
        "ModelError: run.pipeline: the model has no module 'layer.2' to cut before. Name one of",
        "ModelError: run.pipeline: the cut before '2' comes after the one before '3'",
        "ModelError: run.pipeline(cuts=[]): needs a list of names",
        "JobError: run.pipeline(schedule='2f2b'): use one of 'gpipe'",
        "ModelError: run.pipeline: words.weight of stage 0 and head.weight of stage 1 are one parameter (tied weights)",
        "ModelError: run.pipeline: stage 1 (from '1' on) has no parameters",
        "ModelError: run.pipeline: 2 is compiled (torch.compile)",
        "ModelError: run.pipeline: 0.weight lies in slices",
        "ModelError: run.pipeline: this model lies in stages already",
        "JobError: run.fully_shard and run.pipeline in one script",
        "ModelError: '2' is called outside of a loss function",
        "ModelError: run.prepare was given a model in stages and others besides",
        "ModelError: the optimizer holds a parameter that belongs to no stage",
        "ModelError: run.prepare(state=…): a model in stages has no further state yet",
        "ModelError: KFAC needs whole layers, and each worker has 2 devices, which hold parts of them: use one device",
    ]
    said = [line.removeprefix("[rank 0] ") for line in (anywhere + devices).splitlines() if "Error: " in line]
    assert [line for line, begin in zip(said, begins, strict=True) if not line.startswith(begin)] == []


def failed(how: str, devices: int, folder: Path) -> str:
    """What a job says that cannot go on."""
    command = ("-m", "unisono", "run", "-n", "1", "--devices-per-worker", devices, "--run-dir", folder, SCRIPT)
    done = python(*command, "fails", how)
    assert done.returncode != 0
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("how", "devices", "words"),
    [
        pytest.param(
            "skips",
            3,
            "stage 1 (from 'second' on), shard 0: 'third' gets a value that an earlier stage has computed",
            marks=slow,
        ),
        pytest.param("looks", 2, "uses .shape of a value that another device computes", marks=slow),
        pytest.param("returns", 3, "'first' belongs to stage 0 (up to 'second')", marks=slow),
        pytest.param("draws", 2, "draws random numbers before 'third', outside of the modules", marks=slow),
        pytest.param("stops", 2, "has not come to 'third'", marks=slow),
        pytest.param("twice", 2, "call the model once for each loss", marks=slow),
        pytest.param("few", 3, "this worker has 1 shards, and its 3 devices cannot compute them", marks=slow),
        pytest.param("cuts", 3, "has 3 devices, and the model has 2 stages", marks=slow),
        pytest.param("breaks", 2, "unisono: in stages 0 to 1 (up to 'third'), shard 0", marks=slow),
        pytest.param("killed", 2, "rank 1 on host", marks=slow),
    ],
)
def test_a_job_in_stages_that_cannot_go_on_ends_and_says_where_and_why(
    how: str, devices: int, words: str, tmp_path: Path
) -> None:
    assert words in failed(how, devices, tmp_path / "run")


@slow
def test_a_study_measures_every_schedule_and_names_the_fastest(tmp_path: Path) -> None:
    options = ("--stages", "2", "--repeats", "1", "--steps", "1", "--warmup", "1", "--out", "study")
    done = python("-m", "unisono", "study", *options, SCRIPT, "--", "eight", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {words[0] for words in lines[1:6]} == {
        *("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble")
    }
    assert f'recommended: run.pipeline(…, schedule="{lines[1][0]}")' in done.stdout


@slow
@pytest.mark.parametrize(
    ("case", "options", "sizes"),
    [
        ("unused", ("--workers", "1,2", "--stages", "1,2"), "1, 2, 1 × 2 and 2 × 2"),
        ("zero", ("--stages", "1,2,4"), "1, 1 × 2 and 1 × 4"),
    ],
)
def test_verify_compares_stages_moment_by_moment_with_one_device(
    case: str, options: tuple[str, ...], sizes: str, tmp_path: Path
) -> None:
    done = python("-m", "unisono", "verify", *options, "--steps", 2, SCRIPT, case, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"bit for bit, with {sizes} workers (× devices), after each of 2 steps" in done.stdout
