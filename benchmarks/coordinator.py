"""What the coordinator costs, by the number of workers: all of it but the sockets."""

import random
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time

from benchmarks.noise import NoiseMeter
from benchmarks.report import Grid, Report
from unisono.membership import state as machine
from unisono.membership.coordinator import STATE_LOG, AgentSession, Coordinator, Session, WorkerSession
from unisono.membership.messages import (
    AgentHello,
    Arrived,
    Formed,
    Message,
    Probed,
    Progress,
    Pulse,
    Ready,
    WorkerEnded,
    WorkerHello,
)

SIZES = (16, 64, 256, 1024, 4096)
"""Numbers of workers."""

ADDRESS = b"\0unisono-0123456789abcdef-0123456789abcdef0123456789abcdef".hex()
"""As long as those at which the workers of a host reach each other."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How the benchmark is run.

    Attributes:
        sizes: numbers of workers.
        per_host: workers of each host.
        beats: heartbeats that are timed.
        losses: workers that are lost, one after the other, each of which is replaced.
        probes: whether agents answer probes: a host that has lost all of its workers probes the others.
        seed: of the order in which workers speak.
    """

    sizes: tuple[int, ...] = SIZES
    per_host: int = 8
    beats: int = 4000
    losses: int = 5
    probes: bool = False
    seed: int = 0


@dataclass(slots=True)
class Phase:
    """What one thing has cost, each time.

    Attributes:
        seconds: of processor time.
        sent: bytes to workers and agents.
        kept: bytes by which the state on disk has grown; below 0 where it was written anew.
    """

    seconds: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{1e3 * median(self.seconds):.1f} ms"

    @property
    def bytes_sent(self) -> str:
        """For people."""
        return _bytes(median(self.sent))

    @property
    def bytes_kept(self) -> str:
        """For people."""
        return _bytes(median(self.kept))


def _bytes(number: float) -> str:
    return f"{number / 1e6:.2f} MB" if number >= 1e5 else f"{number / 1e3:.1f} kB"


def run(choice: Choice) -> Report:
    """Measure each number of workers, the smallest first."""
    meter = NoiseMeter()
    meter.calibrate()
    found = {size: measured(size, choice) for size in choice.sizes}
    grid = Grid(
        f"The coordinator's processor time and traffic, without sockets; {choice.per_host} workers a host",
        ("workers", "start", "sent", "heartbeat", "loss told", "regroup", "sent", "on disk", "join", "sent", "on disk"),
        [_row(size, phases, choice) for size, phases in found.items()],
        (
            "Start: until all are connected, ready, and work in the first generation. Loss told: from the end to",
            "the last word about it. Regroup: from there to the last word of the next generation, with the arrivals",
            "of all others. Join: the same for a worker that comes instead. Sent: to all workers and agents together.",
            "On disk: the growth of the coordinator's state. Medians.",
        ),
    )
    figures = {str(size): {name: asdict(phase) for name, phase in phases.items()} for size, phases in found.items()}
    return Report("coordinator", asdict(choice), meter.read(), [grid], {"phases": figures})


def _row(size: int, phases: dict[str, Phase], choice: Choice) -> tuple[str, ...]:
    start, beats, loss, regroup, join = (phases[name] for name in ("start", "beats", "loss", "regroup", "join"))
    return (
        str(size),
        f"{start.seconds[0]:.2f} s",
        start.bytes_sent,
        f"{1e3 * beats.seconds[0] / choice.beats:.3f} ms",
        str(loss),
        str(regroup),
        regroup.bytes_sent,
        regroup.bytes_kept,
        str(join),
        join.bytes_sent,
        join.bytes_kept,
    )


def measured(workers: int, choice: Choice) -> dict[str, Phase]:
    """What one number of workers costs, by phase."""
    chance = random.Random(choice.seed)  # noqa: S311 (no secret)
    with TemporaryDirectory(prefix="benchmark-") as name:
        crowd = Everybody(Path(name), workers, choice)
        with closing(crowd.coordinator):
            with crowd.phase("start"):
                crowd.start()
                crowd.form()
            with crowd.phase("beats"):
                crowd.beat(chance.choices(crowd.members, k=choice.beats))
            for _ in range(choice.losses):
                with crowd.phase("loss"):
                    crowd.lose(chance.choice(crowd.members))
                with crowd.phase("regroup"):
                    crowd.arrive()
                crowd.form()
                with crowd.phase("join"):
                    crowd.replace()
                    crowd.arrive()
                crowd.form()
    return crowd.phases


