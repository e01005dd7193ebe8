"""What an agent does before its coordinator starts, and what it tells it of a worker's end."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from unisono.checkpoint.folder import RunFolder
from unisono.launch.elastic.agent import ElasticAgent
from unisono.launch.elastic.elastic import ElasticSettings, Range
from unisono.launch.elastic.host_workers import HostWorkers, _Worker
from unisono.launch.ending.failure import Failure
from unisono.launch.settings import LaunchSettings, Script
from unisono.launch.worker_group import Ended, WorkerGroup
from unisono.membership.agent_messages import WorkerEnded
from unisono.membership.token import make_token

pytestmark = pytest.mark.unit


def test_a_job_that_goes_on_in_its_folder_has_another_token(tmp_path: Path) -> None:
    asyncio.run(_starts(tmp_path))


def test_a_workers_end_is_told_whatever_its_script_has_said(tmp_path: Path) -> None:
    nothing: Any = None
    told: list[WorkerEnded] = []
    workers = HostWorkers(WorkerGroup(RunFolder(tmp_path), nothing), nothing)
    workers._tell = told.append
    workers._workers["w1"] = worker = _Worker("w1", 0)
    failure = Failure("w1", "h", 1, "ValueError", "no \udcff.txt" + "x" * 5000, "", False, 0.0)
    workers._note(worker, Ended(1, 0.0, failure))
    assert told[0].error.startswith("ValueError: no \\udcff.txt")
    assert len(told[0].error) == 4096


async def _starts(tmp_path: Path) -> None:
    settings = ElasticSettings(LaunchSettings(Script("train.py")), Range(1, 2))
    nothing: Any = None
    tokens = [make_token(tmp_path)]
    for _ in range(2):
        agent = ElasticAgent(settings, RunFolder(tmp_path), nothing)
        agent._group.guard = nothing
        async with AsyncExitStack() as opened:
            tokens.append(agent._address_of_own(opened).token)
    assert len(set(tokens)) == 3
