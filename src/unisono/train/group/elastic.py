"""A membership that changes while the job trains: workers come, go and die, and the others go on."""

import math
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from time import perf_counter
from typing import Any, NoReturn

import torch.distributed as dist

from unisono.errors import Dismissed, JobEnded, LaunchError, WorkerLost
from unisono.job import Job
from unisono.membership.client import Line
from unisono.membership.environment import Environment
from unisono.membership.messages import (
    Arrived,
    Finished,
    Formed,
    JobOver,
    Leaving,
    Lost,
    NewGeneration,
    Progress,
    Ready,
    Refused,
    RegroupDue,
    Removed,
    Replace,
    Resize,
    Seat,
    StoreRequest,
    Target,
    ToWorker,
    Unreached,
    Welcome,
    WorkerHello,
)
from unisono.membership.probe import PATIENCE_S
from unisono.membership.rendezvous import Generation
from unisono.membership.store import CoordinatorStore
from unisono.membership.token import read_token
from unisono.plan.split import Split
from unisono.reduce.peers import PeerListener, Peers, address_from, is_within_call
from unisono.reduce.transport import Solo
from unisono.train.config.run_config import CoordinatorAccess
from unisono.train.group.connect import Rendezvous
from unisono.train.group.liveness import Heartbeat, Probing, Tell, other_hosts
from unisono.train.group.membership import MemberProgress, Membership, StateTransfer
from unisono.train.group.publisher import Publisher, packed, unpacked
from unisono.train.group.workers import Workers

LOOKS = 4
"""At the coordinator, in the time after which no word from it is too long."""

BEAT_S = 1.0
"""Between two signs of life."""

Form = Callable[[Generation, Rendezvous], Workers]
"""Connects the workers of a generation."""

Call = Callable[[Callable[[ToWorker], None]], Line]
"""Opens the connection to the coordinator, whose messages go to the argument."""

Probe = Callable[[Sequence[Target], Tell], Probing]
"""Probes hosts until it is closed."""


