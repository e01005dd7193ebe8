"""The benchmarks, with real processes and few steps: what they measure here means nothing, but they measure it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.crew import Crew, CrewFailed
from benchmarks.link import Cable, NoLink, obstacle, slow_link
from benchmarks.task import Task, Trained
from forks.client import SHARED_FORK_SERVERS

pytestmark = [pytest.mark.procs, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]


def benchmark(*words: str) -> str:
    """Run a benchmark to its end. Its own process is this one, which has torch loaded; its jobs and crews are not."""
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.slow  # tests/unit/test_benchmarks.py has its tables, the tests below its crews
def test_the_step_benchmark_compares_contenders_that_do_the_same_work(tmp_path: Path) -> None:
    chosen = [f"--only={key}" for key in ("plain", "unisono", "ddp-25")]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "step", "--quick", *chosen, f"--output={tmp_path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    table = json.loads((tmp_path / "step.json").read_text())["models"]["tiny"]
    assert [one["key"] for one in table] == ["plain", "unisono", "ddp-25"]
    assert all(one["seconds"] and one["of_ddp"] and one["efficiency"] for one in table)
    assert "DIFFERENT" not in done.stdout
    assert "the machine was" in done.stdout.lower()


@pytest.mark.slow
def test_the_fixed_cost_of_a_step_is_measured_beside_ddp_in_one_process(tmp_path: Path) -> None:
    benchmark("fixed-cost", "--quick", "--steps=4", f"--output={tmp_path}")
    races = json.loads((tmp_path / "fixed-cost.json").read_text())["races"]
    assert [len(race["rows"]) for race in races] == [6, 3]
    assert all(row["difference"] < 1e-5 for race in races for row in race["rows"])


def test_a_worker_that_fails_ends_the_crew_and_its_last_words_are_told() -> None:
    task = Task(contender="nobody", workload="tiny", batch_size=4)
    with pytest.raises(CrewFailed, match=r"rank [01]: .*No module named benchmarks\.programs\.nobody"):
        Crew.here(2).run("nobody", task, Trained)


def test_two_hosts_reach_each_other_over_the_slow_cable_and_nothing_stays_of_it() -> None:
    answer = "import socket; s = socket.create_server(('10.77.0.1', 5000)); print(flush=True); s.accept()[0].send(b'x')"
    call = "import socket; print(socket.create_connection(('10.77.0.1', 5000), 20).recv(1))"
    try:
        with slow_link(Cable()) as link:
            first, second = ([*host.enter, sys.executable, "-c"] for host in link.hosts)
            with subprocess.Popen([*first, answer], stdout=subprocess.PIPE) as server:
                assert server.stdout is not None
                server.stdout.readline()  # it listens
                called = subprocess.run([*second, call], capture_output=True, text=True, check=True, timeout=30)
            assert called.stdout == "b'x'\n"
            assert "1gbit" in link.speed
    except NoLink as reason:
        pytest.skip(str(reason))


@pytest.mark.slow
def test_over_a_switch_with_slow_cables_every_way_of_the_sums_is_measured(tmp_path: Path) -> None:
    if reason := obstacle():
        pytest.skip(reason)
    said = benchmark("topologies", "--quick", "--workers=3", f"--output={tmp_path}")
    if "Skipped" in said:
        pytest.skip(said)
    rows = json.loads((tmp_path / "topologies.json").read_text())["rows"]
    assert [row["way"] for row in rows] == 2 * ["direct", "ring", "tree", "1 server"]
    assert all(min(row["seconds"]) > 0 < row["forecast"]["seconds"] for row in rows)


@pytest.mark.slow
def test_the_recovery_benchmark_kills_a_worker_and_times_the_others(warm: None, tmp_path: Path) -> None:
    benchmark("recovery", "--quick", "--kills=1", f"--output={tmp_path}")
    (recovery,) = json.loads((tmp_path / "recovery.json").read_text())["models"]["tiny"]
    assert recovery["replaced"] > 0
    assert set(recovery["parts"]) == {"regroup", "form", "copy"}


STRATEGIES = ["--quick", "--models=digits", "--workers=2"]


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("growth", ["--quick"]),
        ("accuracy", ["--quick"]),
        ("adaptive", ["--quick", "--workers=2"]),
        ("strategies", [*STRATEGIES, "--strategy=all-reduce", "--strategy=local-sgd"]),
        ("device-memory", ["--quick"]),
        ("monitor", ["--quick", "--model=tiny", "--step-ms=20"]),
        ("soak", ["--minutes=0.12", "--pause=1", "--rare=2", "--workers=3"]),
    ],
)
def test_the_benchmarks_of_elastic_jobs_find_something(
    name: str, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "soak":
        monkeypatch.delenv(SHARED_FORK_SERVERS, raising=False)  # it looks for what is below its launcher
    benchmark(name, *options, f"--output={tmp_path}")
    found = json.loads((tmp_path / f"{name}.json").read_text())
    if name == "growth":
        changes = found["models"]["tiny"]["changes"]
        assert changes[0]["before"] < changes[0]["after"]
        assert changes[-1]["after"] == 1
        assert set(changes[0]["parts"]) == {"regroup", "form", "copy", "first step"}
        assert found["models"]["tiny"]["starting"].keys() == found["models"]["tiny"]["busy"].keys() == {"1", "2"}
    elif name == "accuracy":
        assert found["tuned"].keys() == {"0.1"}
        ends = {way: ended[0] for way, ended in found["compared"].items()}
        assert ends["AdaScale"]["steps"] < ends["small batch"]["steps"] < 8 * ends["AdaScale"]["steps"]
        assert ends["AdaScale"]["accuracy"] > 0.5
    elif name == "adaptive":
        ways = found["found"]
        sizes = {way: {look["batch_size"] for look in runs[0]} for way, runs in ways.items()}
        assert sizes["batch 64, rate 0.1"] == {64}
        assert max(sizes["noise scale, rate by √"]) > 64
        assert all(len(runs[0]) == 3 and runs[0][-1]["cpu_seconds"] > 0 for runs in ways.values())
    elif name == "strategies":
        ways = {
            (one["workers"], one["strategy"]): one["runs"][0] for one in found["found"]
        }  # they take turns by chance
        serial, all_reduce, local = ways[1, "all-reduce"], ways[2, "all-reduce"], ways[2, "local-sgd"]
        assert serial["digest"] == all_reduce["digest"] != local["digest"]
        assert 0 < local["sent_bytes"] < all_reduce["sent_bytes"]
    elif name == "device-memory":
        most = max(found["slices 2"], found["stages 2"])
        assert 0 < most < 0.9 * found["alone"]  # 0.79 to 0.83 in several runs of so small a model
    elif name == "monitor":
        assert [len(turns) for turns in found["seconds"].values()] == [1, 1]
        assert all(seconds > 0 for turns in found["seconds"].values() for seconds in turns[0])
    else:
        assert found["found"]["digest"] == found["found"]["serial"]
        assert found["found"]["left"] == []
        done_to_it = found["found"]["done"]
        assert done_to_it.get("kill oldest", 0) + done_to_it.get("kill coordinator", 0) >= 1


def test_the_sockets_benchmark_loses_workers_and_lets_others_join_over_tls(tmp_path: Path) -> None:
    few = ["--workers=16", "--processes=2", "--seconds=1", "--losses=2", "--joins=2"]
    benchmark("coordinator-sockets", *few, f"--output={tmp_path}")
    found = json.loads((tmp_path / "coordinator-sockets.json").read_text())["found"]
    assert (len(found["losses"]), len(found["joins"]), found["retries"]) == (2, 2, 0)
    for change in (found["start"], *found["losses"], *found["joins"]):
        assert 0 < change["roster_s"] < change["formed_s"]
        assert change["sent"] > 16 * 14  # each of 14 members or more has a roster of them all
    assert found["alone"]["memory"] < found["calm"][1]["memory"]
    assert found["delays"]
    assert 0 < found["share"] < 1
