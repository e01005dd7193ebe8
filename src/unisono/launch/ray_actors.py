"""The actors of a job on a Ray cluster: one runs the coordinator, and one on each bundle an agent.

Needs a connection to a cluster.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util import get_node_ip_address, placement_group, placement_group_table, remove_placement_group
from ray.util.metrics import Counter, Gauge
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from unisono.checkpoint.folder import RunFolder, new_run_folder
from unisono.errors import FIRST_SIGNAL, PREEMPTED, JobError, LaunchError, Unreadable
from unisono.jsonl import read_lines
from unisono.launch.command_process import CommandProcess
from unisono.launch.elastic.address import Address, Control, HostOrder, address_of, new_agent
from unisono.launch.elastic.elastic_settings import AgentEnd, conclusion_of, lines_about
from unisono.launch.outcome import RUNS, JobEnd, write_end
from unisono.launch.ray_request import RayEnd, RayRequest
from unisono.launch.terminal import Terminal
from unisono.membership.messages import JobOver
from unisono.membership.token import token_file

OWN_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
"""Resources that have an option of their own in an actor's options."""


def draining_nodes() -> frozenset[str]:
    """The ids of nodes that are about to go: drained by a person or the autoscaler, or taken away by a spot market.

    Ray has no public function for it. This is the one that Ray Train uses.
    """
    return frozenset(ray._private.state.state.get_draining_nodes())


class Bundles:
    """The bundles of a job: as many as it needs at least are placed together, all others one by one.

    Ray's autoscaler adds nodes for groups that wait. Ray removes the groups when the job has ended, or was killed.
    """

    def __init__(self, bundle: Mapping[str, float], smallest: int, largest: int) -> None:
        self._bundle = dict(bundle)
        sizes = [smallest, *[1] * (largest - smallest)]
        self._groups = [placement_group([self._bundle] * size, strategy="PACK") for size in sizes]
        self._slots = [(group, index) for group, size in zip(self._groups, sizes, strict=True) for index in range(size)]

    def __len__(self) -> int:
        return len(self._slots)

    def nodes(self) -> Sequence[str]:
        """The id of each bundle's node; empty while Ray has placed it on none, as after the death of its node."""
        table = placement_group_table()
        nodes_of = [table.get(group.id.hex(), {}).get("bundles_to_node_id", {}) for group, _ in self._slots]
        return [nodes.get(index, "") for nodes, (_, index) in zip(nodes_of, self._slots, strict=True)]

    def actor(self, place: int, kind: type, *args: Any) -> Any:
        """Have an actor started on a bundle, as soon as that is placed."""
        group, index = self._slots[place]
        amounts = {OWN_OPTIONS[name]: self._bundle.get(name, 0) for name in OWN_OPTIONS}
        others = {name: amount for name, amount in self._bundle.items() if name not in OWN_OPTIONS}
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        options = {**amounts, "resources": others, "scheduling_strategy": strategy, "max_concurrency": 2}
        return ray.remote(kind).options(**options).remote(*args)

    def close(self) -> None:
        """Give all bundles back."""
        for group in self._groups:
            remove_placement_group(group)


def beside_driver(kind: type, *args: Any) -> Any:
    """An actor that takes no resources, on the driver's node."""
    strategy = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(kind).options(num_cpus=0, scheduling_strategy=strategy, max_concurrency=2).remote(*args)


# The agents of a job on Ray: one on each bundle, started again wherever its bundle is placed again.

PROGRAM = "unisono.cli.by_order"
"""The module of an agent. It reads its order from its standard input, and a guard of its own removes its copy of the
token: Ray kills the children of an actor with it, but not their children."""


def shared_folder(run_dir: str, token: str) -> Path | None:
    """The run folder, if this node sees it: then it holds the token of this start; otherwise None."""
    path = Path(run_dir)
    with suppress(OSError, UnicodeDecodeError):
        if token_file(path).read_text(encoding="ascii").strip() == token:
            return path
    return None


class CommandActor:
    """Runs a command to its end. Two calls may be under way at the same time: ``run``, and ``leave``."""

    def __init__(self, request: RayRequest) -> None:
        self._request = request
        self._process: CommandProcess | None = None
        self._leaves = False

    def leave(self) -> None:
        """Have the workers leave after the current step; a second call does what a second Ctrl-C does."""
        self._leaves = True
        if self._process is not None:
            self._process.leave()

    @contextmanager
    def _running(self, process: CommandProcess) -> Iterator[CommandProcess]:
        self._process = process
        try:
            if self._leaves:
                process.leave()
            yield process
        finally:
            process.close()


