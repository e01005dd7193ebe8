import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from said import options
from unisono.errors import JobError
from unisono.host.machine import PORTABLE, numerics_variables
from unisono.launch.command import RendezvousSocket, WorkerCommand, dry_run, worker_command
from unisono.launch.settings import LaunchSettings, Script
from unisono.launch.tuning import Tuning
from unisono.membership.environment import RendezvousAddress, recognise

pytestmark = pytest.mark.unit

TRAIN = Script("train.py", ("-n", "5", "--help"))


def launched(script: Script, **settings: Any) -> LaunchSettings:
    own = {field.name: settings.pop(field.name) for field in fields(LaunchSettings) if field.name in settings}
    return LaunchSettings(script, options=options(**settings), **own)


def command(rank: int = 0, rendezvous: RendezvousSocket | None = None, **settings: Any) -> WorkerCommand:
    wanted = launched(TRAIN, workers=4, **settings)
    return worker_command(wanted, Path("runs/x"), rank, rendezvous)


def test_the_worker_recognises_what_the_launcher_says() -> None:
    rendezvous = RendezvousSocket(4711, 9)
    assert command().variables["UNISONO_RUN_DIR"] == str(Path.cwd() / "runs/x")  # a script may change its folder
    first = recognise(command(0, rendezvous).environment({}), "a")
    third = recognise(command(2, rendezvous).environment({}), "a")
    assert (first.launcher, first.rank, first.world_size, first.local_world_size) == ("unisono", 0, 4, 4)
    assert first.rendezvous == RendezvousAddress("127.0.0.1", 4711, store_fd=9)
    assert (third.rank, third.local_rank, third.rendezvous) == (2, 2, RendezvousAddress("127.0.0.1", 4711))


def test_native_threads_are_one_unless_asked() -> None:
    assert command().variables["OMP_NUM_THREADS"] == "1"
    assert "UNISONO_THREADS" not in command().variables
    two = command(threads=2).variables
    assert (two["OMP_NUM_THREADS"], two["MKL_NUM_THREADS"], two["UNISONO_THREADS"]) == ("2", "2", "2")


def test_all_workers_go_through_sets_of_words_in_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert {command(rank).variables["PYTHONHASHSEED"] for rank in (0, 2)} == {"0"}
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert command().variables["PYTHONHASHSEED"] == "7"


def test_workers_get_the_tuning_and_a_caller_who_sets_more_goes_first() -> None:
    tuning = Tuning({"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0"})
    variables = command(tuning=tuning, extra_environment={"MALLOC_ARENA_MAX": "2"}).variables
    assert (variables["MALLOC_ARENA_MAX"], variables["MALLOC_MMAP_MAX_"]) == ("2", "0")
    assert not [name for name in command().variables if name.startswith("MALLOC")]


def test_workers_get_what_portable_numerics_need_whether_an_option_or_the_environment_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("UNISONO_NUMERICS", raising=False)
    asked = command(numerics="portable").variables
    assert {name: asked.get(name) for name in numerics_variables("portable")} == numerics_variables("portable")
    assert not {"UNISONO_NUMERICS", *PORTABLE} & command().variables.keys()
    monkeypatch.setenv("UNISONO_NUMERICS", "portable")
    assert command().variables == asked
    assert command(numerics="native").variables["UNISONO_NUMERICS"] == "native"
    assert command(numerics="portable").environment({"MKL_CBWR": "AVX2"})["MKL_CBWR"] == "COMPATIBLE"


def test_a_launcher_inside_a_worker_hands_on_no_foreign_socket() -> None:
    outer = {"UNISONO_STORE": "127.0.0.1:1", "UNISONO_STORE_FD": "3", "UNISONO_RANK": "7", "HOME": "/h"}
    inner = command(1, RendezvousSocket(2, 4)).environment(outer)
    assert inner["UNISONO_STORE"] == "127.0.0.1:2"
    assert "UNISONO_STORE_FD" not in inner
    assert (inner["UNISONO_RANK"], inner["HOME"]) == ("1", "/h")


def test_a_dry_run_shows_each_rank_and_is_fit_for_a_shell() -> None:
    settings = LaunchSettings(Script("train.py", ("a b",)), workers=2)
    text = dry_run(settings, Path("/runs/x"))
    assert "# rank 0" in text
    assert "# rank 1\nUNISONO_RANK=1 UNISONO_WORLD_SIZE=2" in text
    assert "train.py 'a b'" in text
    assert str(os.getpid()) not in text.split()
    assert text.count("UNISONO_STORE_FD=FD") == 1


@pytest.mark.parametrize("script", [TRAIN, Script("package.train", ("-m", "x"), is_module=True)])
def test_a_script_survives_the_way_through_arguments(script: Script) -> None:
    assert Script.from_argv(script.argv) == script


@pytest.fixture
def script(tmp_path: Path) -> Script:
    (tmp_path / "train.py").write_text("print('hello')\n")
    return Script(str(tmp_path / "train.py"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"workers": 0}, "--workers 0"),
        ({"shards": 0}, "--shards 0"),
        ({"threads": -1}, "--threads -1"),
        ({"grace_s": -1.0}, "--grace-s -1"),
        ({"grace_s": float("nan")}, "--grace-s nan"),
        ({"workers": 5, "shards": 4}, "--workers 5 with --shards 4.*set --shards 8"),
    ],
)
def test_numbers_out_of_range_are_named(script: Script, settings: dict[str, int], words: str) -> None:
    with pytest.raises(JobError, match=words):
        launched(script, **settings).check()


def test_what_cannot_be_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"no script .*nope\.py"):
        Script(str(tmp_path / "nope.py")).require_readable()
    with pytest.raises(JobError, match=r"folder without a __main__\.py"):
        Script(str(tmp_path)).require_readable()
    (tmp_path / "file").write_text("")
    with pytest.raises(JobError, match=r"cannot be read: .*[Nn]ot a directory"):
        Script(str(tmp_path / "file" / "train.py")).require_readable()
    with pytest.raises(JobError, match="no module nope"):
        Script("nope.train", is_module=True).require_readable()


def test_a_folder_with_a_main_and_a_package_can_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text("")
    Script(str(tmp_path / "app")).require_readable()
    monkeypatch.chdir(tmp_path)
    Script("app", is_module=True).require_readable()
