"""The benchmarks, with real processes and few steps: what they measure here means nothing, but they measure it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.crew import Crew, CrewFailed
from benchmarks.link import Cable, NoLink, slow_link
from benchmarks.task import Task, Trained

pytestmark = [pytest.mark.procs, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]


def benchmark(*words: str) -> str:
    """Run a benchmark to its end. Its own process is this one, which has torch loaded; its jobs and crews are not."""
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


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
