"""A forked fork server is what a launcher would have started, or the launcher starts one itself."""

import asyncio
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from forked import LOOK, PATIENCE_S, Host, cold, launcher_and_forks, seen
from forks.client import SHARED_FORK_SERVERS, NotForked, asked
from forks.commands import start
from unisono.launch.tuning import Tuning
from unisono.launch.worker_start import FORK_SERVER, WarmStart

pytestmark = [
    pytest.mark.procs,
    pytest.mark.slow,  # what the tests themselves are made of
    pytest.mark.usefixtures("warm"),
    pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only"),
]


def environment(**further: str) -> dict[str, str]:
    """That of the workers of a job that is started without further options."""
    set_by_launchers = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    return {**os.environ, **set_by_launchers, **Tuning.of_this_process().variables, **further}


@asynccontextmanager
async def fork_server(folder: Path, **further: str) -> AsyncIterator[Host]:
    folder.mkdir(exist_ok=True)
    log = folder / "template.log"
    warm = await WarmStart.open(environment(**further), log)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await warm.ready()
        assert log.read_text() == ""  # it was forked
        yield Host(folder, warm)
    finally:
        await warm.close()


Test = Callable[[Path], None]


def in_a_loop(test: Callable[[Path], Coroutine[None, None, None]]) -> Test:
    """Run a test in an event loop."""

    def run(tmp_path: Path) -> None:
        asyncio.run(test(tmp_path))

    run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
    return run


# --- what comes of it


@in_a_loop
async def test_its_workers_see_what_a_fresh_one_sees(folder: Path) -> None:
    (folder / "look.py").write_text(LOOK)
    variables = {"GREETING": "hello", "UNISONO_WORKER": "w1"}
    async with fork_server(folder) as host:
        forked = await (await host.start("look.py", "-m", "x", "", UNISONO_OWN="1", **variables)).ended()
    fresh = cold(folder, "look.py", "-m", "x", "", UNISONO_OWN="1", PYTHONHASHSEED="0", **variables)
    assert (forked.err, forked.code) == ("", 0)
    assert "True hello" in forked.out
    assert [line.replace("'UNISONO_RUN_DIR', ", "") for line in seen(forked)] == seen(fresh)


@in_a_loop
async def test_its_workers_have_no_descriptor_but_the_standard_ones(folder: Path) -> None:
    async with fork_server(folder) as host:
        ended = await host.run(
            "import os; print(sorted(map(int, os.listdir('/proc/self/fd'))), os.environ['JOB'])", JOB="a"
        )
    assert ended.out == "[0, 1, 2, 3] a\n", ended.err  # 3 is that of the listing


@in_a_loop
async def test_variables_are_those_of_the_job_and_of_no_other(folder: Path) -> None:
    show = "import os; print([os.environ.get(name) for name in ('EPOCHS', 'PACE_S', 'UNISONO_SHARDS')], os.getcwd())"
    async with (
        fork_server(folder / "a", EPOCHS="3", UNISONO_SHARDS="5") as one,
        fork_server(folder / "b", PACE_S="1") as two,
    ):
        assert (await one.run(show)).out == f"['3', None, '5'] {folder / 'a'}\n"
        assert (await two.run(show)).out == f"[None, '1', None] {folder / 'b'}\n"


@in_a_loop
async def test_what_the_launcher_ignores_its_fork_server_ignores(folder: Path) -> None:
    show = "import signal; print([signal.getsignal(each).name for each in (signal.SIGHUP, signal.SIGTERM)])"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        async with fork_server(folder) as host:
            assert (await host.run(show)).out == "['SIG_IGN', 'SIG_DFL']\n"
    finally:
        signal.signal(signal.SIGHUP, before)


ABOVE = """
import json, os, psutil
coordinator = json.load(open(os.environ["UNISONO_RUN_DIR"] + "/coordinator.json"))["pid"]
for process in (os.getppid(), coordinator):
    print("above:", *psutil.Process(process).parent().cmdline())
"""


@pytest.mark.parametrize("is_forked", [True, False])
def test_launchers_have_their_fork_servers_and_coordinators_forked(is_forked: bool, tmp_path: Path) -> None:
    (tmp_path / "above.py").write_text(ABOVE)
    words = ("run", "-n", "1", "--max-restarts", "0", "--run-dir", "run", "above.py")
    output = tmp_path / "output"
    with output.open("wb") as out:
        if is_forked:
            assert start(*words, cwd=tmp_path, stdout=out).wait(PATIENCE_S) == 0
        else:
            command = [sys.executable, "-m", "unisono", *words]
            subprocess.run(command, cwd=tmp_path, stdout=out, check=True, timeout=PATIENCE_S)
    for name in ("torch", "commands"):
        assert re.search(rf"above: .* -m forks.shared_server {name} ", output.read_text()), output.read_text()