class Everybody:
    """A coordinator, and the sessions of workers and agents that say what they are told to.

    Args:
        folder: the run folder.
        workers: their number.
        choice: how the benchmark is run.

    Attributes:
        phases: what each phase has cost so far.
    """

    def __init__(self, folder: Path, workers: int, choice: Choice) -> None:
        self._path, self._choice = folder / STATE_LOG, choice
        self._spent, self._acts = 0.0, 1
        self._count = _Count()
        self._sessions: dict[str, Session] = {}
        self._room = {
            f"a{first}": min(choice.per_host, workers - first) for first in range(0, workers, choice.per_host)
        }
        settings = machine.ElasticConfig(largest=workers, max_restarts=10)
        self.phases: dict[str, Phase] = {}
        self.coordinator = Coordinator(folder, settings)

    @property
    def members(self) -> list[str]:
        """The workers that train, by rank."""
        return [member.id for member in self.coordinator.state.members]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Note what is spent meanwhile: only the coordinator's own time counts."""
        phase = self.phases.setdefault(name, Phase())
        spent, sent, kept = self._spent, self._count.bytes, self._path.stat().st_size
        yield
        phase.seconds.append(self._spent - spent)
        phase.sent.append(self._count.bytes - sent)
        phase.kept.append(self._path.stat().st_size - kept)

    def start(self) -> None:
        """All connect, and get ready."""
        hellos: list[tuple[str, Message]] = []
        for number, (agent, room) in enumerate(self._room.items()):
            probes = f"127.0.0.1:{1024 + number}" if self._choice.probes else ""
            hellos.append((agent, AgentHello(agent=agent, host=f"host-{agent}", workers=room, probes=probes)))
        self._say(hellos, AgentSession)
        names = [worker.id for worker in self.coordinator.state.workers.values()]
        self._connect(names)
        self._say((name, Ready(address=ADDRESS)) for name in names)

    def _probed(self) -> list[tuple[str, Message]]:
        """What agents answer that were asked to probe others."""
        asked = {agent.id: agent.probing for agent in self.coordinator.state.agents.values() if agent.probing}
        return [(agent, Probed(reached=others)) for agent, others in asked.items()]

    def form(self) -> None:
        """All members work in their generation."""
        formed = Formed(generation=self.coordinator.state.generation, seconds={"form": 0.5, "copy": 0.1})
        self._say((name, formed) for name in self.members)

    def beat(self, names: list[str]) -> None:
        """Heartbeats of these members."""
        pulse = Pulse(doing="call", still_s=0.01, longest_s=1.0, shard_s=0.01)
        acts, rate = self._acts, 100.0
        self._say((name, Progress(acts=acts, step=acts, samples_per_s=rate, loop=0, pulse=pulse)) for name in names)

    def lose(self, name: str) -> None:
        """The process of a member ends."""
        agent = self.coordinator.state.workers[name].agent
        with self._clock():
            self._sessions.pop(name).close()
        self._say([(agent, WorkerEnded(worker=name, code=-9))])

    def arrive(self) -> None:
        """All members stand at the next boundary."""
        self._acts += 1
        arrived = Arrived(
            generation=self.coordinator.state.generation,
            acts=self._acts,
            loop=0,
            at_boundary=True,
            step=self._acts,
            address=ADDRESS,
        )
        self._say((name, arrived) for name in self.members)

    def replace(self) -> None:
        """Those that come instead of the lost connect, and are ready, once their hosts have probed the others."""
        self._say(self._probed())
        names = [name for name in self.coordinator.state.workers if name not in self._sessions]
        self._connect(names)
        self._say((name, Ready(loop=0, address=ADDRESS)) for name in names)

    def _connect(self, names: list[str]) -> None:
        hosts = {name: f"host-{self.coordinator.state.workers[name].agent}" for name in names}
        hellos = ((name, WorkerHello(worker=name, host=hosts[name], pid=1, shards=65536)) for name in names)
        self._say(hellos, WorkerSession)

    def _say(self, said: Iterable[tuple[str, Message]], kind: type[Session] | None = None) -> None:
        texts = [(who, message.model_dump_json()) for who, message in said]
        if kind is not None:
            self._sessions |= {who: kind(self.coordinator, self._count) for who, _ in texts}
        with self._clock():
            for who, text in texts:
                self._sessions[who].receive(text)

    @contextmanager
    def _clock(self) -> Iterator[None]:
        begun = process_time()
        yield
        self._spent += process_time() - begun


class _Count:
    """Counts what is sent, and forgets it."""

    def __init__(self) -> None:
        self.bytes = 0

    def send(self, text: str) -> None:
        self.bytes += len(text)

    def hang_up(self) -> None:
        pass