class Elastic(Membership):
    """Follows the coordinator from one generation to the next.

    The main thread trains, and waits for the next generation where it has to. The connection's thread hears what
    happens elsewhere: it notes that a generation is due, and hangs up on a generation that has lost a worker, which
    wakes the main thread.

    Args:
        call: opens the connection to the coordinator.
        hello: who this worker is.
        form: connects the workers of a generation.
        timeout_s: how long to wait for other workers and for the coordinator.
        probe: finds out which hosts of a generation are not reached; None if nobody needs to know.
        silence_s: after so long without the coordinator the job may soon go on without this worker.

    Raises:
        LaunchError: the coordinator refuses this worker, or cannot be reached.
    """

    is_elastic = True

    def __init__(
        self,
        call: Call,
        hello: WorkerHello,
        form: Form,
        timeout_s: float,
        probe: Probe | None = None,
        silence_s: float = math.inf,
    ) -> None:
        self._hello, self._form, self._timeout_s = hello, form, timeout_s
        self._probe, self._silence_s = probe, silence_s
        self._farewell: _End | None = None
        self._news: queue.SimpleQueue[_News] = queue.SimpleQueue()
        self._end: _End | None = None
        self._generation = Generation(0, 0, Split.even(hello.shards, 1))
        self._workers = Workers(self._generation, Solo(hello.shards))
        self._due = self._lost = self._left = 0
        self._listener_lock = threading.Lock()
        self._is_leaving = False
        self._progress, self._rate = MemberProgress(0), 0.0
        self._heart = Heartbeat()
        self._forming: Future[Workers] = Future()
        self._unreached: tuple[Unreached, ...] = ()
        self._closed = threading.Event()
        self._listener = PeerListener(timeout_s)
        self._line = call(self._hear)
        self._publisher = Publisher(self._line.request)
        self._store = CoordinatorStore(self._line, timedelta(seconds=timeout_s))
        threading.Thread(target=self._beat, name="unisono-beat", daemon=True).start()
        try:
            self.joins = self._await(Welcome).joins
            if not self.joins:
                self._form_first()
        except BaseException:
            self.close()
            raise

    @property
    def workers(self) -> Workers:
        """Those of the present generation."""
        return self._workers

    @property
    def is_due(self) -> bool:
        """Whether the coordinator has announced the next one."""
        return self._due == self._generation.number

    def leave(self) -> bool:
        """Tell the coordinator, once."""
        if not self._is_leaving:
            self._is_leaving = True
            self._line.send(Leaving())
        return True

    def regroup(self, lost: WorkerLost | None, progress: MemberProgress) -> StateTransfer:
        """Hang up, and wait for the next generation."""
        begun = perf_counter()
        self._progress = progress
        self._open_door()
        self._line.send(
            Arrived(
                generation=self._generation.number,
                acts=progress.acts,
                loop=progress.loop,
                at_boundary=progress.at_boundary,
                step=progress.step,
                address=self._listener.address.hex(),
                unreached=self._unreached,
            )
        )
        return self._form_next(self._await(NewGeneration, wanted=self._is_next), begun)

    def enter(self, loop: int) -> StateTransfer | None:
        """Wait to be taken in, or for the others to be through with the loop."""
        begun = perf_counter()
        self._open_door()
        # In a generation already: it was taken in, and lost the others before it had their state.
        left = self._generation.number
        address, unreached = self._listener.address.hex(), self._unreached
        self._line.send(Ready(loop=loop, address=address, generation=left, unreached=unreached))
        over = f"loop/{loop}"
        self._watch(over)

        def is_wanted(news: NewGeneration | _Known) -> bool:
            return self._is_next(news) if isinstance(news, NewGeneration) else news.name == over

        news = self._await(NewGeneration, _Known, wanted=is_wanted)
        return self._form_next(news, begun) if isinstance(news, NewGeneration) else None

    def formed(self, seconds: Mapping[str, float]) -> None:
        """Tell the coordinator."""
        self.joins = self._heart.forms = False
        self._line.send(Formed(generation=self._generation.number, seconds=dict(seconds)))

    def publish(self, name: str, value: Any) -> None:
        """In the coordinator's store; nobody waits for it here."""
        self._publisher.publish(f"run/{name}", packed(value))

    def published(self, name: str) -> Any:
        """From the coordinator's store, once it is there."""
        self._watch(name)
        return unpacked(self._await(_Known, wanted=lambda news: news.name == name).value)

    def tell(self, progress: MemberProgress, samples_per_s: float, shard_s: float) -> None:
        """With the next sign of life."""
        self._progress, self._rate, self._heart.shard_s = progress, samples_per_s, shard_s

    def resize(self, workers: int) -> None:
        """Ask the coordinator."""
        self._line.send(Resize(workers=workers))

    def replace(self, generation: int, rank: int) -> None:
        """Ask the coordinator."""
        self._line.send(Replace(generation=generation, rank=rank))

    def finished(self, digest: str) -> None:
        """Tell the coordinator, and wait until it knows that of all members: until then it may be told again.

        Others may take long, for a last checkpoint say: whether they still come forward is the coordinator's to see.
        It is waited for until it has been silent for too long.
        """
        self._line.send(Finished(digest=digest))
        while self._line.silent_s <= self._timeout_s:
            with suppress(queue.Empty):
                if isinstance(self._news.get(timeout=BEAT_S), JobOver | Removed | Refused):
                    return

    def await_end(self) -> NoReturn:
        """The others finish without this worker."""
        self._await(())
        raise AssertionError("only the job's end is waited for")

    def cut_off(self, seconds: float) -> None:
        """The coordinator is told nothing for so many seconds."""
        self._line.cut(seconds)
        super().cut_off(seconds)

    def away(self) -> str:
        """Because it hears nothing of the coordinator, which gives it up after twice that time, or is turned away."""
        if self._farewell is not None:
            refused = isinstance(self._farewell, Refused)
            return f"the coordinator turns this worker away: {self._farewell.reason}" if refused else ""
        if (silent_s := self._line.silent_s) <= self._silence_s:
            return ""
        return f"no word from the coordinator for {silent_s:.1f} s, so the job may go on without this worker"

    def close(self) -> None:
        """Hang up on everybody."""
        self._closed.set()
        self._listener.close()
        self._workers.close()
        self._publisher.close()
        self._line.close()

    # -- the connection's thread -------------------------------------------------------------------------------------

    def _hear(self, message: ToWorker) -> None:
        if isinstance(message, RegroupDue):
            self._due = message.generation
        elif isinstance(message, Lost):
            self._lost = max(self._lost, message.generation)
            self._hang_up_if_lost()
        elif isinstance(message, Welcome | NewGeneration):
            self._news.put(message)
        elif isinstance(message, Removed | Refused | JobOver):
            self._farewell = message
            self._news.put(message)
            self._lost = self._generation.number
            self._hang_up_if_lost()

    def _hang_up_if_lost(self) -> None:
        # Called by whoever notes a loss, and by whoever forms a generation: whichever comes second sees the other.
        with self._listener_lock:  # who has left it already waits for the next one, whose listener stays open
            if self._lost >= self._generation.number > self._left:
                with suppress(InvalidStateError):
                    self._forming.set_exception(WorkerLost("another worker was lost before all had met"))
                self._listener.close()
                self._workers.abort()

    # -- the main thread ---------------------------------------------------------------------------------------------

    def _form_first(self) -> None:
        begun = perf_counter()
        self._line.send(Ready(address=self._listener.address.hex()))
        lost: WorkerLost | None = None
        while True:
            try:
                if lost is None:
                    self._form_next(self._await(NewGeneration), begun)
                else:
                    self.regroup(lost, MemberProgress(0))
            except JobEnded:
                raise
            except WorkerLost as error:
                lost = error
            else:
                return

    def _form_next(self, new: NewGeneration, begun: float) -> StateTransfer:
        waited = perf_counter()
        rank = next(rank for rank, seat in enumerate(new.roster) if seat.worker == self._hello.worker)
        self._forming = Future()
        self._generation = Generation(new.generation, rank, Split(new.bounds), new.departures)
        self._line.generation = new.generation
        self._hang_up_if_lost()
        rendezvous = ElasticRendezvous(new, rank, self._listener, self._store)
        self._unreached = ()
        try:
            with self._probing(new, rank):
                self._workers = self._met(rendezvous)
        except LaunchError as error:  # somebody was lost before all had met
            raise WorkerLost(f"generation {new.generation} did not form: {error}") from error
        self._listener.close()
        self._hang_up_if_lost()
        self._publisher.lead(rank == 0)
        return transfer_in(new, {"regroup": waited - begun, "form": perf_counter() - waited})

    def _met(self, rendezvous: Rendezvous) -> Workers:
        """Connect, on a thread of its own: nothing else wakes whoever waits for a host that has vanished."""
        generation, forming = self._generation, self._forming

        def connect() -> None:
            try:
                workers = self._form(generation, rendezvous)
            except Exception as error:  # noqa: BLE001 (raised by whoever waits)
                with suppress(InvalidStateError):
                    forming.set_exception(error)
                return
            try:
                forming.set_result(workers)
            except InvalidStateError:  # nobody waits any more
                workers.close()

        threading.Thread(target=connect, name="unisono-connect", daemon=True).start()
        return forming.result()

    def _probing(self, new: NewGeneration, rank: int) -> AbstractContextManager[object]:
        """Wake whoever waits for hosts that this one does not reach: the transport itself would wait much longer."""
        targets = other_hosts(new, rank)
        return closing(self._probe(targets, self._not_reached)) if self._probe and targets else nullcontext()

    def _not_reached(self, unreached: tuple[Unreached, ...]) -> None:
        self._unreached = unreached
        words = "; ".join(f"{each.agent}: {each.why}" for each in unreached)
        with suppress(InvalidStateError):
            self._forming.set_exception(WorkerLost(f"hosts of the generation are out of reach ({words})"))

    def _is_next(self, new: NewGeneration) -> bool:
        return new.generation > self._generation.number  # a coordinator that came back may repeat itself

    def _open_door(self) -> None:
        """Leave the generation, and be there for those of the next."""
        self._heart.forms = True
        self._workers.close()
        with self._listener_lock:
            self._left = self._generation.number
            self._listener.close()
            self._listener = PeerListener(self._timeout_s)

    def _await(self, *kinds: Any, wanted: Callable[[Any], bool] = lambda news: True) -> Any:
        """The next news of one of these kinds. After news of the end there are no others, however often one asks."""
        while True:
            news = self._end or self._news.get()
            if isinstance(news, kinds) and wanted(news):
                return news
            if isinstance(news, Removed | Refused | JobOver):
                self._end = news
                _leave(news)

    def _watch(self, name: str) -> None:
        """Have the main thread hear of a value, as soon as it is known."""

        def look() -> None:
            while not self._closed.is_set():
                request = StoreRequest(id=0, operation="get", keys=(f"run/{name}",), timeout_s=WATCH_S)
                try:
                    reply = self._line.request(request)
                except LaunchError:  # the coordinator is gone for a while, or this worker is through
                    self._closed.wait(BEAT_S)
                    continue
                if not reply.error:
                    self._news.put(_Known(name, reply.value))
                    return

        threading.Thread(target=look, name="unisono-watch", daemon=True).start()

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S):
            progress = self._progress
            self._line.send(
                Progress(
                    acts=progress.acts,
                    step=progress.step,
                    loop=progress.loop,
                    samples_per_s=self._rate,
                    pulse=self._heart.look(self._workers),
                )
            )


