"""The agent of an elastic job, with real workers, and with a coordinator that says what the test wants."""

import asyncio
import os
import signal
import textwrap
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.http11 import Request, Response

from said import options
from unisono.errors import LaunchError
from unisono.launch.elastic.address import Address
from unisono.launch.elastic.agent import ElasticAgent, Joined
from unisono.launch.elastic.elastic_settings import ElasticSettings, Range
from unisono.launch.outcome import Outcome, open_folder, report
from unisono.launch.settings import LaunchSettings, Script
from unisono.launch.terminal import Terminal
from unisono.membership.messages import (
    AgentHello,
    AgentLeaving,
    End,
    FromAgent,
    JobOver,
    LeftOut,
    Probe,
    Probed,
    Refused,
    Start,
    Target,
    ToAgent,
    TurnedAway,
    Welcome,
    WorkerEnded,
    from_agent,
)
from unisono.membership.probe import ProbeListener, probe

pytestmark = pytest.mark.procs

PATIENCE_S = 60.0
TOKEN = "the token of this job"  # noqa: S105

PREAMBLE = """
import os, signal, sys
from pathlib import Path
me = os.environ["UNISONO_WORKER"]

def forever():
    print(f"waiting {os.getpid()}", flush=True)
    while True:
        signal.pause()
"""


M = TypeVar("M", bound=FromAgent)


class Office:
    """A stand-in for the coordinator: the test speaks for it."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[FromAgent] = asyncio.Queue()
        self.connections = 0
        self._connection: ServerConnection | None = None

    async def serve(self, connection: ServerConnection) -> None:
        self._connection = connection
        self.connections += 1
        async for text in connection:
            message = from_agent.validate_json(text)
            if isinstance(message, AgentHello):
                await connection.send(Welcome(joins=False).model_dump_json())
            self.said.put_nowait(message)

    def let_in(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.path == "/agent" and request.headers.get("Authorization") == f"Bearer {TOKEN}":
            return None
        return connection.respond(HTTPStatus.UNAUTHORIZED, "")

    async def say(self, message: ToAgent) -> None:
        assert self._connection is not None
        await self._connection.send(message.model_dump_json())

    async def hears(self, kind: type[M]) -> M:
        """The next message, which has to be of this kind."""
        async with asyncio.timeout(PATIENCE_S):
            message = await self.said.get()
        assert isinstance(message, kind), message
        return message

    async def hang_up(self) -> None:
        assert self._connection is not None
        await self._connection.close()


class Host:
    """An agent in a folder, its coordinator, and what its terminal shows."""

    def __init__(self, folder: Path, office: Office, address: Address) -> None:
        self.folder, self.office, self.address = folder, office, address
        self.run_folder = open_folder(folder / "run", "train")
        self.out, self.err = StringIO(), StringIO()
        self._agent: asyncio.Task[Outcome] | None = None

    async def begin(
        self, body: str, *args: str, token: str = TOKEN, grace_s: float = 30.0, failure_timeout_s: float = 30.0
    ) -> AgentHello:
        """Start the agent; its hello."""
        self.enter(body, *args, token=token, grace_s=grace_s, failure_timeout_s=failure_timeout_s)
        return await self.office.hears(AgentHello)

    def enter(
        self, body: str, *args: str, token: str = TOKEN, grace_s: float = 30.0, failure_timeout_s: float = 30.0
    ) -> None:
        path = self.folder / "train.py"
        path.write_text(PREAMBLE + textwrap.dedent(body))
        launch = LaunchSettings(Script(str(path), args), workers=3, options=options(grace_s=grace_s, warm_start=False))
        settings = ElasticSettings(launch, Range(1, 3), failure_timeout_s=failure_timeout_s)
        joined = Joined(Address(self.address.url, token), self.folder / "token")
        agent = ElasticAgent(settings, self.run_folder, Terminal(self.out, self.err), joined)
        self._agent = asyncio.create_task(agent.run())

    async def start(self, *workers: str, delay_s: float = 0.0) -> None:
        await self.office.say(Start(workers=workers, delay_s=delay_s))

    async def wrote(self, worker: str, words: str = "waiting") -> None:
        """Until a worker has written these words."""
        log = self.run_folder.log_of(worker)
        async with asyncio.timeout(PATIENCE_S):
            while not log.exists() or words not in log.read_text():
                await asyncio.sleep(0.005)

    def pid_of(self, worker: str) -> int:
        """The process of a worker that waits."""
        return int(self.run_folder.log_of(worker).read_text().split("waiting")[1])

    async def end(self, over: JobOver | None = None) -> Outcome:
        """The agent's end, after the coordinator has said that the job is over."""
        assert self._agent is not None
        if over is not None:
            await self.office.say(over)
        async with asyncio.timeout(PATIENCE_S):
            return await self._agent

    async def close(self) -> None:
        if self._agent is not None and not self._agent.done():
            self._agent.cancel()
            await asyncio.gather(self._agent, return_exceptions=True)


