"""Workers as threads of which one runs at a time, so that a test decides who dies where and who hears of it when.

Everything above the transport and the coordinator is the real thing. A collective call is complete when all members of
the generation have made it. Blows kill workers at points: before and after every collective call, and at every
failpoint. Whoever is killed runs first, so each of the others can be let through the call that both of them were in, or
lose it there: real workers hear of a loss at different moments, and so one of them may have completed an act that
another one has not.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, combinations
from typing import Any, NoReturn

import torch
from torch import Tensor

from unisono.errors import Dismissed, WorkerLost
from unisono.membership.rendezvous import Generation
from unisono.plan.split import Split
from unisono.plan.tree import Node
from unisono.reduce.partial_sums import Tally
from unisono.reduce.transport import Solo, Transport
from unisono.train.group.membership import MemberProgress, Membership, StateTransfer
from unisono.train.group.workers import Workers
from unisono_lab.faults.faults import listening

MOST_SWITCHES = 20_000
"""Between workers, in one world: far more than any of them needs."""

BLOWS = int(os.environ.get("UNISONO_BLOWS", "40"))
"""So many, and so many pairs, are tried on each job at most, drawn from a seed; on whole runs a part of that."""


class Turn:
    """Somebody's turn: given once, taken once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.give, self.take = self._lock.release, self._lock.acquire


class Killed(BaseException):
    """This worker is gone."""


@dataclass(frozen=True)
class Blow:
    """A worker is killed.

    Attributes:
        worker: its name.
        point: how many points it passes unharmed, counted from the blow before.
        through: who of the others gets through the call that is under way; the rest loses it.
    """

    worker: str
    point: int
    through: frozenset[str] = frozenset()


@dataclass
class Group:
    """A generation.

    Attributes:
        number: of it.
        names: its members, by rank.
        joiners: those who were new.
        source: the rank that had come furthest, and how far that was.
        through: None as long as nobody of it is lost; then those who have yet to notice.
        calls: what each member has brought to each collective call, by the call's number.
        verbs: of these calls.
    """

    number: int
    names: Sequence[str]
    joiners: frozenset[str]
    source: tuple[int, int]
    through: frozenset[str] | None = None
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    verbs: dict[int, str] = field(default_factory=dict)


@dataclass
class Worker:
    """One of them.

    Attributes:
        name: of it.
        group: that it is in; None as long as it has yet to join.
        phase: ``runs``, ``calls``, ``arrived``, ``joins``, ``asks`` for a value; in the end ``finished`` or ``gone``.
        call: number of the collective call that it is in or was in last; and who alone is to be there, or None for all.
        passed: points since the newest blow.
        found: what it waited for; an error is raised.
    """

    name: str
    group: Group | None = None
    phase: str = "runs"
    call: int = -1
    needs: str | None = None
    progress: MemberProgress = field(default_factory=lambda: MemberProgress(0))
    loop: int = 0
    asks: str = ""
    passed: list[str] = field(default_factory=list)
    found: Any = None
    go: Turn = field(default_factory=Turn)

    @property
    def is_alive(self) -> bool:
        """Whether it has yet to end."""
        return self.phase not in ("finished", "gone")


def some_of(names: Sequence[str]) -> Iterator[frozenset[str]]:
    """Nobody, each alone, and so on to all."""
    return map(frozenset, chain.from_iterable(combinations(names, size) for size in range(len(names) + 1)))


def blows_on(world: World) -> Iterator[Blow]:
    """Every blow that could have fallen in a world since the one before, on whomever and with whomever let through."""
    for name, passed in world.points.items():
        for point in range(len(passed)):
            yield from (Blow(name, point, through) for through in some_of([n for n in world.points if n != name]))


Script = Callable[["SimulatedMembership"], None]
"""What every worker runs."""


