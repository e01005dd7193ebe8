"""Agents and their workers in one process, as the benchmark of the coordinator tells them: ``AS_JSON``.

Lines come on standard input: ``start`` lets the workers connect, ``lose W`` ends one, ``rest`` lets nobody ask the
store any more. What the crowd noticed goes to standard output, as lines of JSON. It ends with its input.
"""

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel

from benchmarks.crowd import CrowdedAgent, Place
from benchmarks.noticed import Noticed
from unisono.launch.elastic.address import Address
from unisono.membership.token import read_token

TELLS_S = 0.02


class Crowd(BaseModel):
    """The agents of a process.

    Attributes:
        url: the coordinator's URL.
        token_file: the file with the job's token.
        certificate: the coordinator's certificate.
        agents: the agents' ids, each with the number of workers that it can run.
        shards: the job's number of shards.
        asks: whether the workers ask the store something behind each heartbeat.
        probes: whether the agents answer probes.
    """

    url: str
    token_file: Path
    certificate: Path
    agents: dict[str, int]
    shards: int
    asks: bool
    probes: bool


async def live(crowd: Crowd) -> None:
    """Connect the agents, and do as told."""
    address = Address(crowd.url, read_token(crowd.token_file), crowd.certificate)
    noticed = Noticed()
    place = Place(address, address.context, crowd.shards, crowd.asks, noticed, asyncio.Event(), asyncio.Event())
    async with asyncio.TaskGroup() as tasks:
        agents = [CrowdedAgent(name, room, crowd.probes, place, tasks) for name, room in crowd.agents.items()]
        for agent in agents:
            tasks.create_task(agent.line.keep())
        tasks.create_task(_tell(noticed))
        await _obey(agents, place)
        sys.stdout.flush()
        os._exit(0)  # a thousand farewells would take their time: connections end as those of a host do


async def _obey(agents: Sequence[CrowdedAgent], place: Place) -> None:
    orders = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    while line := (await orders.readline()).decode().split():
        match line:
            case ["start"]:
                place.opened.set()
            case ["lose", worker]:
                assert any(agent.lose(worker) for agent in agents), f"{worker} is none of these"
            case ["rest"]:
                place.rests.set()


async def _tell(noticed: Noticed) -> None:
    told = ""
    while True:
        if (text := noticed.model_dump_json()) != told:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()
            for kept in (noticed.asked, noticed.heard, noticed.delays, noticed.torn, noticed.sent_away):
                kept.clear()
            told = noticed.model_dump_json()
        await asyncio.sleep(TELLS_S)


if __name__ == "__main__":
    with suppress(BrokenPipeError, KeyboardInterrupt):
        asyncio.run(live(Crowd.model_validate_json(sys.argv[1])))
