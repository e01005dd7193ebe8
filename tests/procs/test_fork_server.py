"""A worker that is forked from the fork server is what a fresh one would be, and is there sooner."""

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from forked import LOOK, PATIENCE_S, Host, cold, environment, launcher_and_forks, seen
from unisono.launch.worker_start import ColdStart, WarmStart

pytestmark = [
    pytest.mark.procs,
    pytest.mark.timeout(300),  # torch is loaded twice, on a machine that may have other things to do
    pytest.mark.skipif(sys.platform != "linux", reason="a worker ends with its fork server by what only Linux has"),
]


@asynccontextmanager
async def fork_server(folder: Path, **further: str) -> AsyncIterator[Host]:
    warm = await WarmStart.open(environment(**further), folder / "template.log")
    try:
        async with asyncio.timeout(PATIENCE_S):
            await warm.ready()
        yield Host(folder, warm)
    finally:
        await warm.close()


class Shared:
    """A fork server that serves several tests, and the event loop that it is served in."""

    def __init__(self, runner: asyncio.Runner, warm: WarmStart) -> None:
        self.runner, self.warm = runner, warm


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    with asyncio.Runner() as runner:
        warm = runner.run(WarmStart.open(environment(), tmp_path_factory.mktemp("template") / "template.log"))
        yield Shared(runner, warm)
        runner.run(warm.close())


Test = Callable[[Path, Shared], None]


def with_template(test: Callable[[Host], Coroutine[Any, Any, None]]) -> Test:
    """Run a test in an event loop, with the fork server that it shares with others."""

    def run(tmp_path: Path, shared: Shared) -> None:
        shared.runner.run(test(Host(tmp_path, shared.warm)))

    run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
    return run


# --- what it sees


@with_template
async def test_a_forked_worker_sees_what_a_fresh_one_sees(host: Host) -> None:
    variables = {"GREETING": "hello", "UNISONO_WORKER": "w1"}
    (host.folder / "look.py").write_text(LOOK)
    forked = await (await host.start("look.py", "-m", "x", "", **variables)).ended()
    fresh = cold(host.folder, "look.py", "-m", "x", "", **variables)
    assert (forked.err, forked.code) == ("", 0)

    assert "True hello" in forked.out
    assert seen(forked) == seen(fresh)


@with_template
async def test_a_forked_worker_has_no_descriptor_but_the_standard_ones(host: Host) -> None:
    body = """
        import os
        print(sorted(set(map(int, os.listdir("/proc/self/fd")))))
        held = [os.open("/dev/null", os.O_RDONLY) for _ in range(8)]
        import gc; gc.collect()  # an object of the fork server that still owned a number would close it now
        print(all(os.fstat(descriptor) for descriptor in held), held)
    """
    ended = await host.run(body)
    assert ended.out == f"[0, 1, 2, 3]\nTrue {list(range(3, 11))}\n", ended.err  # 3 is that of the listing


@with_template
async def test_generators_are_seeded_anew_in_each_worker(host: Host) -> None:
    draw = "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.rand(1).item())"
    drawn = [(await host.run(draw)).out.split() for _ in range(3)]
    for each in zip(*drawn, strict=True):
        assert len(set(each)) == 3
    random.seed(0)
    assert str(random.random()) not in {each[0] for each in drawn}


# --- how it ends


@with_template
async def test_a_worker_that_has_just_been_forked_can_be_killed_by_its_group(host: Host) -> None:
    (host.folder / "wait.py").write_text("import signal; signal.pause()")
    everywhere = os.sched_getaffinity(host.warm.pid)
    os.sched_setaffinity(host.warm.pid, {min(everywhere)})  # so a worker runs after the fork server, not beside it
    try:
        for _ in range(20):
            started = await host.start("wait.py")
            os.killpg(started.worker.pid, signal.SIGKILL)
            assert (await started.ended()).code == -signal.SIGKILL
    finally:
        os.sched_setaffinity(host.warm.pid, everywhere)