class World:
    """Workers, from their start to the end of the last.

    Args:
        script: what each of them runs.
        workers: how many there are to begin with, named ``a``, ``b``, …
        joiners: how many come later.
        blows: in the order in which they fall.

    Attributes:
        starts: how often the job was started: anew when nobody was left who had its state.
        struck: how many blows have fallen.
        shards: of a batch of the job.
        points: that each worker has passed since the newest blow.
        replaced: names of workers that leave when the next generation is formed.
    """

    shards = 4

    def __init__(self, script: Script, workers: int, joiners: int = 0, blows: Sequence[Blow] = ()) -> None:
        self.starts, self.struck = 0, 0
        self.known: dict[str, Any] = {}
        self.replaced: set[str] = set()
        self.group: Group | None = None
        self._script, self._size, self._blows = script, workers, deque(blows)
        self._names = iter("abcdefghijklmnopqrstuvwxyz")
        self._members: list[Worker] = []
        self._all: list[Worker] = []
        self._newcomers = joiners
        self._running: Worker | None = None
        self._back = Turn()
        self._error: BaseException | None = None
        self._number = 0

    @property
    def points(self) -> Mapping[str, Sequence[str]]:
        """By name, of all workers that are alive or have finished."""
        return {worker.name: worker.passed for worker in self._all if worker.phase != "gone"}

    def run(self, pool: ThreadPoolExecutor) -> World:
        """Until all workers have ended."""
        with listening(self.pass_point):
            self._start_over(pool)
            for _ in range(self._newcomers):
                self._begin(pool, joins=True)
            for _ in range(MOST_SWITCHES):
                alive = [worker for worker in self._all if worker.is_alive]
                if not alive and any(worker.phase == "finished" for worker in self._all):
                    break
                runs = [worker for worker in alive if worker.phase == "runs"]
                if not runs and not self._settle(pool):
                    stuck = ", ".join(f"{one.name} {one.phase} {one.asks} (last: {one.passed[-3:]})" for one in alive)
                    self._stop(alive)
                    raise AssertionError(f"all wait: {stuck}")
                if runs:
                    self._switch_to(min(runs, key=lambda one: (one.name != self._next_victim, one.name)))
            else:
                self._stop([worker for worker in self._all if worker.is_alive])
                raise AssertionError("the workers never come to an end")
        return self

    # -- for workers ----------------------------------------------------------------------------------------------

    def pass_point(self, name: str) -> None:
        """The worker that runs passes a point."""
        worker = self._running
        assert worker is not None
        if self._blows and self._blows[0].worker == worker.name and len(worker.passed) == self._blows[0].point:
            self._strike(worker, self._blows.popleft())
        worker.passed.append(name)

    def call(self, verb: str, brought: Any, source: int | None = None) -> list[Any]:
        """A collective call of the worker that runs: what each member has brought, by rank."""
        worker = self._running
        assert worker is not None
        group = worker.group
        assert group is not None
        self.pass_point(f"{verb} begins")
        worker.call += 1
        worker.needs = None if source is None else group.names[source]
        theirs = group.verbs.setdefault(worker.call, verb)
        assert verb == theirs, f"{worker.name} calls {verb}, where others call {theirs}"
        group.calls.setdefault(worker.call, {})[worker.name] = brought
        found = self.wait(worker, "calls")
        self.pass_point(f"{verb} ends")
        return [found.get(name) for name in group.names]

    def place(self, worker: Worker, *, joins: bool) -> SimulatedMembership:
        """That of a worker that begins."""
        return SimulatedMembership(self, worker, joins=joins)

    def wait(self, worker: Worker, phase: str) -> Any:
        """Let others run until there is what a worker waits for."""
        worker.phase = phase
        self._back.give()
        worker.go.take()
        found, worker.found = worker.found, None
        if isinstance(found, BaseException):
            raise found
        return found

    # -- what happens while nobody runs -----------------------------------------------------------------------------

    def _settle(self, pool: ThreadPoolExecutor) -> bool:
        """Whether anybody runs after it."""
        # Whoever was taken in and has lost the others before it had their state waits to be taken in again.
        self._members = [one for one in self._members if one.phase != "joins"]
        for rule in (self._answer, self._complete, self._form_next):
            if rule():
                return True
        if any(one.is_alive for one in self._members):
            return False
        waiting = [worker for worker in self._all if worker.is_alive]
        if any(one.phase == "finished" for one in self._members):
            for worker in waiting:
                self._wake(worker, Dismissed("the job is done"))
        else:
            self._stop(waiting)
            self._start_over(pool)
        return True

    def _complete(self) -> bool:
        group = self.group
        if group is None:
            return False
        calling = [one for one in self._members if one.phase == "calls" and one.group is group]
        if group.through is None and len(calling) < len(group.names):  # others have left it
            group.through = frozenset()
        for worker in calling:
            brought = group.calls[worker.call]
            if group.through is None or (
                worker.name in group.through and worker.needs in group.through and worker.needs in brought
            ):
                self._wake(worker, dict(brought))
            else:
                self._wake(worker, WorkerLost("another worker is gone"))
        return bool(calling)

    def _answer(self) -> bool:
        found = False
        for worker in self._all:
            if worker.phase == "asks" and worker.asks in self.known:
                self._wake(worker, [self.known[worker.asks]])
                found = True
            elif worker.phase == "joins" and f"loop/{worker.loop}" in self.known:
                self._wake(worker, "over")
                found = True
        return found

    def _form_next(self) -> bool:
        """The rules of the coordinator, see ``membership/state/transitions.py``."""
        members = [one for one in self._members if one.is_alive]
        if not members or any(one.phase != "arrived" for one in members):
            return False
        if leaving := [one for one in members if one.name in self.replaced]:
            for worker in leaving:
                self._wake(worker, Dismissed("it is replaced"))
            return True
        if self.group is None:
            self._form(members, frozenset(), 0)
            return True
        holders = [one for one in members if self._holds_state(one)]
        if not holders:
            return self._give_up(members)
        is_done = any(one.phase == "finished" for one in self._members)
        steady = len({one.progress.acts for one in holders}) == 1 and all(one.progress.at_boundary for one in holders)
        ready = [one for one in self._all if one.phase == "joins"] if steady and not is_done else []
        source = max(range(len(members)), key=lambda n: (members[n] in holders, members[n].progress.acts, -n))
        lacking = {one.name for one in members if one not in holders} | {one.name for one in ready}
        self._members = [*(one for one in self._members if not one.is_alive), *members, *ready]
        self._form([*members, *ready], frozenset(lacking), source)
        return True

    def _give_up(self, members: Sequence[Worker]) -> bool:
        for worker in members:
            self._wake(worker, Dismissed("all others are lost, and the job starts over"))
        return True

    def _holds_state(self, worker: Worker) -> bool:
        assert self.group is not None
        return worker.name not in self.group.joiners or worker.progress.acts >= max(1, self.group.source[1])

    def _form(self, members: Sequence[Worker], joiners: frozenset[str], source: int) -> None:
        self._number += 1
        acts = [0 if one.name in joiners else one.progress.acts for one in members]
        self.group = Group(self._number, [one.name for one in members], joiners, (source, acts[source]))
        ranks = frozenset(rank for rank, one in enumerate(members) if one.name in joiners)
        for worker in members:
            worker.group, worker.call = self.group, -1
            self._wake(worker, StateTransfer(source, acts, ranks, {}))

    def _strike(self, worker: Worker, blow: Blow) -> NoReturn:
        self.struck += 1
        group = worker.group
        if group is not None and group is self.group:
            group.through = blow.through
            for other in self._members:
                has_result = other.phase == "runs" and other.group is group and isinstance(other.found, dict)
                if has_result and other is not worker and other.name not in blow.through:
                    other.found = WorkerLost("another worker is gone")
        for each in self._all:
            each.passed = []
        raise Killed

    def _start_over(self, pool: ThreadPoolExecutor) -> None:
        self.starts += 1
        self.known.clear()
        self.group = None
        self._members = []
        for _ in range(self._size if self.starts == 1 else 1):
            self._members.append(self._begin(pool, joins=False))

    def _begin(self, pool: ThreadPoolExecutor, *, joins: bool) -> Worker:
        worker = Worker(next(self._names))
        self._all.append(worker)
        pool.submit(self._work, worker, joins)
        return worker

    def _work(self, worker: Worker, joins: bool) -> None:
        worker.go.take()
        try:
            self._script(self.place(worker, joins=joins))
        except Killed:
            worker.phase = "gone"
        except Dismissed:
            worker.phase = "gone"
        except BaseException as error:  # noqa: BLE001 (raised again by the test)
            self._error, worker.phase = error, "gone"
        else:
            worker.phase = "finished"
        finally:
            self._back.give()

    def _wake(self, worker: Worker, found: Any) -> None:
        worker.phase, worker.found = "runs", found

    def _switch_to(self, worker: Worker) -> None:
        self._running = worker
        worker.go.give()
        self._back.take()
        self._running = None
        if self._error is not None:
            self._stop([one for one in self._all if one.is_alive])
            raise self._error

    def _stop(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            while worker.is_alive:
                worker.found, self._running = Killed(), worker
                worker.go.give()
                self._back.take()

    @property
    def _next_victim(self) -> str:
        return self._blows[0].worker if self._blows else ""


class SimulatedMembership(Membership):
    """A worker's place in its world."""

    is_elastic = True

    def __init__(self, world: World, worker: Worker, *, joins: bool) -> None:
        self.world, self.worker, self.joins = world, worker, joins
        self.workers = Workers(Generation(0, 0, Split.even(world.shards, 1)), Solo(world.shards))
        if not joins:
            self._enter_generation(world.wait(worker, "arrived"))

    @property
    def is_due(self) -> bool:
        group, world = self.worker.group, self.world
        is_wanted = any(one.phase == "joins" for one in world._all)
        return group is not None and group is world.group and (is_wanted or bool(world.replaced & set(group.names)))

    def leave(self) -> bool:
        return True

    def regroup(self, lost: WorkerLost | None, progress: MemberProgress) -> StateTransfer:
        self.worker.progress = progress
        transfer: StateTransfer = self.world.wait(self.worker, "arrived")
        return self._enter_generation(transfer)

    def enter(self, loop: int) -> StateTransfer | None:
        self.worker.loop = loop
        found = self.world.wait(self.worker, "joins")
        return None if found == "over" else self._enter_generation(found)

    def formed(self, seconds: Mapping[str, float]) -> None:
        self.joins = False

    def report_progress(self, progress: MemberProgress, samples_per_s: float, shard_s: float) -> None: ...

    def resize(self, workers: int) -> None: ...

    def replace(self, generation: int, rank: int) -> None:
        group = self.worker.group
        assert group is not None
        if group.number == generation:
            self.world.replaced.add(group.names[rank])

    def finished(self, digest: str) -> None: ...

    def publish(self, name: str, value: Any) -> None:
        self.world.known[name] = value

    def published(self, name: str) -> Any:
        self.worker.asks = name
        (value,) = self.world.wait(self.worker, "asks")
        return value

    def await_end(self) -> NoReturn:
        raise Dismissed("the job is done")

    def close(self) -> None: ...

    def _enter_generation(self, transfer: StateTransfer) -> StateTransfer:
        group = self.worker.group
        assert group is not None
        split = Split.even(self.world.shards, len(group.names))
        rank = list(group.names).index(self.worker.name)
        self.workers = Workers(Generation(group.number, rank, split), SimulatedTransport(self.world, rank, split))
        return transfer


class SimulatedTransport(Transport):
    """Collective calls that the world completes."""

    def __init__(self, world: World, rank: int, split: Split) -> None:
        super().__init__(rank, split)
        self._world = world

    def reduce(
        self,
        bucket: Hashable,
        partials: Sequence[Tensor],
        divisor: float | None = None,
        tally: Tally | None = None,
    ) -> Tensor:
        if tally is not None:
            for partial in partials:
                tally.read(partial, 0)
        everybody = self._world.call("reduce", [partial.clone() for partial in partials])
        leaves: dict[Node, Tensor] = {}
        for rank, brought in enumerate(everybody):
            mine = self.split.of(rank)
            leaves |= dict(zip(self.tree.cover(mine.start, mine.stop), brought, strict=True))
        total: Tensor = self.tree.finish(leaves, torch.add).clone()  # or all would have one, and could not die apart
        if divisor is not None:
            total /= divisor
        if tally is not None:
            tally.finished.look(total)
            tally.keep(total, 0)
        return total

    def reduce_native(self, total: Tensor) -> Tensor:
        raise NotImplementedError

    def all_gather(self, row: Tensor) -> Tensor:
        return torch.stack(self._world.call("all_gather", row.clone()))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        brought = tensor.detach().clone() if self.rank == source else None
        found = self._world.call("broadcast", brought, source)[source]
        with torch.no_grad():
            tensor.copy_(found)

    def abort(self) -> None: ...

    def close(self) -> None: ...
