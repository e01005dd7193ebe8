"""What an agent does before its coordinator starts."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from unisono.checkpoint.folder import RunFolder
from unisono.launch.agent import Agent
from unisono.launch.elastic import ElasticSettings, Range
from unisono.launch.script import Script
from unisono.launch.settings import LaunchSettings
from unisono.membership.token import make_token

pytestmark = pytest.mark.unit


def test_a_job_that_goes_on_in_its_folder_has_another_token(tmp_path: Path) -> None:
    asyncio.run(_starts(tmp_path))


async def _starts(tmp_path: Path) -> None:
    settings = ElasticSettings(LaunchSettings(Script("train.py")), Range(1, 2))
    nothing: Any = None
    tokens = [make_token(tmp_path)]
    for _ in range(2):
        agent = Agent(settings, RunFolder(tmp_path), nothing)
        agent._guard = nothing
        async with AsyncExitStack() as opened:
            tokens.append(agent._address_of_own(opened).token)
    assert len(set(tokens)) == 3