class AgentActor(CommandActor):
    """Runs an agent."""

    def run(self, access: HostOrder, agent: str) -> int:
        """Join the job, and return the agent's exit code.

        The order names the run folder on the coordinator's node. It travels as an object of Ray, never on a command
        line, since it holds the token.

        Raises:
            OSError: the working folder is not on this node.
        """
        order = replace(
            access,
            folder=working_folder(self._request),
            agent=agent,
            words=tuple(self._request.agent(shared_folder(access.folder, access.token))),
        )
        variables = self._request.variables
        with self._running(
            CommandProcess((), variables, order.folder, module=PROGRAM, standard_input=order.to_line())
        ) as process:
            code = process.wait()
        assert code is not None
        return code


def working_folder(request: RayRequest) -> str:
    """The actor's working folder, if Ray has unpacked one for the job; otherwise the driver's."""
    import ray

    unpacked = ray.get_runtime_context().runtime_env.get("working_dir")
    return str(Path.cwd()) if unpacked else request.folder


MOST_FAILURES = 6
"""The number of actors in a row, each of which died soon after its start, after which a bundle is given up."""

SETTLED_S = 10.0
"""An actor that dies within this time has died soon."""

KILLED = FIRST_SIGNAL + signal.SIGKILL
"""The exit code of an agent that was killed, or whose main worker was when training was complete."""


@dataclass(slots=True)
class _Place:
    """A bundle, and the agent on it.

    Attributes:
        node: the id of the node on which the agent runs, or last ran.
        exit_code: the reference to the agent's exit code.
        left: the node that the agent was asked to leave: the next one starts only when the bundle is on another node.
        failures: the number of actors in a row that have died soon.
        is_over: whether no agent is started here any more.
    """

    actor: Any = None
    agent: str = ""
    node: str = ""
    exit_code: Any = None
    left: str = ""
    began: float = 0.0
    failures: int = 0
    is_over: bool = False