ENDS = (
    "import sys; sys.exit(7)",
    "import sys; sys.exit('words')",
    "1 / 0",
    "import atexit, sys; atexit.register(print, 'at exit'); sys.exit(3)",
    "import atexit, threading, time\natexit.register(print, 'at exit')\n"
    "threading.Thread(target=lambda: (time.sleep(0.05), print('thread', __name__))).start()",
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "import os; os._exit(9)",
    "import multiprocessing\nif __name__ == '__main__':\n    multiprocessing.get_context('spawn').Process("
    "target=print, args=('spawned',)).start()",
)


@pytest.mark.slow
@with_template
async def test_a_forked_worker_ends_as_a_fresh_one_does(host: Host) -> None:
    for number, body in enumerate(ENDS):
        forked = await host.run(body)
        fresh = cold(host.folder, f"script-{number}.py")
        assert (forked.code, forked.out, forked.err) == (fresh.code, fresh.out, fresh.err)


@with_template
async def test_an_exception_is_recorded_under_the_workers_id(host: Host) -> None:
    ended = await host.run("raise ValueError('boom')", UNISONO_WORKER="w3", UNISONO_RUN_DIR=str(host.folder / "run"))
    record = json.loads((host.folder / "run" / "logs" / "w3.error.json").read_text())
    assert (ended.code, record["rank"], record["type"], record["message"]) == (1, "w3", "ValueError", "boom")


@pytest.mark.slow
@with_template
async def test_many_workers_run_at_once_and_each_end_is_told(host: Host) -> None:
    (host.folder / "exit.py").write_text("import sys; sys.exit(int(sys.argv[1]))")
    started = [await host.start("exit.py", str(code)) for code in range(6)]
    assert [(await each.ended()).code for each in started] == list(range(6))


def test_a_fork_server_that_is_killed_takes_its_workers_with_it(tmp_path: Path) -> None:
    async def go() -> None:
        async with fork_server(tmp_path) as host:
            (host.folder / "wait.py").write_text("import signal; print('waiting', flush=True); signal.pause()")
            started = [await host.start("wait.py") for _ in range(2)]
            for each in started:
                await each.wrote("waiting")
            processes = [psutil.Process(each.worker.pid) for each in started]
            os.kill(host.warm.pid, signal.SIGKILL)
            assert [(await each.ended()).code for each in started] == [-signal.SIGKILL] * 2
            assert not psutil.wait_procs(processes, timeout=PATIENCE_S)[1]
            with pytest.raises(ColdStart, match="has ended"):
                await host.start("wait.py")

    asyncio.run(go())


def test_a_fork_server_ends_with_its_agent(tmp_path: Path) -> None:
    with launcher_and_forks(tmp_path, environment()) as (agent, forks):
        agent.kill()
        assert not psutil.wait_procs(forks, timeout=PATIENCE_S)[1]


# --- when it cannot


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "words"),
    [
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", "2 threads run in"),
        ("import socket; kept = socket.socket()", "opened a socket"),
    ],
)
def test_a_library_that_has_started_a_thread_or_opened_a_socket_makes_the_start_cold(
    library: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(library)

    async def go() -> None:
        with pytest.raises(ColdStart, match=words):
            async with fork_server(tmp_path, PYTHONPATH=str(tmp_path)):
                pass

    asyncio.run(go())


@with_template
async def test_a_request_that_is_too_long_is_refused_and_the_next_one_is_served(host: Host) -> None:
    with pytest.raises(ColdStart, match="cannot be asked"):
        await host.start("script.py", "x" * 4_000_000)
    assert (await host.run("print('here')")).out == "here\n"


def test_a_fork_server_that_fails_to_load_is_a_cold_start_and_its_words_are_kept(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch today')")

    async def go() -> None:
        with pytest.raises(ColdStart, match="has ended"):
            async with fork_server(tmp_path, PYTHONPATH=str(tmp_path)):
                pass

    asyncio.run(go())
    assert "no torch today" in (tmp_path / "template.log").read_text()


def test_a_fork_server_that_is_closed_while_it_loads_is_gone(tmp_path: Path) -> None:
    async def go() -> int:
        warm = await WarmStart.open(environment(), tmp_path / "template.log")
        await warm.close()
        with suppress(ColdStart):
            await warm.ready()
        return warm.pid

    assert not psutil.pid_exists(asyncio.run(go()))