def elastic(where: CoordinatorAccess, job: Job, host: str, form: Form, timeout_s: float, silence_s: float) -> Elastic:
    """The membership of a worker whose job has a coordinator.

    Raises:
        JobError: the token cannot be read.
        LaunchError: the coordinator refuses this worker, or cannot be reached.
    """
    token = read_token(where.token_file)
    hello = WorkerHello(worker=where.worker, host=host, pid=os.getpid(), shards=job.shards)

    def call(hear: Callable[[ToWorker], None]) -> Line:
        return Line.open(where.url, token, hello, hear, timeout_s, where.certificate, silence_s / LOOKS)

    def probe(targets: Sequence[Target], tell: Tell) -> Probing:
        return Probing(targets, token, min(PATIENCE_S, timeout_s), tell)

    return Elastic(call, hello, form, timeout_s, probe, silence_s)


def transfer_in(new: NewGeneration, seconds: Mapping[str, float]) -> StateTransfer:
    """A new generation, as far as it matters for who gives what to whom."""
    return StateTransfer(
        source=new.source,
        acts=[seat.acts for seat in new.roster],
        joiners=frozenset(rank for rank, seat in enumerate(new.roster) if seat.joins),
        seconds=seconds,
    )


class ElasticRendezvous(Rendezvous):
    """Of the workers of a new generation.

    Args:
        new: the generation.
        rank: of this worker.
        listener: of this worker, whose address the others know.
        store: the coordinator's.
    """

    def __init__(self, new: NewGeneration, rank: int, listener: PeerListener, store: dist.Store) -> None:
        self._here = _on_the_host_of(new.roster[rank], new.roster)
        self._place = self._here.index(new.roster[rank])
        self._generation, self._listener, self._store = new.generation, listener, store
        self.environment = Environment(
            "unisono", rank, len(new.roster), self._place, len(self._here), new.roster[rank].host
        )

    def store(self) -> dist.Store:
        """The coordinator's."""
        return dist.PrefixStore(f"g{self._generation}", self._store)

    def peers(self) -> Peers:
        """At the listeners whose addresses came with the roster."""
        lower = (address_from(seat.address) for seat in self._here[: self._place])
        purpose = f"generation {self._generation} of {' '.join(seat.worker for seat in self._here)}"
        return self._listener.gather(self._place, len(self._here), lower, purpose)


def _on_the_host_of(mine: Seat, roster: Sequence[Seat]) -> list[Seat]:
    # Hosts may have one name, for instance containers of one image: the addresses of their listeners tell.
    here = address_from(mine.address)
    return [seat for seat in roster if seat.host == mine.host and is_within_call(here, address_from(seat.address))]


WATCH_S = 30.0
"""How long the coordinator lets one question for a value wait."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A value that was watched for is there."""

    name: str
    value: str


_End = Removed | Refused | JobOver
_News = Welcome | NewGeneration | _End | _Known


def _leave(news: _End) -> NoReturn:
    if isinstance(news, Removed):
        raise Dismissed(news.reason, preempted=news.preempted)
    if isinstance(news, Refused):
        raise LaunchError(f"the coordinator turns this worker away: {news.reason}")
    if news.digest:
        raise Dismissed("the job is done")
    raise JobEnded(f"the job is over: {news.reason}")
