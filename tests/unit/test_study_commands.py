"""What ``unisono study`` starts, and where it writes."""

import tomllib
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
import torch

from studies import MadeUp
from unisono.errors import JobError
from unisono_lab.report.report import compare, report_from
from unisono_lab.study.analysis import ReportSettings
from unisono_lab.study.engines import BySlurm, CellRunner, StudyEngine, commands, plain_workers
from unisono_lab.study.measuring import Measurement

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("workers", "threads", "plain"),
    [((1, 2, 4, 8), 1, (1, 2, 4)), ((2, 4), 2, (1, 2)), ((2,), 4, (1,)), ((4,), 16, (1,))],
)
def test_the_plain_loop_gets_the_threads_of_as_many_workers_as_there_are_cores_for(
    workers: tuple[int, ...], threads: int, plain: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    assert plain_workers(workers, threads, cores=4) == plain
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: cuda)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert plain_workers(workers, threads, cores=4) == (1,)


def test_a_report_shows_the_commands_that_were_started() -> None:
    study = Measurement(
        script=("train.py", "--lr", "0.1"),
        workers=(1, 2),
        modes=("strong", "weak"),
        steps=20,
        baseline=("plain.py", "a b"),
        baseline_workers=(1, 2),
        shards=4,
        threads=3,
        tuned=False,
    )
    told = "UNISONO_STUDY=1 UNISONO_TIMELINE=1 UNISONO_STOP_AFTER=20"
    weak = f"{told} UNISONO_BATCH_SCALE=2 UNISONO_BATCH_SCALE_WARMUP=4 UNISONO_SHARDS=4"
    assert commands(CellRunner(study, StudyEngine())) == [
        "unisono run -n 1 --threads 3 --no-tuning plain.py 'a b'",
        "unisono run -n 1 --threads 6 --no-tuning plain.py 'a b'",
        f"{told} unisono run -n 1 --shards 4 --threads 3 --no-tuning train.py --lr 0.1",
        f"{told} unisono run -n 2 --shards 4 --threads 3 --no-tuning train.py --lr 0.1",
        f"{weak} unisono run -n 2 --threads 3 --no-tuning train.py --lr 0.1",
    ]
    plainer = replace(study, tuned=True, modes=("strong",), shards=None, threads=None)
    assert commands(CellRunner(plainer, StudyEngine())) == [
        "unisono run -n 1 --threads 1 plain.py 'a b'",
        "unisono run -n 1 --threads 2 plain.py 'a b'",
        f"{told} unisono run -n 1 train.py --lr 0.1",
        f"{told} unisono run -n 2 train.py --lr 0.1",
    ]


def test_on_slurm_runs_are_job_steps_on_as_few_nodes_as_there_is_room_on(monkeypatch: pytest.MonkeyPatch) -> None:
    study = Measurement(script=("train.py",), workers=(1, 4, 5), shards=8, threads=2)
    told = "UNISONO_STUDY=1 UNISONO_TIMELINE=1 UNISONO_SHARDS=8 UNISONO_THREADS=2 srun --kill-on-bad-exit=1"
    for name in ("SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK"):
        monkeypatch.delenv(name, raising=False)
    assert commands(CellRunner(study, BySlurm()))[1] == f"{told} --ntasks=4 python train.py"
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "2(x3)")
    assert commands(CellRunner(study, BySlurm())) == [
        f"{told} --ntasks=1 --nodes=1 --ntasks-per-node=1 python train.py",
        f"{told} --ntasks=4 --nodes=2 --ntasks-per-node=2 python train.py",
        f"{told} --ntasks=5 --nodes=3 --ntasks-per-node=2 python train.py",
    ]


@pytest.mark.parametrize(("text", "cores"), [("2(x3)", 6), ("4,8(x2)", 20), ("16", 16)])
def test_the_cores_of_an_allocation_are_those_of_all_of_its_nodes(
    text: str, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", text)
    assert BySlurm().cores() == cores


@pytest.fixture
def studies(tmp_path: Path) -> tuple[Path, Path]:
    """Two of them, measured."""
    for name in ("one", "two"):
        MadeUp(labels=(name,)).results().write(tmp_path / name)
        (tmp_path / name / "study.json").write_text("{}")
    return tmp_path / "one", tmp_path / "two"


def test_no_report_takes_the_place_of_another_studys(studies: tuple[Path, Path], tmp_path: Path) -> None:
    one, two = studies
    table = tmp_path / "tables" / "results.csv"
    table.parent.mkdir()
    table.write_bytes((one / "results.csv").read_bytes())
    refused = "the report would replace the results in"
    with pytest.raises(JobError, match=refused):
        report_from(one, two, ReportSettings())
    with pytest.raises(JobError, match=refused):
        compare([one, table], two, ReportSettings())
    with pytest.raises(JobError, match=refused):
        compare([table, table], table.parent, ReportSettings())
    assert sorted(path.name for path in two.iterdir()) == ["results.csv", "results.json", "study.json"]


def test_a_study_gets_its_own_report_again(studies: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []
    monkeypatch.setattr("unisono_lab.report.report.report", lambda results, folder, *_: written.append(folder))
    one, two = studies
    report_from(one, None, ReportSettings())
    report_from(one, one, ReportSettings())
    report_from(one, two.parent / "new", ReportSettings())
    compare([one, two], two.parent / "new", ReportSettings())
    assert written == [one, one, two.parent / "new", two.parent / "new"]


def test_what_is_no_python_is_installed_too() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"] == {"packages": ["src/unisono", "src/unisono_lab"]}
    assert all(files("unisono_lab.report").joinpath(name).is_file() for name in ("report.html", "words.toml"))
    assert files("unisono.launch").joinpath("slurm_job.sh.j2").is_file()
