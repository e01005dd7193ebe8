"""A coordinator and its connections, over TLS: memory, processor time, delays, and what a loss and a join cost.

The coordinator is the real one, in a process of its own. Its workers are crowds in a few processes: they say what
workers say, and compute nothing.
"""

import asyncio
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.noise import NoiseMeter
from benchmarks.open_files import allow_files
from benchmarks.report import Grid, Report
from benchmarks.stage import Stage, Use, staged
from unisono.launch.elastic.address import Address, Control
from unisono.launch.elastic.elastic_settings import ElasticSettings, Range, certificate_file
from unisono.launch.settings import LaunchSettings, Script
from unisono.membership.token import read_token, token_file

OTHER_FILES = 64
KIB, MIB = 2**10, 2**20


@dataclass(frozen=True, slots=True)
class Choice:
    """How the benchmark is run.

    Attributes:
        workers: the number of workers at first.
        agent_workers: the number of workers of each agent at first, at most.
        processes: the number of processes in which workers and agents live.
        seconds: the time in which nothing happens but heartbeats, in seconds.
        losses: the number of workers that are lost, one after the other.
        joins: the number of workers that join after that, one after the other.
        probes: whether agents answer probes.
        seed: the seed of who is lost.
    """

    workers: int = 1024
    agent_workers: int = 8
    processes: int = 4
    seconds: float = 20.0
    losses: int = 10
    joins: int = 10
    probes: bool = False
    seed: int = 0

    @property
    def agents(self) -> int:
        """The number of agents."""
        return math.ceil(self.workers / self.agent_workers)

    @property
    def largest(self) -> int:
        """The most workers that there may be."""
        return self.workers + self.joins

    @property
    def crowds(self) -> list[dict[str, int]]:
        """The agents of each process, with their room. The first agent has room for all that are to join.

        It has a process of its own, in which little else delays what is measured there.
        """
        rooms = {f"agent-{number}": self.agent_workers for number in range(self.agents)}
        rooms["agent-0"] += self.joins
        if self.processes == 1:
            return [rooms]
        first, *others = rooms
        parts = [others[number :: self.processes - 1] for number in range(self.processes - 1)]
        return [{name: rooms[name] for name in part} for part in ([first], *parts)]


@dataclass(frozen=True, slots=True)
class Change:
    """What a new generation cost.

    Attributes:
        roster_s: the seconds until its last member had its roster.
        formed_s: the seconds until the coordinator knew that all of its members work.
        cpu_s: the seconds of a processor that the coordinator took meanwhile.
        sent: the bytes of messages that it sent to workers meanwhile.
    """

    roster_s: float
    formed_s: float
    cpu_s: float
    sent: int


@dataclass(frozen=True, slots=True)
class Found:
    """What was measured.

    Attributes:
        start: the first generation, from the moment on in which its workers connect.
        losses: the others' next generations, from the moments on in which workers were lost.
        joins: the generations with one more, from the wishes for it on.
        alone: the coordinator before anybody was connected.
        calm: the coordinator before and after the seconds of heartbeats.
        end: the coordinator at the end.
        delays: the seconds of answers in the seconds of heartbeats.
        delays_of_changes: the seconds of answers while workers were lost and joined.
        retries: the number of workers' connections that did not open in time, or broke, and were tried again.
    """

    start: Change
    losses: list[Change]
    joins: list[Change]
    alone: Use
    calm: tuple[Use, Use]
    end: Use
    delays: list[float]
    delays_of_changes: list[float]
    retries: int

    @property
    def share(self) -> float:
        """The share of a processor that heartbeats alone took."""
        before, after = self.calm
        return (after.cpu_s - before.cpu_s) / (after.at - before.at)


def run(choice: Choice) -> Report:
    """Measure.

    Raises:
        TooFewFiles: this system allows too few open files.
        StageFailed: the coordinator or a crowd ended early, or something did not happen for long.
    """
    allow_files(choice.largest + choice.agents + OTHER_FILES)
    meter = NoiseMeter()
    meter.calibrate()
    with TemporaryDirectory(prefix="benchmark-") as folder:
        found = asyncio.run(measure(choice, Path(folder)))
    meter.calibrate()
    return Report(
        name="coordinator-sockets",
        settings=asdict(choice),
        noise=meter.read(),
        grids=grids(choice, found),
        figures={"found": {**asdict(found), "share": found.share}},
    )


