"""A membership that changes while the job trains: workers come, go and die, and the others go on."""

import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from time import perf_counter
from typing import Any, NoReturn

from unisono.errors import JobEnded, LaunchError, WorkerLost
from unisono.membership import messages
from unisono.membership.client import WorkerConnection
from unisono.membership.probe import PATIENCE_S
from unisono.membership.rendezvous import CoordinatorStore, Generation
from unisono.membership.token import read_token
from unisono.plan.split import Split
from unisono.received import whole_number
from unisono.reduce.peers import PeerListener, RendezvousStore
from unisono.reduce.transport import Solo
from unisono.train.config.run_config import Connection, CoordinatorAccess
from unisono.train.group.device_line import DeviceLine, FirstLine
from unisono.train.group.device_messages import Agreed, Farewell, News, ToDevice, Watched, WorkedOut
from unisono.train.group.liveness import BEAT_S, Heartbeat, OtherHosts, Probing, Report
from unisono.train.group.meeting import ElasticRendezvous, Rendezvous
from unisono.train.group.membership import MemberProgress, Membership, StateTransfer
from unisono.train.group.publisher import Ask, Publisher, packed, unpacked
from unisono.train.group.workers import Devices, Mesh, Workers

CLOCK_S = 2.0
"""Seconds that the coordinator may take to say what its clock shows."""

LOOKS = 4
"""The number of looks at whether the coordinator is there, in the time after which its silence counts."""

Form = Callable[[Generation, Rendezvous], Workers]
"""Connects the workers of a generation."""

AnyLine = WorkerConnection | FirstLine | DeviceLine

OpenLine = Callable[[Callable[[ToDevice], None]], AnyLine]
"""Opens the connection to the coordinator, or to the device that speaks with it. Messages go to the argument."""

Probe = Callable[[Sequence[messages.Target], Report], Probing]
"""Probes hosts until it is closed."""


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """The devices of a worker, which exist as long as the worker does."""

    devices: Devices
    mesh: Mesh
    board: RendezvousStore


class Forming:
    """The forming of one generation, for which the main thread waits. Any thread can end the wait.

    Attributes:
        unreached: the hosts of the generation to which this worker cannot connect.
    """

    def __init__(self) -> None:
        self.unreached: tuple[messages.Unreached, ...] = ()
        self._result: Future[Workers] = Future()

    def connect(self, form: Callable[[], Workers]) -> Workers:
        """Connect on a thread of its own, so that the wait can end although a host has vanished.

        Raises:
            WorkerLost: the attempt was given up.
        """
        threading.Thread(target=self._connect, args=(form,), name="unisono-connect", daemon=True).start()
        return self._result.result()

    def give_up(self, why: str) -> None:
        """Have the main thread wait no longer."""
        with suppress(InvalidStateError):  # the wait has ended already
            self._result.set_exception(WorkerLost(why))

    def not_reached(self, unreached: tuple[messages.Unreached, ...]) -> None:
        """Give up because of hosts out of reach: the transport itself would wait much longer."""
        self.unreached = unreached
        words = "; ".join(f"{host.agent}: {host.why}" for host in unreached)
        self.give_up(f"hosts of the generation are out of reach ({words})")

    def _connect(self, form: Callable[[], Workers]) -> None:
        try:
            workers = form()
        except Exception as error:  # noqa: BLE001 (raised in the thread that waits)
            with suppress(InvalidStateError):  # the wait has ended already
                self._result.set_exception(error)
            return
        try:
            self._result.set_result(workers)
        except InvalidStateError:  # the wait was given up
            workers.close()