@asynccontextmanager
async def host(folder: Path) -> AsyncIterator[Host]:
    office = Office()
    async with serve(office.serve, "127.0.0.1", 0, process_request=office.let_in) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        found = Host(folder, office, Address(f"http://127.0.0.1:{port}", TOKEN))
        try:
            yield found
        finally:
            await found.close()


Test = Callable[[Path], None]


def with_host(test: Callable[[Host], Coroutine[Any, Any, None]]) -> Test:
    """Run a test in an event loop."""

    def run(tmp_path: Path) -> None:
        async def go() -> None:
            async with host(tmp_path) as found:
                await test(found)

        asyncio.run(go())

    run.__name__, run.__doc__, run.__module__ = getattr(test, "__name__", ""), test.__doc__, test.__module__
    return run


DONE = JobOver(digest="abc", main="w1", finished=("w1", "w2"))
FAILED = JobOver(reason="w1 on host a: it ended with code 1")
PREEMPTED = JobOver(preempted=True, reason="all were asked to leave")


@with_host
async def test_an_agent_answers_probes_and_probes_others_and_its_terminal_says_that_it_is_left_out(host: Host) -> None:
    hello = await host.begin("")
    mine = Target(agent=hello.agent, host="here", address=hello.probes)
    async with asyncio.timeout(PATIENCE_S):
        assert await probe([mine], TOKEN, PATIENCE_S, back=mine) == {hello.agent: ""}
    other = ProbeListener("other", TOKEN)
    await other.listen("127.0.0.1")
    target = Target(agent="other", host="there", address=other.address)
    await host.office.say(Probe(targets=(target,)))
    assert await host.office.hears(Probed) == Probed(reached=("other",))
    await other.close()
    await host.office.say(Probe(targets=(target,)))
    (unreached,) = (await host.office.hears(Probed)).unreached
    assert unreached.agent == "other"
    await host.office.say(LeftOut(reason="here does not reach there"))
    await host.end(DONE)
    assert "this host takes no part for now: here does not reach there" in host.err.getvalue()


@with_host
async def test_a_host_whose_workers_never_take_part_leaves_with_their_error(host: Host) -> None:
    await host.begin("raise ValueError('boom')")
    await host.start("w5")
    assert (await host.office.hears(WorkerEnded)).error == "ValueError: boom"
    await host.office.say(TurnedAway(reason="w5 on host here: ValueError: boom"))
    await host.office.hears(AgentLeaving)
    outcome = await host.end(PREEMPTED)
    assert outcome.exit_code == 1
    assert "w5" in outcome.summary()
    assert report(outcome, host.run_folder).rstrip().endswith("ValueError: boom")
    assert "the job goes on without w5 on host here: ValueError: boom" in host.err.getvalue()


@with_host
async def test_a_host_of_which_one_worker_never_takes_part_trains_on_and_has_done_well(host: Host) -> None:
    await host.begin("")
    await host.start("w1", "w2")
    for _ in range(2):
        await host.office.hears(WorkerEnded)
    await host.office.say(TurnedAway(reason="w2 on host here: its script ended before the others'", places=2))
    assert (await host.end(JobOver(digest="abc", main="w1", finished=("w1",)))).exit_code == 0
    assert "goes on without w2 on host here: its script ended before" in host.err.getvalue()


@with_host
async def test_a_host_of_which_no_worker_ever_takes_part_says_so_in_the_end(host: Host) -> None:
    await host.begin("")
    await host.start("w2")
    await host.office.hears(WorkerEnded)
    await host.office.say(TurnedAway(reason="w2 on host here: its script ended before the others'", places=2))
    outcome = await host.end(JobOver(digest="abc", main="w1", finished=("w1",)))
    assert (outcome.exit_code, outcome.digest) == (1, "")
    assert "goes on without w2 on host here: its script ended before" in outcome.summary()


