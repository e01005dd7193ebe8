"""Whole runs of several workers as threads of one process, over real transports: for fault injection by the hundred."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from unisono.checkpoint.checkpoint_store import CheckpointStore
from unisono.checkpoint.folder import RunFolder
from unisono.errors import Dismissed, JobEnded, UnisonoWarning, WorkerLost
from unisono.job import Job
from unisono.membership.rendezvous import Generation
from unisono.plan.split import Split
from unisono.reduce.peers import meet
from unisono.reduce.shared_memory import SharedMemoryTransport
from unisono.reduce.transport import Solo, Transport
from unisono.settings.reading import settings_by_path
from unisono.sync import AllReduce, strategy_of
from unisono.train.assembly import Opened, assemble
from unisono.train.config.run_config import (
    Adaptation,
    Connection,
    Execution,
    RunConfig,
    StrategyConstraints,
)
from unisono.train.group.collectives import CollectiveCalls
from unisono.train.group.membership import Fixed, MemberProgress, Membership, StateTransfer
from unisono.train.group.workers import Workers
from unisono.train.run import Run
from unisono.train.state.checkpoints import RunCheckpoints
from unisono.train.state.ending import LeaveRequest
from unisono.train.state.policy_state import PolicyState

PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Trade:
    """What a crew trains, and how.

    Attributes:
        job: that is trained. Nothing in it may draw random numbers: the generators belong to the whole process.
        workers: how many.
        folder: of the run.
        execution: how steps are carried out.
        verify_every: steps between comparisons of the whole state.
        checkpoint_every: steps between checkpoints; None for none.
        stop_after: steps of the job after which it is cut short; None to go on to its end.
        is_elastic: whether the others go on without a worker that is to be replaced.
        strategy: by which the workers synchronise, as its text.
    """

    job: Job
    workers: int
    folder: Path
    execution: Execution = field(default_factory=Execution)
    verify_every: int = 100
    checkpoint_every: int | None = None
    stop_after: int | None = None
    is_elastic: bool = False
    strategy: str = AllReduce.name


class Crew:
    """Where the workers of a crew find each other, and who of them is to leave."""

    def __init__(self, names: Sequence[int]) -> None:
        self.leaving: set[int] = set()
        self._rosters = [list(names)]
        self._stores = [dist.HashStore()]
        self._lock = threading.Lock()

    def roster(self, generation: int) -> Sequence[int]:
        """Who is in a generation, by rank; the newest is made when it is asked for first."""
        with self._lock:
            while len(self._rosters) < generation:
                self._rosters.append([name for name in self._rosters[-1] if name not in self.leaving])
                self._stores.append(dist.HashStore())
            return self._rosters[generation - 1]

    def post(self, generation: int, name: str, value: bytes) -> None:
        """Make a value known."""
        self._stores[generation - 1].set(name, value.hex())

    def read(self, generation: int, name: str) -> bytes:
        """A value, once it is known."""
        return bytes.fromhex(self._stores[generation - 1].get(name).decode())


@dataclass(frozen=True, slots=True)
class _SharedStore:
    crew: Crew
    generation: int

    def post(self, name: str, value: bytes) -> None:
        self.crew.post(self.generation, name, value)

    def read(self, name: str) -> bytes:
        return self.crew.read(self.generation, name)


class CrewMembership(Fixed):
    """One thread's place in the crew. Nobody is lost in it, and nobody joins."""

    def __init__(self, crew: Crew, name: int, trade: Trade) -> None:
        self.is_elastic = trade.is_elastic
        self._crew, self._name, self._shards = crew, name, trade.job.shards
        super().__init__(self._connected(1))

    @property
    def is_due(self) -> bool:
        """Whether somebody is to leave."""
        return bool(self._crew.leaving & set(self._crew.roster(self.workers.generation.number)))

    def regroup(self, lost: WorkerLost | None, progress: MemberProgress) -> StateTransfer:
        """Part, and meet again without those who leave."""
        if lost is not None:  # its script has ended with an error: nobody comes back, whoever asks how often
            raise JobEnded(str(lost)) from lost
        number = self.workers.generation.number
        try:
            self.workers.barrier()  # whoever is asked to leave is known to all that come here
        except WorkerLost as error:
            raise JobEnded(str(error)) from error
        self.workers.close()
        if self._name in self._crew.leaving:
            raise Dismissed("it is replaced")
        self.workers = self._connected(number + 1)
        return StateTransfer(0, [progress.acts] * self.workers.world_size, frozenset(), {})

    def resize(self, workers: int) -> None:
        """Nobody comes."""

    def replace(self, generation: int, rank: int) -> None:
        """It leaves at the next boundary, and nobody comes instead."""
        self._crew.leaving.add(self._crew.roster(generation)[rank])

    def _connected(self, number: int) -> Workers:
        roster = self._crew.roster(number)
        rank, split = roster.index(self._name), Split.even(self._shards, len(roster))
        transport: Transport = Solo(self._shards)
        if len(roster) > 1:
            peers = meet(rank, len(roster), _SharedStore(self._crew, number), PATIENCE_S)
            transport = SharedMemoryTransport(peers, rank, split)
        return Workers(Generation(number, rank, split), transport)


def train(trade: Trade, script: Callable[[Run], Any]) -> list[Any]:
    """Run a script on each worker of a crew.

    Args:
        trade: what is trained.
        script: gets the run, and trains with it.

    Returns:
        what it returned, by name of the worker; None for one that was dismissed.

    Raises:
        Exception: the first that a script ended with, other than the loss of another worker.
    """
    crew, causes = Crew(range(trade.workers)), list[BaseException]()

    def worker(name: int) -> Any:
        torch.set_num_threads(trade.job.threads)
        with ExitStack() as opened:
            membership = CrewMembership(crew, name, trade)
            opened.callback(membership.close)
            try:
                return script(opened.enter_context(run_of(trade, membership)))
            except Dismissed:
                return None
            except BaseException as error:
                if not isinstance(error, WorkerLost):
                    causes.append(error)
                membership.workers.abort()
                raise

    with warnings.catch_warnings(), ThreadPoolExecutor(trade.workers) as pool:
        # Each worker finds the seeds of the others in the generators, and would take them for what its samples draw.
        warnings.filterwarnings("ignore", "sample .* drew something when it was asked for, and nothing", UnisonoWarning)
        futures = [pool.submit(worker, name) for name in range(trade.workers)]
    if causes:
        raise causes[0]
    return [future.result() for future in futures]


def run_of(trade: Trade, membership: Membership) -> Run:
    """The run of one worker."""
    folder, leave, closing = RunFolder(trade.folder), LeaveRequest(), ExitStack()
    constraints = StrategyConstraints(trade.job.reduction)
    config = RunConfig(
        trade.job,
        torch.device("cpu"),
        settings_by_path(
            {
                "faults.timeout_s": PATIENCE_S,
                "faults.verify_every": trade.verify_every or 0,
                "special.stop_after": trade.stop_after,
            }
        ),
        Connection(timeout_s=PATIENCE_S),
        execution=trade.execution,
        adaptation=Adaptation(strategy=strategy_of(trade.strategy), constraints=constraints),
    )
    closing.callback(folder.close)
    closing.callback(leave.close)
    checkpoints = RunCheckpoints(lambda: CheckpointStore(folder.checkpoints, keep=9), every=trade.checkpoint_every)
    closing.callback(checkpoints.close)
    opened = Opened(
        membership,
        folder,
        checkpoints,
        CollectiveCalls(membership),
        leave,
        {"job": "of a crew"},
        PolicyState.of(config),
        closing,
    )
    return Run(assemble(config, opened))