class Elastic(Membership):
    """Follows the coordinator from one generation to the next.

    The main thread trains, and waits for the next generation where it has to. The connection's thread hears what
    happens elsewhere: it notes that a generation is due, and hangs up on a generation that has lost a worker, which
    wakes the main thread.

    Args:
        probe: a function that probes the hosts of a generation; None if they need no probes.
        silence_s: the seconds without word from the coordinator after which the job may go on without this worker.
        publisher: a function that makes the publisher of values for joiners, given a function that asks the
            coordinator.
        devices: the devices of this worker while it is in no generation.
        mesh: torch's group of the devices; None for a worker of one device.

    Raises:
        LaunchError: the coordinator refuses this worker, or cannot be reached.
    """

    is_elastic = True

    def __init__(
        self,
        call: OpenLine,
        hello: messages.WorkerHello,
        form: Form,
        timeout_s: float,
        probe: Probe | None = None,
        silence_s: float = math.inf,
        publisher: Callable[[Ask], Publisher] = Publisher,
        devices: Devices | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        self._devices = devices or Devices()
        self._hello, self._form, self._timeout_s = hello, form, timeout_s
        self._probe, self._silence_s = probe, silence_s
        self._news = News()
        self._generation = Generation(0, 0, Split.even(hello.shards, 1))
        super().__init__(Workers(self._generation, Solo(hello.shards), devices=self._devices), mesh)
        self._due = self._lost = self._left = 0
        self._listener_lock = threading.Lock()
        self._is_leaving = self.wants_checkpoint = False
        self._forming = Forming()
        self._hosts = OtherHosts()
        self._listener = PeerListener(timeout_s)
        self._line = call(self._receive)
        self._shared = self._line if isinstance(self._line, FirstLine | DeviceLine) else None
        self._publisher = publisher(self._line.request)
        self._store = CoordinatorStore(self._line, timedelta(seconds=timeout_s))
        self._heart = Heartbeat(self._line.send, lambda: self.workers)
        threading.Thread(target=self._heart.beat, name="unisono-beat", daemon=True).start()
        try:
            self.joins = self._news.take(messages.Welcome).joins
            if not self.joins:
                self._form_first()
        except BaseException:
            self.close()
            raise

    @property
    def is_due(self) -> bool:
        """Whether the coordinator has announced that a new generation follows this one."""
        return self._due == self._generation.number

    def checkpoint_begins(self) -> None:
        """Note that a checkpoint is written, as somebody may have asked."""
        self.wants_checkpoint = False

    def leave(self) -> bool:
        """Tell the coordinator that this worker leaves, once."""
        if not self._is_leaving:
            self._is_leaving = True
            self._line.send(messages.Leaving())
        return True

    def regroup(self, lost: WorkerLost | None, progress: MemberProgress) -> StateTransfer:
        """Hang up on this generation, and wait for the next one."""
        begun = perf_counter()
        self._heart.progress = progress
        self._open_door()
        self._line.send(
            messages.Arrived(
                generation=self._generation.number,
                acts=progress.acts,
                loop=progress.loop,
                at_boundary=progress.at_boundary,
                step=progress.step,
                address=self._listener.address.hex(),
                unreached=self._forming.unreached,
            )
        )
        return self._form_next(
            self._news.take(messages.NewGeneration, wanted=partial(_is_after, self._generation.number)), begun
        )

    def enter(self, loop: int) -> StateTransfer | None:
        """Wait until the others take this worker in, or have finished the loop."""
        begun = perf_counter()
        self._open_door()
        # Not 0 if this worker was taken in already, and lost the others before it had their state.
        left = self._generation.number
        address, unreached = self._listener.address.hex(), self._forming.unreached
        self._line.send(messages.Ready(loop=loop, address=address, generation=left, unreached=unreached))
        self._watch(over := f"loop/{loop}")

        def is_wanted(news: messages.NewGeneration | Watched) -> bool:
            return _is_after(left, news) if isinstance(news, messages.NewGeneration) else news.name == over

        news = self._news.take(messages.NewGeneration, Watched, wanted=is_wanted)
        return self._form_next(news, begun) if isinstance(news, messages.NewGeneration) else None

    def formed(self, seconds: Mapping[str, float]) -> None:
        """Tell the coordinator that this worker trains on."""
        self.joins = self._heart.forms = False
        self._line.send(messages.Formed(generation=self._generation.number, seconds=dict(seconds)))

    def holds(self, acts: int) -> bool:
        """Ask the other devices of this worker whether they have worked out the call. All get the same answer."""
        if self._shared is None:
            return True
        generation = self._generation.number
        self._shared.send(WorkedOut(generation=generation, acts=acts))

        def is_wanted(news: Agreed) -> bool:
            return (news.generation, news.acts) == (generation, acts)

        return bool(self._news.take(Agreed, wanted=is_wanted).holds)

    def publish(self, name: str, value: Any) -> None:
        """Put a value into the coordinator's store, without waiting. The first device of a worker does it for all."""
        if not self._devices.is_first:
            return
        self._publisher.publish(f"run/{name}", packed(value))

    def published(self, name: str) -> Any:
        """Wait until a value is in the coordinator's store, and return it."""
        self._watch(name)
        return unpacked(self._news.take(Watched, wanted=lambda news: news.name == name).value)

    def report_progress(self, progress: MemberProgress, samples_per_s: float, shard_s: float) -> None:
        """Report progress with the next sign of life."""
        heart = self._heart
        heart.progress, heart.samples_per_s, heart.shard_s = progress, samples_per_s, shard_s

    def resize(self, workers: int) -> None:
        """Ask the coordinator for another number of workers."""
        self._line.send(messages.ResizeRequest(workers=workers))

    def replace(self, generation: int, rank: int) -> None:
        """Ask the coordinator to replace a worker."""
        self._line.send(messages.Replace(generation=generation, rank=rank))

    def finished(self, digest: str) -> None:
        """Tell the coordinator that the job is done, and wait until all members have told it so.

        Until then this worker may have to tell it again, on a new connection. Other members may take long, for a last
        checkpoint for example; the coordinator watches whether they get on. The wait ends when the coordinator has been
        silent for too long.
        """
        self._line.send(messages.Finished(digest=digest))
        while self._line.silent_s <= self._timeout_s:
            if self._news.brings_farewell(BEAT_S):
                return

    def await_end(self) -> NoReturn:
        """Wait until the others finish without this worker."""
        self._news.take(())
        raise AssertionError("only the job's end is waited for")

    def clock(self) -> float:
        """Ask the coordinator for its clock, in seconds."""
        reply = self._line.request(messages.StoreRequest(id=0, operation="clock", keys=("run/clock",)), CLOCK_S)
        nanoseconds = whole_number(reply.value)
        if nanoseconds is None:
            raise LaunchError(f"the coordinator does not say what its clock shows: {reply.error}")
        return nanoseconds / 1e9

    def cut_off(self, seconds: float) -> None:
        """Cut all connections, that to the coordinator for so many seconds."""
        self._line.cut(seconds)
        super().cut_off(seconds)

    def away(self) -> str:
        """Why the job may go on without this worker.

        The coordinator turns it away, or has been silent for half of the time after which it gives a worker up.
        """
        if self._news.farewell is not None:
            is_refused = isinstance(self._news.farewell, messages.Refused)
            return f"the coordinator turns this worker away: {self._news.farewell.reason}" if is_refused else ""
        if (silent_s := self._line.silent_s) <= self._silence_s:
            return ""
        return f"no word from the coordinator for {silent_s:.1f} s, so the job may go on without this worker"

    def close(self) -> None:
        """Let go of all connections."""
        self._news.close()
        self._heart.close()
        self._listener.close()
        self.workers.close()
        self._publisher.close()
        self._line.close()
        if self._mesh is not None:
            self._mesh.close()

    # -- the connection's thread -------------------------------------------------------------------------------------

    def _receive(self, message: ToDevice) -> None:
        if isinstance(message, messages.RegroupDue):
            self._due = message.generation
        elif isinstance(message, messages.CheckpointDue):
            self.wants_checkpoint = True
        elif isinstance(message, messages.Lost):
            self._lost = max(self._lost, message.generation)
            self._hang_up_if_lost()
        elif isinstance(message, messages.Welcome | messages.NewGeneration | Watched | Agreed):
            self._news.put(message)
        elif isinstance(message, Farewell):
            self._news.put(message)
            self._lost = self._generation.number  # wakes the main thread if it waits for other workers
            self._hang_up_if_lost()

    def _hang_up_if_lost(self) -> None:
        # Both the thread that notes a loss and the one that forms a generation call this: the second one sees both.
        # A worker that has left the generation waits for the next one already, and keeps its listener open for that.
        with self._listener_lock:
            if self._lost >= self._generation.number > self._left:
                self._forming.give_up("another worker was lost before all had met")
                self._listener.close()
                self.workers.abort()

    # -- the main thread ---------------------------------------------------------------------------------------------

    def _form_first(self) -> None:
        begun = perf_counter()
        self._line.send(messages.Ready(address=self._listener.address.hex()))
        lost: WorkerLost | None = None
        while True:
            try:
                if lost is None:
                    self._form_next(self._news.take(messages.NewGeneration), begun)
                else:
                    self.regroup(lost, MemberProgress(0))
            except JobEnded:
                raise
            except WorkerLost as error:
                lost = error
            else:
                return

    def _form_next(self, new: messages.NewGeneration, begun: float) -> StateTransfer:
        announced = perf_counter()
        rank = next(neighbour.rank for neighbour in new.here if neighbour.worker == self._hello.worker)
        self._forming = Forming()
        self._generation = Generation(new.generation, rank, Split(new.bounds), new.departures)
        self._line.generation = new.generation
        self._hang_up_if_lost()
        rendezvous = ElasticRendezvous(
            new, rank, self._hello.host, self._listener, self._store, self._timeout_s, self._devices.rank
        )
        targets = self._hosts.of(new)
        probe = self._probe if targets and self._devices.is_first else None
        try:
            with closing(probe(targets, self._forming.not_reached)) if probe is not None else nullcontext():
                self.workers = self._forming.connect(partial(self._form, self._generation, rendezvous))
        except LaunchError as error:  # a worker was lost before all had connected
            raise WorkerLost(f"generation {new.generation} did not form: {error}") from error
        self._listener.close()
        self._hang_up_if_lost()
        self._publisher.lead(rank == 0)
        return transfer_in(new, {"regroup": announced - begun, "form": perf_counter() - announced})

    def _watch(self, name: str) -> None:
        """Have a value delivered as soon as it is known. Of several devices, the first one asks, and all receive it."""
        if self._devices.is_first:
            deliver = self._receive if self._shared is None else self._shared.deliver
            self._news.watch(name, self._line.request, deliver)

    def _open_door(self) -> None:
        """Leave the generation, and listen for the workers of the next one."""
        self._heart.forms = True
        self.workers.close()
        with self._listener_lock:
            self._left = self._generation.number
            self._listener.close()
            self._listener = PeerListener(self._timeout_s)


def elastic(
    where: CoordinatorAccess, shards: int, how: Connection, form: Form, group: DeviceGroup | None = None
) -> Elastic:
    """Return the membership of a worker whose job has a coordinator, or of one of its devices.

    Raises:
        JobError: the token cannot be read.
        LaunchError: the coordinator refuses this worker, or cannot be reached.
        WorkerLost: another device of this worker does not come.
    """
    token, devices = read_token(where.token_file), Devices() if group is None else group.devices
    timeout_s, silence_s, host = how.timeout_s, how.silence_s, how.environment.host
    hello = messages.WorkerHello(worker=where.worker, host=host, pid=os.getpid(), shards=shards, devices=devices.count)

    def line(receive: Callable[[Any], None]) -> WorkerConnection:
        return WorkerConnection(where.url, token, hello, receive, timeout_s, where.certificate, silence_s / LOOKS)

    def call(receive: Callable[[ToDevice], None]) -> AnyLine:
        if group is None:
            return line(receive)
        if devices.is_first:
            return FirstLine(devices.count, group.board, line, receive, timeout_s)
        return DeviceLine(devices.rank, group.board, where.url, receive, timeout_s)

    def probe(targets: Sequence[messages.Target], report: Report) -> Probing:
        return Probing(targets, token, min(PATIENCE_S, timeout_s), report)

    mesh = None if group is None else group.mesh
    return Elastic(call, hello, form, timeout_s, probe, silence_s, devices=devices, mesh=mesh)


def transfer_in(new: messages.NewGeneration, seconds: Mapping[str, float]) -> StateTransfer:
    """Return who gives the state to whom in a new generation."""
    return StateTransfer(source=new.source, acts=new.acts, joiners=new.joiners, seconds=seconds)


def _is_after(generation: int, new: messages.NewGeneration) -> bool:
    """Whether a generation comes after this one. A coordinator that has restarted may announce one again."""
    return new.generation > generation
