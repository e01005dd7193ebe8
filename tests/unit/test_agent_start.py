"""What an agent does before its coordinator starts, and what it tells it of a worker's end."""

import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from unisono.checkpoint.folder import RunFolder
from unisono.launch.command import RendezvousSocket, WorkerCommand
from unisono.launch.elastic.agent import ElasticAgent
from unisono.launch.elastic.elastic_settings import ElasticSettings, Range
from unisono.launch.failure import Failure
from unisono.launch.host_workers import Ended, HostWorkers, WorkerGroup, cause_of
from unisono.launch.outcome import WorkerExit
from unisono.launch.settings import LaunchSettings, Script
from unisono.launch.terminal import Terminal, WorkerName
from unisono.launch.worker_start import WorkerStart
from unisono.membership.token import make_token

pytestmark = pytest.mark.unit


def test_a_job_that_goes_on_in_its_folder_has_another_token(tmp_path: Path) -> None:
    asyncio.run(_starts(tmp_path))


def agent_in(folder: Path) -> ElasticAgent:
    nothing: Any = None
    return ElasticAgent(ElasticSettings(LaunchSettings(Script("train.py")), Range(1, 2)), RunFolder(folder), nothing)


def test_a_workers_end_is_told_whatever_its_script_has_said(tmp_path: Path) -> None:
    agent = agent_in(tmp_path)
    failure = Failure("w1", "h", 1, "ValueError", "no \udcff.txt" + "x" * 5000, "", False, 0.0)
    agent._worker_ended(WorkerExit("w1", 1, 0.0, failure), Ended(1, 0.0, failure))
    assert agent._reports[0].error.startswith("ValueError: no \\udcff.txt")
    assert len(agent._reports[0].error) == 4096


def test_a_code_that_the_script_chose_is_told_as_its_word_and_no_other(tmp_path: Path) -> None:
    agent = agent_in(tmp_path)
    lost = Failure("w1", "h", 1, "WorkerLost", "w2 is gone", "", True, 0.0)
    for end in (Ended(5, 0.0, None, is_scripts=True), Ended(5, 0.0, None), Ended(1, 0.0, lost, is_scripts=True)):
        agent._worker_ended(WorkerExit("w1", end.code, 0.0, end.failure), end)
    assert [each.error for each in agent._reports] == ["its script called sys.exit", "", ""]


def test_a_worker_ends_for_the_reason_of_the_device_that_has_one() -> None:
    def failed(*, consequence: bool) -> Ended:
        return Ended(1, 0.0, Failure("w1", "h", 1, "Error", "words", "", consequence, 0.0))

    killed, done = Ended(-9, 0.0, None), Ended(0, 1.0, None)
    lost, wrong = failed(consequence=True), failed(consequence=False)
    assert cause_of([]) is None
    assert cause_of([done, done]) is done
    assert cause_of([done, lost]) is lost
    assert cause_of([lost, killed]) is killed
    assert cause_of([killed, wrong]) is wrong  # the others were killed for it


def test_a_device_that_ends_takes_the_others_of_its_worker_with_it(tmp_path: Path) -> None:
    assert asyncio.run(_ends(tmp_path, ["exit 3", "sleep 60"])) == 3
    assert asyncio.run(_ends(tmp_path, ["sleep 60", "kill -9 $$"])) == -9
    assert asyncio.run(_ends(tmp_path, ["exit 0", "sleep 0.1"])) == 0


async def _ends(folder: Path, devices: Sequence[str]) -> int:
    """The exit code of a worker whose devices run these commands."""
    told: asyncio.Queue[WorkerExit] = asyncio.Queue()
    run_folder = RunFolder(folder)
    run_folder.logs.mkdir(exist_ok=True)
    group = WorkerGroup(run_folder, Terminal(sys.stdout, sys.stderr))

    def command_of(name: WorkerName, place: int, device: int, meeting: RendezvousSocket | None) -> WorkerCommand:
        assert meeting is not None
        return WorkerCommand((devices[device],), {})

    workers = HostWorkers(
        group,
        cast("WorkerStart", Shell()),
        command_of,
        lambda worker_exit, end: told.put_nowait(worker_exit),
        lambda bug: None,
        len(devices),
    )
    with group.opened(lambda number: None):
        workers.begin("w1")
        async with asyncio.timeout(30):
            ended = await told.get()
        await workers.close()
        await group.all_said()
    return ended.code


class Shell:
    """Starts a shell's command as each device."""

    async def loaded(self, unwanted: asyncio.Event) -> None:
        """Nothing is loaded."""

    async def close(self) -> None:
        """Nothing was."""

    def wake(self) -> None:
        """Nobody sleeps."""

    async def start(self, command: WorkerCommand, output: Any) -> Any:
        return await asyncio.create_subprocess_exec(
            "sh",
            "-c",
            *command.script,
            stdout=output.out.write_end,
            stderr=output.err.write_end,
            start_new_session=True,
        )


async def _starts(tmp_path: Path) -> None:
    nothing: Any = None
    tokens = [make_token(tmp_path)]
    for _ in range(2):
        agent = agent_in(tmp_path)
        agent._group.guard = nothing
        async with AsyncExitStack() as opened:
            tokens.append(agent._open_coordinator(opened).token)
    assert len(set(tokens)) == 3
