"""One start of a simulated job: the real coordinator's state, and the agents and workers that it decides about."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np

from unisono.adapt.view import Decision
from unisono.membership import state as machine
from unisono.membership.messages import (
    AgentHello,
    AgentLeaving,
    Arrived,
    End,
    Finished,
    Formed,
    FromWorker,
    JobOver,
    Lost,
    Progress,
    Pulse,
    Ready,
    RegroupDue,
    Removed,
    Replace,
    ResizeRequest,
    Start,
    WorkerEnded,
    WorkerHello,
)
from unisono.plan.split import Split
from unisono_lab.simulation.market import HostPrices
from unisono_lab.simulation.scenario import HostKind, Incident, Scenario
from unisono_lab.simulation.simulated_training import Array, Crew, SimulatedTraining

# The events in virtual time, and what a job spends that time on.


Part = Literal["training", "regroup", "waiting", "start"]
"""The activity of a job at a moment.

training  steps are computed
regroup   a generation ends or forms, or a loss is not yet noticed
waiting   there are too few workers, or the job is not running
start     the first workers start
"""


class Course:
    """The planned events of a job, by their time, and the time that the job has lost so far.

    Events at the same moment happen in the order in which they were planned.

    Attributes:
        now: the virtual time, in seconds.
        repeated_s: seconds of training whose steps were lost.
        stall_s: seconds for which training paused for checkpoints.
        worker_seconds: seconds of training, times workers.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.part: Part = "waiting"
        self.repeated_s = self.stall_s = self.worker_seconds = 0.0
        self._turned_at = 0.0
        self._seconds: dict[Part, float] = defaultdict(float)

    def at(self, moment: float, event: Callable[[], None]) -> None:
        """Plan an event for a moment, in seconds."""
        self._count += 1
        heapq.heappush(self._heap, (moment, self._count, event))

    def later(self, seconds: float, event: Callable[[], None]) -> None:
        """Plan an event for a number of seconds from now."""
        self.at(self.now + seconds, event)

    def go_on(self) -> bool:
        """Move the time on to the next event, and let it happen; False if there is none."""
        if not self._heap:
            return False
        self.now, _, event = heapq.heappop(self._heap)
        event()
        return True

    def turn(self, part: Part) -> None:
        """Change the activity of the job."""
        self._seconds[self.part] = self._seconds[self.part] + self.now - self._turned_at
        self.part, self._turned_at = part, self.now

    def lost(self) -> dict[str, float]:
        """The lost seconds, by cause."""
        seconds = self._seconds
        spent = {"regroup": seconds["regroup"], "waiting": seconds["waiting"], "start": seconds["start"]}
        return {**spent, "repeated": self.repeated_s, "checkpoints": self.stall_s}


# One start of a simulated job: the real coordinator's state, and the agents and workers that it decides about.


PING_S = 20.0
"""The seconds between pings of silent connections, as in the coordinator's service."""

MESSAGE_S = 0.01
"""The seconds of a message."""

MOST_RESTARTS = 10**6
"""The number of restarts, which is large, so that lost workers are always replaced if there is room."""


@dataclass
class Host:
    """A rented host, with its agent.

    Attributes:
        noticed: whether it got the notice that it will be taken away.
    """

    agent: str
    kind: HostKind
    zone: str
    prices: HostPrices
    noticed: bool = False


@dataclass
class SimulatedGeneration:
    """The workers that train together.

    Attributes:
        workers: the ids of the workers, by rank.
        joiners: the workers that get the state when the generation forms.
        stopping: whether the generation ends after the present step.
        frozen_at: the moment at which a worker vanished; None if none did.
        begun_at: the moment at which the drawn steps begin.
        ends: the moments at which the drawn steps end.
        stalls: the seconds of checkpoints in each drawn step.
    """

    number: int
    workers: list[str]
    joiners: frozenset[str]
    crew: Crew
    formed: bool = False
    stopping: bool = False
    over: bool = False
    frozen_at: float | None = None
    begun_at: float = 0.0
    ends: Array = field(default_factory=lambda: np.zeros(0))
    stalls: Array = field(default_factory=lambda: np.zeros(0))