class Agents:
    """All agents of a job, on bundles that are given back at the end; ``draining`` gives the ids of nodes about to go.

    Attributes:
        last_end: the way in which the last agent ended that is not started again, for people.
        ends: the ends of agents so far.
    """

    def __init__(
        self,
        request: RayRequest,
        access: HostOrder,
        bundles: Bundles,
        say: Callable[[str], None],
        draining: Callable[[], Container[str]] = draining_nodes,
    ) -> None:
        self._request, self._bundles, self._say, self._draining = request, bundles, say, draining
        self._access = ray.put(access)
        self._places = [_Place() for _ in range(len(bundles))]
        self._said = ""
        self.last_end = ""
        self.ends: list[AgentEnd] = []

    @property
    def are_over(self) -> bool:
        """Whether no agent runs or is awaited on any bundle."""
        return all(place.is_over for place in self._places)

    def look(self) -> None:
        """Note which agents have ended, start those that can be, and have those leave whose nodes are about to go."""
        draining, nodes = self._draining(), self._bundles.nodes()
        for number, (place, node) in enumerate(zip(self._places, nodes, strict=True)):
            place.node = node or place.node
            if place.actor is not None:
                self._check(place)
            if place.actor is not None and node in draining and place.left != node:
                self._say(f"node {node[:12]} is about to go: its worker leaves after this step")
                place.left = node
                place.actor.leave.remote()
            is_elsewhere = bool(node) and node not in draining and node != place.left
            if place.actor is None and not place.is_over and (not place.left or is_elsewhere):
                self._start(place, number)
        self._say_waiting(nodes)

    def close(self) -> None:
        """Kill the agents, and give their bundles back."""
        for place in self._places:
            if place.actor is not None:
                ray.kill(place.actor)
        self._bundles.close()

    def until_ended(self, timeout_s: float) -> None:
        """Wait, after the end of the job, for all agents on placed bundles; say how many have not ended in time."""
        placed = [place for place, node in zip(self._places, self._bundles.nodes(), strict=True) if node]
        running = [place.exit_code for place in placed if place.actor is not None]
        if running and (left := ray.wait(running, num_returns=len(running), timeout=timeout_s)[1]):
            self._say(
                f"agents that have not ended {timeout_s:g} s after the job are killed ({len(left)} of them): what "
                f"their scripts still do after run.finish is cut short (--grace-s gives them longer)"
            )
        for place in self._places:
            if place.actor is not None:
                code = None
                with suppress(RayError):
                    code = ray.get(place.exit_code, timeout=0)
                self._note(place, code)

    def _start(self, place: _Place, number: int) -> None:
        place.actor, place.agent = self._bundles.actor(number, AgentActor, self._request), new_agent()
        place.exit_code = place.actor.run.remote(self._access, place.agent)
        place.began, place.left = time.monotonic(), ""

    def _check(self, place: _Place) -> None:
        done, _ = ray.wait([place.exit_code], timeout=0)
        if not done:
            return
        place.actor, code = None, None
        try:
            code = ray.get(place.exit_code)
        except RayActorError as error:
            self._agent_lost(place, _line(error))
        except RayTaskError as error:
            place.is_over, self.last_end = True, f"it could not be started on {_where(place)}: {_line(error.cause)}"
            self._say(f"an agent has ended: {self.last_end}")
        else:
            self._agent_ended(place, code)
        self._note(place, code)

    def _agent_ended(self, place: _Place, code: int) -> None:
        if code == KILLED:
            self._agent_lost(place, f"it was killed on {_where(place)}")
            return
        if code == PREEMPTED:  # its node is drained, or a cloud's notice came: Ray places the bundle on another node
            place.left = place.left or place.node
        place.is_over = code != PREEMPTED
        self.last_end = f"exit code {code}, on {_where(place)}"

    def _note(self, place: _Place, code: int | None) -> None:
        self.ends.append(AgentEnd(place.agent, _where(place), None if code == KILLED else code))

    def _agent_lost(self, place: _Place, why: str) -> None:
        self._say(f"an agent is lost with its node or its process, and Ray places its bundle again: {why}")
        is_soon = time.monotonic() - place.began < SETTLED_S
        place.failures = place.failures + 1 if is_soon else 0
        place.is_over, self.last_end = place.failures >= MOST_FAILURES, why

    def _say_waiting(self, nodes: Sequence[str]) -> None:
        placed, least = sum(map(bool, nodes)), self._request.settings.workers.smallest
        message = (
            f"waiting for Ray: {placed} of {len(nodes)} bundles {self._request.bundle} are placed, {least} are needed"
        )
        if placed < least and message != self._said:
            self._say(message)
        self._said = message


def _where(place: _Place) -> str:
    return f"node {place.node[:12]}"


def _line(error: object) -> str:
    """The first line of an error of Ray."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:400]


# The actor that runs the coordinator, takes no resources, and starts an agent on each bundle.

RUN = "run"
"""The tag whose value is the name of the run folder; Prometheus sets the tag ``job`` itself."""


class RayMetrics:
    """Passes the coordinator's metrics on to Ray, which puts ``ray_`` before each name and adds tags of its own."""

    def __init__(self, run: str, say: Callable[[str], None]) -> None:
        self._run, self._say = run, say
        self._metrics: dict[str, Any] = {}
        self._counts: dict[str, float] = {}
        self._obstacle = ""

    def pass_on(self, control: Control) -> None:
        """Read the coordinator's metrics, and pass them on; if it does not answer now, a later call does."""
        try:
            text = control.metrics()
        except LaunchError:
            return
        except JobError as error:
            if str(error) != self._obstacle:
                self._say(f"Ray's metrics have no figures of this job: {error}")
            self._obstacle = str(error)
            return
        from prometheus_client.parser import text_string_to_metric_families

        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._pass_on(family, sample)

    def _pass_on(self, family: Any, sample: Any) -> None:
        kind = Counter if family.type == "counter" else Gauge
        if family.name not in self._metrics:
            self._metrics[family.name] = kind(family.name, family.documentation, tag_keys=(RUN, *sample.labels))
        metric, tags = self._metrics[family.name], {RUN: self._run, **sample.labels}
        if kind is Gauge:
            metric.set(sample.value, tags)
            return
        increment = sample.value - self._counts.get(family.name, 0)  # our counters have no labels
        self._counts[family.name] = sample.value
        if increment > 0:
            metric.inc(increment, tags)