@with_host
async def test_a_host_that_was_turned_away_and_takes_part_in_the_end_has_done_well(host: Host) -> None:
    await host.begin("exit(1 if me == 'w1' else 0)")
    await host.start("w1")
    await host.office.hears(WorkerEnded)
    await host.office.say(TurnedAway(reason="w1 on host here: it ended with code 1", places=2))
    await host.office.say(TurnedAway(places=3))
    await host.start("w2")
    await host.office.hears(WorkerEnded)
    assert (await host.end(JobOver(digest="abc", main="w0", finished=("w0", "w2")))).exit_code == 0


@with_host
async def test_workers_are_started_by_their_ids_and_their_ends_are_told(host: Host) -> None:
    hello = await host.begin("""
        print("hello from", me, os.environ["UNISONO_LOCAL_RANK"], "UNISONO_RANK" in os.environ)
        print(os.environ["UNISONO_COORDINATOR"], os.environ["UNISONO_TOKEN_FILE"])
    """)
    assert (hello.workers, hello.running) == (3, ())
    await host.start("w1", "w2")
    ended = [await host.office.hears(WorkerEnded) for _ in range(2)]
    assert {(each.worker, each.code, each.error) for each in ended} == {("w1", 0, ""), ("w2", 0, "")}
    outcome = await host.end(DONE)
    assert (outcome.exit_code, report(outcome, host.run_folder)) == (0, "")
    where = f"{host.address.url} {host.folder / 'token'}\n"
    assert host.run_folder.log_of("w1").read_text() == f"hello from w1 0 False\n{where}"
    assert f"[w2] hello from w2 1 False\n[w2] {where}" in host.out.getvalue()


@with_host
async def test_the_place_of_a_worker_that_has_ended_is_given_to_the_next(host: Host) -> None:
    await host.begin("print(os.environ['UNISONO_LOCAL_RANK'], flush=True)\nif me != 'w1': forever()")
    await host.start("w1")
    await host.office.hears(WorkerEnded)
    await host.start("w2", "w3")
    for worker, place in (("w2", "0"), ("w3", "1")):
        await host.wrote(worker)
        assert host.run_folder.log_of(worker).read_text().startswith(place)
    await host.end(FAILED)


@with_host
async def test_an_exception_of_the_script_is_told_and_is_the_jobs_last_word(host: Host) -> None:
    await host.begin("if me == 'w2': raise ValueError('boom')\nforever()")
    await host.start("w1")
    await host.wrote("w1")
    await host.start("w2")
    ended = await host.office.hears(WorkerEnded)
    assert (ended.worker, ended.code, ended.error) == ("w2", 1, "ValueError: boom")
    outcome = await host.end(FAILED)
    assert (outcome.exit_code, outcome.error and outcome.error["worker"]) == (1, "w2")
    said = report(outcome, host.run_folder)
    assert said.startswith("unisono: worker w2 on host ")
    assert said.endswith("ValueError: boom\n")


@with_host
async def test_what_only_follows_from_the_loss_of_another_worker_is_no_word_about_this_one(host: Host) -> None:
    await host.begin("from unisono.errors import WorkerLost\nraise WorkerLost('rank 1 is gone')")
    await host.start("w1")
    ended = await host.office.hears(WorkerEnded)
    assert (ended.code, ended.error) == (1, "")
    assert (await host.end(FAILED)).exit_code == 1


@with_host
async def test_a_loss_that_the_job_survived_is_not_its_end(host: Host) -> None:
    await host.begin("if me == 'w1': os.kill(os.getpid(), signal.SIGKILL)")
    await host.start("w1")
    assert (await host.office.hears(WorkerEnded)).code == -signal.SIGKILL
    await host.start("w2")
    await host.office.hears(WorkerEnded)
    assert (await host.end(JobOver(digest="abc", main="w2", finished=("w2",)))).exit_code == 0


@with_host
async def test_a_script_that_fails_after_the_job_is_done_is_a_failure(host: Host) -> None:
    await host.begin("signal.signal(signal.SIGUSR2, lambda *_: sys.exit(5))\nforever()")
    await host.start("w1")
    await host.wrote("w1")
    await host.office.say(DONE)
    await host.office.hang_up()
    await host.office.hears(AgentHello)  # so it has heard that the job is done
    os.kill(host.pid_of("w1"), signal.SIGUSR2)
    outcome = await host.end()
    assert (outcome.exit_code, "worker w1 on host" in outcome.summary()) == (5, True)


