"""Loggers have each committed step once, whatever happens to the workers, and harm no run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from logged import require_same
from script_cluster import Cluster, Done, Kill
from unisono.errors import JobError
from unisono.loggers.by_name import loggers_of
from unisono.loggers.logger import LoggedRun, Logger

pytestmark = pytest.mark.cluster

SCRIPT = Path(__file__).parents[1] / "procs" / "scripts" / "logged.py"
LOGGERS = ["csv", pytest.param("tensorboard", marks=pytest.mark.slow)]
"""MLflow and Weights & Biases have processes of their own, and so have their tests: see ``tests/procs``."""

NOW: Any = {"UNISONO_LOG_EVERY_S": "0.001"}
LATE: Any = {"UNISONO_LOG_EVERY_S": "1000"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return Cluster(tmp_path_factory.mktemp("logged"))


@pytest.fixture(scope="module")
def serial(cluster: Cluster) -> Done:
    """Without any logger."""
    return cluster(SCRIPT, 1, shards=7)


@pytest.mark.parametrize("logger", LOGGERS)
def test_a_logger_has_every_figure_once_and_decides_no_bit(cluster: Cluster, serial: Done, logger: str) -> None:
    done = cluster(SCRIPT, 2, shards=7, UNISONO_LOG_TO=logger, **NOW)
    assert done.outcome == serial.outcome
    require_same(done.folder, logger)


@pytest.mark.parametrize("logger", LOGGERS)
@pytest.mark.parametrize("pace", [NOW, LATE], ids=["at once", "in the end"])
def test_main_workers_that_are_killed_leave_no_gap_and_nothing_twice(
    cluster: Cluster, serial: Done, logger: str, pace: Any
) -> None:
    kills = [Kill(3, 0, 2), Kill(7, 0), Kill(8, 0, 5), Kill(12, 1), Kill(15, 0, 1)]
    done = cluster(SCRIPT, (3, 3), shards=7, kills=kills, UNISONO_LOG_TO=logger, **pace)
    assert done.outcome == serial.outcome
    require_same(done.folder, logger)


@pytest.mark.parametrize("logger", LOGGERS)
def test_a_job_that_is_preempted_goes_on_with_other_workers_and_logs_no_step_again(
    cluster: Cluster, serial: Done, logger: str, tmp_path: Path
) -> None:
    for workers, stop in ((3, "6"), (2, "11"), (1, "")):
        cut: Any = {"UNISONO_STOP_AFTER": stop, "EVERY": "4"} if stop else {"EVERY": "4"}
        done = cluster(SCRIPT, workers, shards=7, folder=tmp_path, UNISONO_LOG_TO=logger, **NOW, **cut)
    assert done.digest == serial.digest
    require_same(done.folder, logger)


class Taken(Logger):
    """Keeps what it is given, for all workers of the process."""

    steps: ClassVar[list[int]] = []
    opened: ClassVar[list[LoggedRun]] = []

    def open(self, run: LoggedRun) -> int:
        self.opened.append(run)
        return super().open(run)

    def log(self, step: int, values: object) -> None:
        self.steps.append(step)


class Broken(Taken):
    """Fails at some time."""

    def log(self, step: int, values: object) -> None:
        if step == 5:
            raise OSError("the disk is full")
        super().log(step, values)


@pytest.fixture(autouse=True)
def nothing_is_taken() -> None:
    Taken.steps.clear()
    Taken.opened.clear()


def test_a_logger_of_somebody_gets_each_step_in_order_and_is_told_how_far_it_has_come(
    cluster: Cluster, tmp_path: Path
) -> None:
    for stop in ("6", ""):
        cut: Any = {"UNISONO_STOP_AFTER": stop} if stop else {}
        cluster(SCRIPT, 2, shards=7, folder=tmp_path, EVERY="2", UNISONO_LOG_TO=f"{__name__}:Taken", **NOW, **cut)
    assert Taken.steps == [*range(6), 6, *range(6, 21)]  # what is logged behind the last step stands alone
    assert [(run.steps, run.logged) for run in Taken.opened][-1] == (6, 6)


def test_a_logger_that_fails_logs_no_more_and_the_run_goes_on(cluster: Cluster, serial: Done) -> None:
    done = cluster(SCRIPT, 2, shards=7, UNISONO_LOG_TO=f"{__name__}:Broken,csv", **NOW)
    assert done.outcome == serial.outcome
    assert Taken.steps == list(range(5))
    require_same(done.folder, "csv")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("nothing", "there is no logger 'nothing': choose of tensorboard, csv, mlflow, wandb, or write module:Class"),
        ("csv,csv", "'metrics.csv' is there twice"),
        ("builtins:dict", "it makes a dict, and no unisono.Logger"),
        ("no.such:thing", "cannot be imported: ModuleNotFoundError: No module named 'no'"),
    ],
)
def test_what_is_no_logger_is_refused_before_anything_is_opened(given: str, words: str) -> None:
    with pytest.raises(JobError, match="UNISONO_LOG_TO") as refused:
        loggers_of(given.split(","), "UNISONO_LOG_TO")
    assert words in str(refused.value)


class Lacking(Taken):
    packages = ("json", "no_such_package")
    extra = "tensorboard"


def test_a_logger_whose_package_is_missing_says_how_to_install_it() -> None:
    with pytest.raises(
        JobError, match=r"Lacking needs no_such_package, which is not installed: pip install 'unisono\[tens"
    ):
        loggers_of([Lacking()])