async def measure(choice: Choice, folder: Path) -> Found:
    """Start, let hearts beat, lose workers, let others join; in an empty run folder."""
    launch = LaunchSettings(Script("-"))
    settings = ElasticSettings(launch, Range(1, choice.largest), begin_with=choice.workers, max_restarts=0)
    async with staged(folder, settings, choice.crowds, shards=2 * choice.largest, probes=choice.probes) as stage:
        alone = stage.use
        await stage.until(lambda: len(stage.homes) == choice.workers, f"{choice.workers} workers are asked for")
        changes = Changes(stage)
        start = await changes.start(choice.workers)
        calm = stage.use
        await asyncio.sleep(choice.seconds)
        disturbed = stage.use
        order = random.Random(choice.seed)  # noqa: S311  the order is to be repeatable
        losses = [await changes.lose(name) for name in order.sample(sorted(stage.homes), choice.losses)]
        joins = [await changes.join() for _ in range(choice.joins)]
        stage.tell("rest")
        await stage.until(lambda: stage.waiting == 0, "the store has answered everybody")
        return Found(
            start=start,
            losses=losses,
            joins=joins,
            alone=alone,
            calm=(calm, disturbed),
            end=stage.use,
            delays=[seconds for at, seconds in stage.delays if calm.at <= at < disturbed.at],
            delays_of_changes=[seconds for at, seconds in stage.delays if disturbed.at <= at],
            retries=stage.dialled - choice.workers - choice.joins,
        )


class Changes:
    """Makes new generations, and measures them.

    Args:
        stage: the coordinator and its crowds.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._generation = self._members = 0
        address = Address(stage.url, read_token(token_file(stage.folder)), certificate_file(stage.folder))
        self._control = Control(address)

    async def start(self, workers: int) -> Change:
        """Let all connect that were asked for."""
        began, received = self._stage.use, self._stage.received
        self._stage.tell("start")
        return await self._next(began.at, began, received, workers)

    async def lose(self, worker: str) -> Change:
        """Let one end as by ``kill -9``."""
        began, received = self._stage.use, self._stage.received
        self._stage.tell(f"lose {worker}", self._stage.homes[worker])
        await self._stage.until(lambda: worker in self._stage.torn, f"{worker} ends")
        return await self._next(self._stage.torn[worker], began, received, self._members - 1)

    async def join(self) -> Change:
        """Wish for one more."""
        began, received = self._stage.use, self._stage.received
        await asyncio.to_thread(self._control.resize, self._members + 1)
        return await self._next(began.at, began, received, self._members + 1)

    async def _next(self, at: float, began: Use, received: int, members: int) -> Change:
        self._generation, self._members = self._generation + 1, members
        await self._stage.until_formed(self._generation, members)
        ended = self._stage.use
        return Change(
            roster_s=self._stage.heard_at[self._generation] - at,
            formed_s=ended.at - at,
            cpu_s=ended.cpu_s - began.cpu_s,
            sent=self._stage.received - received,
        )


def grids(choice: Choice, found: Found) -> list[Grid]:
    """For the screen."""
    about = f"{choice.workers} workers of {choice.agents} agents, in {choice.processes} processes, over TLS on loopback"
    changes = {"start": [found.start], "loss": found.losses, "join": found.joins}
    delays = {"heartbeats alone": found.delays, "losses and joins": found.delays_of_changes}
    before, after = found.calm
    return [
        Grid(
            f"{about}: what the coordinator uses",
            ("", "alone", "all connected", "after the heartbeats", "at the end"),
            [
                ("memory, MiB", *(f"{use.memory / MIB:.1f}" for use in (found.alone, before, after, found.end))),
                ("processor, s", *(f"{use.cpu_s:.2f}" for use in (found.alone, before, after, found.end))),
            ],
            (
                f"A heartbeat of each worker a second took {found.share:.1%} of a processor. Connections that were "
                f"tried again: {found.retries}.",
            ),
        ),
        Grid(
            "how long an answer of the store took that was asked for behind a heartbeat",
            ("", "median, ms", "99 %, ms", "longest, ms", "answers"),
            [(name, *_spread(seconds)) for name, seconds in delays.items()],
            ("Asked by the workers of one agent, whose process shares the cores with all others.",),
        ),
        Grid(
            "a new generation, from its cause; medians and the worst",
            ("", "last roster, s", "worst", "formed, s", "worst", "coordinator's processor, s", "sent, KiB"),
            [(name, *_row(found)) for name, found in changes.items() if found],
        ),
    ]


def _row(changes: Sequence[Change]) -> tuple[str, ...]:
    rosters, formed = [one.roster_s for one in changes], [one.formed_s for one in changes]
    return (
        f"{statistics.median(rosters):.3f}",
        f"{max(rosters):.3f}",
        f"{statistics.median(formed):.3f}",
        f"{max(formed):.3f}",
        f"{statistics.median(one.cpu_s for one in changes):.2f}",
        f"{statistics.median(one.sent for one in changes) / KIB:.1f}",
    )


def _spread(seconds: Sequence[float]) -> tuple[str, ...]:
    if not seconds:
        return ("-", "-", "-", "0")
    found = sorted(seconds)
    shown = (statistics.median(found), found[math.ceil(0.99 * len(found)) - 1], found[-1])
    return (*(f"{1000 * one:.1f}" for one in shown), str(len(found)))