class Coordination:
    """One start of a job, from its first agent to its end.

    ``changed`` is called with the number of workers when it has changed, ``wants`` with a host, and whether its workers
    are wanted.
    """

    def __init__(
        self,
        scenario: Scenario,
        course: Course,
        training: SimulatedTraining,
        changed: Callable[[int], None],
        wants: Callable[[Host, bool], None],
    ) -> None:
        self._scenario, self._course, self._training = scenario, course, training
        self._changed, self._wants = changed, wants
        self._took = scenario.seconds
        settings = machine.ElasticConfig(
            smallest=scenario.job.fewest,
            largest=max(scenario.room, scenario.job.fewest),
            wanted=scenario.job.begin_with,
            max_restarts=MOST_RESTARTS,
            failure_timeout_s=scenario.job.failure_timeout_s,
        )
        self.state = machine.State(settings, now=course.now)
        self._begun_with = training.now.steps
        self._hosts: dict[str, Host] = {}
        self._where: dict[str, Host] = {}
        self._generation: SimulatedGeneration | None = None
        self._starting: dict[float, list[tuple[str, str]]] = {}
        self._warm: set[str] = set()  # agents that have started workers before
        self._vanished: set[str] = set()  # workers and agents whose loss the coordinator has not noticed
        self._reported_at = 0.0

    # -- hosts

    def join(self, host: Host) -> None:
        """The agent of a host connects."""
        self._hosts[host.agent] = host
        self._apply(
            machine.AgentMessage(host.agent, AgentHello(agent=host.agent, host=host.agent, workers=host.kind.workers))
        )
        self._release_if_idle(host.agent)

    def warn(self, host: Host) -> None:
        """A host will be taken away: its agent leaves."""
        if host.agent in self._hosts:
            self._apply(machine.AgentMessage(host.agent, AgentLeaving()))

    def vanish(self, host: Host) -> None:
        """A host vanishes, with all its processes. It sends no message; its connections fall silent."""
        if self._hosts.pop(host.agent, None) is None:
            return
        lost = {name for name, there in self._where.items() if there is host}
        self._where = {name: there for name, there in self._where.items() if there is not host}
        self._vanished |= {host.agent, *lost} & {*self.state.agents, *self.state.workers}
        current = self._generation
        if current is not None and not current.over and lost & set(current.workers):
            if current.frozen_at is None:
                current.frozen_at = self._course.now
            self._course.turn("regroup")
        silence_s = 2 * min(PING_S, self._scenario.job.failure_timeout_s / 4)
        self._course.later(silence_s, partial(self._fall_silent, host.agent, lost))

    def befall(self, incident: Incident) -> None:
        """Let an incident happen to the job."""
        current = self._generation
        if incident.resize is not None and self.state.over is None:
            self._apply(machine.ResizeRequested(incident.resize))
        if incident.kill is None or current is None or current.over or incident.kill >= len(current.workers):
            return
        name = current.workers[incident.kill]
        if (host := self._where.get(name)) is not None:
            current.frozen_at = self._course.now
            self._end_process(host.agent, name, -9)

    def _fall_silent(self, agent: str, workers: Collection[str]) -> None:
        if self.state.over is not None:
            return
        cut = [machine.Disconnected(worker=name) for name in sorted(self._vanished.intersection(workers))]
        self._apply(machine.Bundle([*cut, machine.Disconnected(agent=agent)]))
        self._watch()

    def _watch(self) -> None:
        """Plan the coordinator's next deadline while it waits for workers or agents that have vanished."""
        deadline = machine.next_deadline(self.state)
        self._vanished &= {*self.state.agents, *self.state.workers}
        if deadline is not None and self._vanished:
            self._course.at(max(deadline, self._course.now + MESSAGE_S), self._tick)

    def _tick(self) -> None:
        if self.state.over is not None:
            return
        if self._course.now > self._reported_at + self._scenario.job.failure_timeout_s / 2:
            self._reported_at = self._course.now
            living = [] if self._generation is None else self._living(self._generation)
            self._send_all(living, Progress(acts=self._acts, step=self._acts, pulse=Pulse(doing="wait")))
        self._apply(machine.Tick())
        self._watch()

    # -- what the coordinator decides

    def _apply(self, event: machine.Event) -> None:
        before = self.state.generation
        self.state, actions = machine.step(self.state, event, self._course.now)
        is_due = is_lost = False
        for action in actions:
            match action:
                case machine.SendToWorkers(workers, message):
                    is_due, is_lost = is_due or isinstance(message, RegroupDue), is_lost or isinstance(message, Lost)
                    if isinstance(message, Removed):
                        self._part(workers, message)
                case machine.SendToAgent(agent, Start() as order):
                    self._start(agent, order)
                case machine.SendToAgent(agent, End() as order):
                    self._end(agent, order)
                case machine.SendToAgent(agent, JobOver()):
                    self._hosts.pop(agent, None)
                case machine.WriteJournal("starts over"):
                    self._start_over()
        if self.state.generation > before and self.state.minted is not None:
            self._meet()
        elif is_lost:
            self._break_off()
        elif is_due:
            self._stop()

    def _send_all(self, names: Iterable[str], message: FromWorker) -> None:
        self._apply(machine.WorkerMessage(tuple(names), message))

    def _start(self, agent: str, order: Start) -> None:
        took_s = self._took.start_s if agent not in self._warm else self._took.later_start_s
        self._warm.add(agent)
        if (host := self._hosts.get(agent)) is not None:
            self._wants(host, True)
        first_s = self._course.now + order.delay_s + took_s
        for number, name in enumerate(order.workers):
            moment = first_s + number * self._took.start_each_s
            if moment not in self._starting:
                self._starting[moment] = []
                self._course.at(moment, partial(self._begin, moment))
            self._starting[moment].append((agent, name))

    def _begin(self, moment: float) -> None:
        """The workers that were started for this moment connect, and are ready."""
        shards, names = self._scenario.work.shards, []
        for agent, name in self._starting.pop(moment):
            host = self._hosts.get(agent)
            if host is not None and name in self.state.workers and self.state.over is None:
                self._where[name] = host
                names.append(name)
        hellos = [WorkerHello(worker=name, host=self._where[name].agent, pid=1, shards=shards) for name in names]
        self._apply(machine.Bundle([machine.WorkerMessage((hello.worker,), hello) for hello in hellos]))
        connected = [self.state.workers[name] for name in names if name in self.state.workers]
        ready = {joins: Ready(loop=0 if joins else None) for joins in (False, True)}
        self._apply(machine.Bundle([machine.WorkerMessage((worker.id,), ready[worker.joins]) for worker in connected]))

    def _end(self, agent: str, order: End) -> None:
        for name in order.workers:
            self._course.later(MESSAGE_S, partial(self._end_process, agent, name, -15 if order.how == "leave" else -9))

    def _part(self, names: Iterable[str], farewell: Removed) -> None:
        if farewell.preempted:
            self._training.keep(self._course.now)
        for name in names:
            if (host := self._where.get(name)) is not None:
                self._course.later(MESSAGE_S, partial(self._end_process, host.agent, name, 0))

    def _end_process(self, agent: str, name: str, code: int) -> None:
        if agent not in self._hosts or self.state.over is not None:
            return
        self._where.pop(name, None)
        self._apply(machine.AgentMessage(agent, WorkerEnded(worker=name, code=code)))
        self._release_if_idle(agent)

    def _release_if_idle(self, agent: str) -> None:
        """Give a host back if it has no workers, and the job has all workers that it wants."""
        host, agent_state = self._hosts.get(agent), self.state.agents.get(agent)
        is_idle = agent_state is not None and not agent_state.started and len(self.state.workers) >= self.state.size
        if host is not None and is_idle:
            self._wants(host, False)

    def _start_over(self) -> None:
        """No worker holds the state any more: go back to the newest checkpoint that was complete at the loss."""
        lost_at = self._leave_off()
        self._generation = None
        self._course.turn("waiting")
        self._course.repeated_s += self._training.fall_back(lost_at)
        self._begun_with = self._training.now.steps
        self._changed(0)

    # -- a generation

    @property
    def _acts(self) -> int:
        return self._training.now.steps - self._begun_with

    def _meet(self) -> None:
        """Begin a generation: its workers connect, and joiners get the state."""
        minted = self.state.minted
        assert minted is not None
        names = [seat.worker for seat in minted.roster]
        speeds = {name: host.kind.speed for name, host in self._where.items()}
        crew = Crew.of([*zip([speeds.get(name, 1.0) for name in names], Split(minted.bounds).counts, strict=True)])
        joiners = frozenset(seat.worker for seat in minted.roster if seat.joins)
        self._generation = new = SimulatedGeneration(minted.generation, names, joiners, crew)
        self._training.reset_steady()
        if self._course.part != "start":
            self._course.turn("regroup")
        if any(name not in self._where for name in names):
            new.frozen_at = self._course.now  # a worker has vanished, and the coordinator has not noticed it yet
            return
        self._course.later(self._took.forming(len(names), joined=bool(joiners)), partial(self._form, new))

    def _form(self, generation: SimulatedGeneration) -> None:
        if generation.over or generation is not self._generation or generation.frozen_at is not None:
            return
        generation.formed = True
        self._course.turn("training")
        self._changed(len(generation.workers))
        self._send_all(generation.workers, Formed(generation=generation.number))
        if generation is self._generation and not generation.over:
            self._work(generation)

    def _work(self, generation: SimulatedGeneration) -> None:
        """Draw the next steps."""
        steps = 1 if generation.stopping else self._training.ahead()
        seconds, generation.stalls = self._training.draw(generation.crew, steps)
        generation.begun_at = self._course.now
        generation.ends = self._course.now + np.cumsum(seconds + generation.stalls)
        self._course.at(float(generation.ends[-1]), partial(self._boundary, generation, generation.begun_at))

    def _boundary(self, generation: SimulatedGeneration, begun_at: float) -> None:
        """The drawn steps have ended, or the step that was under way when the generation had to stop."""
        if generation.over or generation.frozen_at is not None or generation.begun_at != begun_at:
            return
        mean_s = float(generation.ends[-1] - begun_at) / len(generation.ends)
        self._commit(generation, self._course.now)
        if self._training.has_policies and not len(generation.ends):
            self._decide(generation, mean_s)
        if self._training.is_done:
            generation.over = True
            self._send_all(generation.workers, Finished(digest="d"))
        elif generation.stopping:
            self._arrive(generation)
        else:
            self._work(generation)

    def _commit(self, generation: SimulatedGeneration, until: float) -> float:
        """Count the steps that have ended at a moment; returns the end of the last one."""
        done = int(np.searchsorted(generation.ends, until, side="right"))
        ended_at = float(generation.ends[done - 1]) if done else generation.begun_at
        stalls = float(generation.stalls[:done].sum())
        self._course.stall_s += stalls
        self._course.worker_seconds += (ended_at - generation.begun_at) * len(generation.workers)
        self._training.commit(done, ended_at - generation.begun_at - stalls, ended_at)
        generation.ends, generation.stalls = generation.ends[done:], generation.stalls[done:]
        generation.begun_at = ended_at
        return ended_at

    def _decide(self, generation: SimulatedGeneration, seconds: float) -> None:
        decisions = self._training.ask(generation.crew, seconds, generation.number, self.state.departures)
        for decision in decisions:
            self._carry_out(generation, decision)
        if self._training.balances and not generation.over:
            self._report_speeds(generation)

    def _report_speeds(self, generation: SimulatedGeneration) -> None:
        """Workers report the seconds of a shard, by which the coordinator splits the shards."""
        crew, acts = generation.crew, self._acts
        for place, shard_s in enumerate(self._training.shard_seconds(crew)):
            names = [
                name for name, load_place in zip(generation.workers, crew.places, strict=True) if load_place == place
            ]
            pulse = Pulse(doing="call", shard_s=shard_s)
            self._send_all(names, Progress(acts=acts, step=acts, pulse=pulse))

    def _carry_out(self, generation: SimulatedGeneration, decision: Decision) -> None:
        value = decision.value
        match decision.verb:
            case "checkpoint":
                self._training.keep(self._course.now + self._took.checkpoint_s)
                self._course.stall_s += self._took.stall_s
            case "resize" if isinstance(value, int):
                self._send_all(generation.workers[:1], ResizeRequest(workers=value))
            case "replace" if isinstance(value, int):
                self._send_all(generation.workers[:1], Replace(generation=generation.number, rank=value))

    def _stop(self) -> None:
        """The coordinator ends the generation, after the step that is under way."""
        current = self._generation
        if current is None or current.over or current.stopping:
            return
        current.stopping = True
        if not current.formed or current.frozen_at is not None or not len(current.ends):
            return  # it stops after the first step once it has formed, or when the loss is noticed
        boundary = float(current.ends[np.searchsorted(current.ends, self._course.now)])
        self._course.at(boundary, partial(self._boundary, current, current.begun_at))

    def _break_off(self) -> None:
        """A worker is lost, so the present step cannot end: the others notice it, and wait for a generation."""
        current = self._generation
        if current is None or current.over:
            return
        noticed_at = self._course.now + self._took.detect_s + self._remaining_step_s(current)
        self._leave_off()
        self._course.turn("regroup")
        self._course.at(noticed_at, partial(self._arrive, current))

    def _remaining_step_s(self, generation: SimulatedGeneration) -> float:
        """The seconds for which the others still compute the broken step: they notice the loss when they send."""
        ends, now = generation.ends, self._course.now
        broken_at = now if generation.frozen_at is None else generation.frozen_at
        later = ends[np.searchsorted(ends, broken_at) :] if generation.formed else ends[:0]
        return max(0.0, float(later[0]) - now) if len(later) else 0.0

    def _leave_off(self) -> float:
        """End the generation's work, keeping the steps that have ended; returns the moment at which it stopped."""
        current = self._generation
        if current is None:
            return self._course.now
        until = self._course.now if current.frozen_at is None else current.frozen_at
        if current.formed and not current.over:
            self._course.repeated_s += until - self._commit(current, until)
        current.over = True
        return until

    def _arrive(self, generation: SimulatedGeneration) -> None:
        """The remaining workers wait for the next generation."""
        generation.over = True
        if self.state.over is not None:
            return
        self._course.turn("regroup")
        arrived = Arrived(generation=generation.number, acts=self._acts, loop=0, at_boundary=True, step=self._acts)
        without_state = frozenset() if generation.formed else generation.joiners
        names = self._living(generation)
        complete, joiners = (
            [name for name in names if (name in without_state) is is_joiner] for is_joiner in (False, True)
        )
        ready = Ready(loop=0, generation=generation.number)
        self._apply(
            machine.Bundle(
                [machine.WorkerMessage(tuple(complete), arrived), machine.WorkerMessage(tuple(joiners), ready)]
            )
        )

    def _living(self, generation: SimulatedGeneration) -> list[str]:
        return [name for name in generation.workers if name in self._where]