@pytest.mark.parametrize("where", ["its last lines", "an exit handler", "its end"])
@pytest.mark.parametrize("victim", ["w1", "w2"])
def test_after_the_end_the_main_worker_is_missed_as_long_as_its_script_has_something_to_do(
    victim: str, where: str, tmp_path: Path
) -> None:
    with_host(partial(_kill_after_the_end, victim=victim, where=where))(tmp_path)


async def _kill_after_the_end(host: Host, victim: str, where: str) -> None:
    await host.begin(f"""
        import atexit
        where = {where!r} if me == {victim!r} else ""
        class Last:
            def __del__(self, write=os.write, me=os.getpid(), pause=signal.pause):  # other names are gone by then
                write(1, b"waiting %d" % me + bytes([10]))
                while True: pause()
        if where == "its end": last = Last()  # Python lets go of it after all exit handlers
        if where == "an exit handler": atexit.register(forever)
        if where == "its last lines": forever()
    """)
    await host.start("w1", "w2")
    await host.wrote(victim)
    await host.office.say(DONE)
    assert isinstance(await host.office.hears(WorkerEnded), WorkerEnded)
    await host.office.hang_up()
    await host.office.hears(AgentHello)  # so it has heard that the job is done
    os.kill(host.pid_of(victim), signal.SIGKILL)
    outcome = await host.end()
    is_cut = where != "its end"
    is_missed = is_cut and victim == "w1"
    assert outcome.exit_code == (137 if is_missed else 0)
    assert ("training was complete" in report(outcome, host.run_folder)) == is_missed
    told = [line for line in host.err.getvalue().splitlines() if "is not missed" in line]
    assert ["worker w2 on host" in line for line in told] == [True] * (is_cut and victim == "w2")


@with_host
async def test_a_worker_that_hangs_says_where_before_it_is_killed(host: Host) -> None:
    await host.begin("def stuck_here(): forever()\nstuck_here()")
    await host.start("w1")
    await host.wrote("w1")
    await host.office.say(End(workers=("w1",), how="kill"))
    assert (await host.office.hears(WorkerEnded)).code == -signal.SIGKILL
    assert "in stuck_here" in host.run_folder.log_of("w1").read_text()
    outcome = await host.end(JobOver(reason="w1 gave no sign"))
    assert (outcome.exit_code, outcome.summary()) == (1, "w1 gave no sign")


@with_host
async def test_a_worker_that_is_to_leave_gets_sigterm_and_what_it_started_goes_with_it(host: Host) -> None:
    await host.begin("""
        import subprocess
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
        print("child", child.pid, flush=True)
        forever()
    """)
    await host.start("w1")
    await host.wrote("w1")
    await host.office.say(End(workers=("w1",), how="leave"))
    assert (await host.office.hears(WorkerEnded)).code == 75
    child = int(host.run_folder.log_of("w1").read_text().split()[1])
    async with asyncio.timeout(PATIENCE_S):
        while _runs(child):
            await asyncio.sleep(0.005)
    assert (await host.end(PREEMPTED)).exit_code == 75


@with_host
async def test_a_worker_that_waits_for_its_start_can_be_ended_before_it(host: Host) -> None:
    await host.begin("print('started')")
    await host.start("w1", delay_s=1000.0)
    await host.office.say(End(workers=("w1",), how="leave"))
    assert (await host.office.hears(WorkerEnded)).code == -signal.SIGTERM
    assert not host.run_folder.log_of("w1").exists()
    await host.end(PREEMPTED)


@with_host
async def test_a_worker_that_cannot_be_started_is_told_as_one_that_has_ended(host: Host) -> None:
    await host.begin("pass", "x" * 4_000_000)
    await host.start("w1")
    ended = await host.office.hears(WorkerEnded)
    assert ended.code == 126
    assert "could not be started" in ended.error
    assert (await host.end(FAILED)).exit_code == 126


# --- the coordinator comes and goes