def after_the_coordinator(
    run_dir: Path, code: int, why: str, agents: Sequence[AgentEnd], terminal: Terminal
) -> tuple[int, str]:
    """The exit code of a job and the reason for it, when its agents have ended, too; ``result.json`` gets both.

    ``code`` is the coordinator's; ``why`` is the reason for it if the coordinator has given none.
    """
    over = _job_over_in(run_dir)
    if code or over is None:
        return code, why
    for line in lines_about(over, agents):
        terminal.say(line)
    conclusion = conclusion_of(over, agents)
    if conclusion.exit_code:
        end = JobEnd(conclusion.exit_code, {"message": conclusion.reason}, len(over.agents), 0.0, over.digest)
        write_end(RunFolder(run_dir), end, terminal)
        return conclusion.exit_code, conclusion.reason
    return code, why


def _job_over_in(run_dir: Path) -> JobOver | None:
    """The coordinator's last message, from its journal, if training is complete; None if it cannot be read."""
    with suppress(OSError, Unreadable, KeyError, ValueError):
        lines = [line for line in read_lines(run_dir / "journal.jsonl") if line.get("event") == "over"]
        for line in lines[-1:]:
            over = JobOver(digest=line["digest"], main_agent=line["main_agent"], agents=tuple(line["agents"]))
            return over if over.is_done else None
    return None


LOOK_S = 0.5
LISTENS_S = 60.0
"""How long the coordinator may take until it listens."""

FAREWELL_S = 20.0
"""How long the coordinator may take to end when no agent is left."""


class CoordinatorActor(CommandActor):
    """Runs a job's coordinator to its end."""

    def run(self) -> RayEnd:
        """Run the whole job, from the first bundle to the last end.

        Raises:
            JobError: the run folder cannot be used.
            LaunchError: the coordinator does not listen.
            OSError: the working folder is not on this node.
        """
        launch, folder = self._request.settings.launch, working_folder(self._request)
        run_dir = Path(folder, launch.run_dir or new_run_folder(Path(folder, RUNS), launch.script.stem))
        (run_dir / "coordinator.json").unlink(missing_ok=True)  # of a start before this one
        words = self._request.coordinator(get_node_ip_address(), run_dir)
        with self._running(CommandProcess(words, self._request.variables, folder)) as process:
            why, agents = self._run_agents(process, run_dir)
        code = process.code
        assert code is not None
        code = 1 if why and not code else code
        code, why = after_the_coordinator(run_dir, code, why, agents, Terminal.of_this_process())
        return RayEnd(code, str(run_dir), socket.gethostname(), _result(run_dir), why)

    def _run_agents(self, process: CommandProcess, run_dir: Path) -> tuple[str, list[AgentEnd]]:
        """Run agents until the coordinator ends; return why it was ended here, if it was, and the agents' ends."""
        address = _address(process, run_dir)
        if address is None:
            return "", []
        certificate = "" if address.certificate is None else address.certificate.read_text(encoding="ascii")
        access = HostOrder(address.url, False, address.token, certificate, str(run_dir), "", ())
        sizes = self._request.settings.workers
        agents = Agents(self._request, access, Bundles(self._request.bundle, sizes.smallest, sizes.largest), _say)
        metrics = RayMetrics(run_dir.name, _say)
        why = ""
        try:
            while process.wait(LOOK_S) is None:
                agents.look()
                metrics.pass_on(Control(address))
                if agents.are_over and not why and process.wait(FAREWELL_S) is None:
                    why = f"no agent is left; the last one: {agents.last_end}"
                    process.leave()
            agents.until_ended(self._request.settings.launch.options.launch.grace_s)
        finally:
            agents.close()
        return why, agents.ends


def _address(process: CommandProcess, run_dir: Path) -> Address | None:
    """The address of the coordinator, once it listens; None if it ends first.

    Raises:
        LaunchError: it does not listen in time.
    """
    started = time.monotonic()
    while process.wait(0.05) is None:
        if (run_dir / "coordinator.json").exists():
            return address_of(run_dir)
        if time.monotonic() - started > LISTENS_S:
            raise LaunchError(f"the coordinator does not listen after {LISTENS_S:g} s (logs in {run_dir / 'logs'})")
    return None


def _result(run_dir: Path) -> dict[str, Any]:
    try:
        result = RunFolder(run_dir).read_result()
    except (OSError, ValueError):
        return {}
    return result if isinstance(result, dict) else {}


def _say(words: str) -> None:
    print(f"unisono: {words}", flush=True)  # noqa: T201 (an actor's output is what Ray logs, and the driver shows)