# --- how it ends


@in_a_loop
async def test_the_end_of_one_job_ends_its_workers_and_no_others(folder: Path) -> None:
    wait = "import signal; print('waiting', flush=True); signal.pause()"
    async with fork_server(folder / "a") as stays:
        (folder / "a" / "wait.py").write_text(wait)
        staying = await stays.start("wait.py")
        async with fork_server(folder / "b") as goes:
            (folder / "b" / "wait.py").write_text(wait)
            going = [await goes.start("wait.py") for _ in range(2)]
            for each in (staying, *going):
                await each.wrote("waiting")
            gone = [psutil.Process(pid) for pid in (goes.warm.pid, *(each.worker.pid for each in going))]
        assert not psutil.wait_procs(gone, timeout=PATIENCE_S)[1]
        assert [(await each.ended()).code for each in going] == [-signal.SIGKILL] * 2
        assert psutil.Process(staying.worker.pid).status() == psutil.STATUS_SLEEPING
        os.kill(staying.worker.pid, signal.SIGTERM)
        assert (await staying.ended()).code == -signal.SIGTERM


def test_fork_server_and_workers_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with launcher_and_forks(tmp_path, environment()) as (launcher, forks):
        assert (tmp_path / "log").read_text() == ""
        launcher.kill()
        assert not psutil.wait_procs(forks, timeout=PATIENCE_S)[1]


@in_a_loop
async def test_workers_whose_fork_server_is_killed_are_lost_and_the_shared_one_serves_on(folder: Path) -> None:
    async with fork_server(folder) as host:
        (folder / "wait.py").write_text("import signal; print('waiting', flush=True); signal.pause()")
        started = await host.start("wait.py")
        await started.wrote("waiting")
        os.kill(host.warm.pid, signal.SIGKILL)
        assert (await started.ended()).code == -signal.SIGKILL
    async with fork_server(folder / "next") as host:
        assert (await host.run("print('here')")).out == "here\n"


# --- when it does not help

ASKS = """
import os
from forks.client import NotForked, asked, code_in, pid_in
from unisono.launch.worker_start import FORK_SERVER

try:
    nothing = os.open(os.devnull, os.O_RDWR)
    with asked((FORK_SERVER, str(nothing)), os.environ, dict.fromkeys(range(3), nothing)) as channel:
        pid_in(channel.recv(1000))
        print("born", code_in(channel))
except NotForked as why:
    print(why)
"""


@pytest.mark.parametrize(
    ("launcher", "answer"),
    [
        ("exec", "born 1"),
        ("OMP_NUM_THREADS=2 exec", "the variable OMP_NUM_THREADS differs"),
        ("LD_BIND_NOW=1 exec", "the variable LD_BIND_NOW differs"),
        ("unset MKL_NUM_THREADS; exec", "the variable MKL_NUM_THREADS differs"),
        ("umask 0123; exec", "Umask differs"),
        ("ulimit -S -n 100; exec", "limits differs"),
        ("exec nice -n 1", "priority differs"),
        ('PYTHONPATH="$PYTHONPATH:here" exec', "module path differs"),
    ],
)
def test_a_launcher_whose_workers_would_be_others_is_refused(launcher: str, answer: str, tmp_path: Path) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", f"{launcher} {shlex.join([sys.executable, '-c', ASKS])}"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert (done.stdout, done.stderr) == (f"{answer}\n", "")


@in_a_loop
async def test_who_hangs_up_or_comes_from_a_folder_that_is_gone_does_not_keep_it_from_others(folder: Path) -> None:
    for words in (b"", None):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as rude:
            rude.connect(str(Path(os.environ[SHARED_FORK_SERVERS], "torch")))
            if words is not None:
                rude.send(words)
    gone = folder / "gone"
    gone.mkdir()
    before = Path.cwd()
    os.chdir(gone)
    gone.rmdir()
    try:
        with pytest.raises(NotForked, match="No such file"):
            asked((FORK_SERVER, "0"), environment(), {})
    finally:
        os.chdir(before)
    async with fork_server(folder) as host:
        assert (await host.run("print('here')")).out == "here\n"