@with_host
async def test_after_a_lost_connection_the_agent_says_who_runs_and_who_has_ended(host: Host) -> None:
    await host.begin("if me != 'w1': forever()")
    await host.start("w1", "w2")
    first = await host.office.hears(WorkerEnded)
    await host.wrote("w2")
    await host.office.hang_up()
    hello = await host.office.hears(AgentHello)
    assert set(hello.running) == {"w1", "w2"}  # w1 as well: its end is told again at once
    assert await host.office.hears(WorkerEnded) == first
    await host.start("w2", "w3")  # w2 again, by a coordinator that does not know whether it was heard
    await host.wrote("w3")
    assert host.run_folder.log_of("w2").read_text().count("waiting") == 1
    await host.end(FAILED)


@with_host
async def test_a_worker_that_ends_while_the_coordinator_is_away_is_told_when_it_is_back(host: Host) -> None:
    await host.begin("forever()", failure_timeout_s=PATIENCE_S)
    await host.start("w1")
    await host.wrote("w1")
    host.office.said = asyncio.Queue()
    await host.office.hang_up()
    os.kill(host.pid_of("w1"), signal.SIGKILL)
    found: list[FromAgent] = []
    async with asyncio.timeout(PATIENCE_S):
        while not any(isinstance(message, WorkerEnded) for message in found):
            found.append(await host.office.said.get())
    assert isinstance(found[0], AgentHello)
    await host.end(FAILED)


@with_host
async def test_a_wrong_token_is_an_error(host: Host) -> None:
    host.enter("pass", token="another one")  # noqa: S106
    with pytest.raises(LaunchError, match="refuses the token: .*each start of a job makes a new one"):
        await host.end()


@with_host
async def test_a_refusal_ends_the_agent_and_its_workers(host: Host) -> None:
    await host.begin("forever()")
    await host.start("w1")
    await host.wrote("w1")
    with pytest.raises(LaunchError, match="not this one"):
        await host.office.say(Refused(reason="not this one"))
        await host.end()


def test_a_coordinator_that_stays_away_is_given_up(tmp_path: Path) -> None:
    async def go() -> None:
        async with host(tmp_path) as found:
            found.address = Address("http://127.0.0.1:1", TOKEN)
            found.enter("pass", failure_timeout_s=0.2)
            with pytest.raises(LaunchError, match=r"no coordinator answered at http://127\.0\.0\.1:1 for 0\.2 s"):
                await found.end()

    asyncio.run(go())


# --- signals


@with_host
async def test_sigterm_means_that_the_agent_leaves_and_its_workers_may_write_a_checkpoint(host: Host) -> None:
    await host.begin("signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\nforever()")
    await host.start("w1", "w2")
    for worker in ("w1", "w2"):
        await host.wrote(worker)
    os.kill(os.getpid(), signal.SIGTERM)
    await host.office.hears(AgentLeaving)
    assert "waiting" in host.run_folder.log_of("w1").read_text()  # it is the coordinator who tells them
    await host.office.say(End(workers=("w1", "w2"), how="leave"))
    assert {(await host.office.hears(WorkerEnded)).code for _ in range(2)} == {75}
    outcome = await host.end(PREEMPTED)
    assert (outcome.exit_code, "start it again" in outcome.summary()) == (75, True)


@with_host
async def test_the_second_signal_kills(host: Host) -> None:
    await host.begin("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nforever()")
    await host.start("w1")
    await host.wrote("w1")
    os.kill(os.getpid(), signal.SIGTERM)
    await host.office.hears(AgentLeaving)
    os.kill(os.getpid(), signal.SIGTERM)
    assert (await host.end()).exit_code == 143
    assert "killing the workers" in host.err.getvalue()


@with_host
async def test_workers_that_do_not_leave_are_killed_after_their_grace(host: Host) -> None:
    await host.begin("forever()", grace_s=0.2)
    await host.start("w1")
    await host.wrote("w1")
    os.kill(os.getpid(), signal.SIGINT)
    await host.office.hears(AgentLeaving)
    assert (await host.office.hears(WorkerEnded)).code == -signal.SIGKILL
    assert (await host.end(PREEMPTED)).exit_code == 130


@with_host
async def test_leaving_is_said_again_to_a_coordinator_that_comes_back(host: Host) -> None:
    await host.begin("forever()")
    await host.start("w1")
    await host.wrote("w1")
    os.kill(os.getpid(), signal.SIGTERM)
    await host.office.hears(AgentLeaving)
    await host.office.hang_up()
    await host.office.hears(AgentHello)
    await host.office.hears(AgentLeaving)
    await host.end(FAILED)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False
