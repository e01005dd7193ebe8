"""The agents of a job on Ray: one on each bundle, started again with its bundle, asked to leave a node in time."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Container
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from unisono.errors import FIRST_SIGNAL, PREEMPTED
from unisono.launch.command_process import CommandProcess
from unisono.launch.elastic.agent import new_agent
from unisono.launch.elastic.elastic import AgentEnd
from unisono.launch.elastic.host_order import HostOrder
from unisono.launch.ray.cluster import Bundles, draining_nodes
from unisono.launch.ray.request import RayRequest
from unisono.membership.token import token_file

PROGRAM = "unisono.cli.by_order"
"""What an agent is started as. It hears all on its standard input, and its own guard removes its copy of the token: Ray
kills children of an actor with it, but not their children."""


def shared_folder(run_dir: str, token: str) -> Path | None:
    """The run folder, if this node sees it: then the token of this very start lies in it."""
    path = Path(run_dir)
    with suppress(OSError, UnicodeDecodeError):
        if token_file(path).read_text(encoding="ascii").strip() == token:
            return path
    return None


class AgentActor:
    """Runs an agent to its end. Two calls may be under way at the same time: ``run``, and ``leave``.

    Args:
        request: the job.
    """

    def __init__(self, request: RayRequest) -> None:
        self._request = request
        self._process: CommandProcess | None = None
        self._leaves = False

    def run(self, access: HostOrder, agent: str) -> int:
        """Join the job; the agent's exit code.

        Args:
            access: what it needs to take part, with the job's run folder on the coordinator's node. It travels as an
                object of Ray, never on a command line.
            agent: its id.

        Raises:
            OSError: the working folder is not on this node.
        """
        order = replace(
            access,
            folder=working_folder(self._request),
            agent=agent,
            words=tuple(self._request.agent(shared_folder(access.folder, access.token))),
        )
        self._process = CommandProcess((), self._request.variables, order.folder, module=PROGRAM, told=order.to_line())
        try:
            if self._leaves:
                self._process.leave()
            code = self._process.wait()
        finally:
            self._process.close()
        assert code is not None
        return code

    def leave(self) -> None:
        """Have its worker leave after the step that is under way."""
        self._leaves = True
        if self._process is not None:
            self._process.leave()


def working_folder(request: RayRequest) -> str:
    """The folder that Ray has unpacked for the job and made the actor's own; else the folder of the driver."""
    import ray

    unpacked = ray.get_runtime_context().runtime_env.get("working_dir")
    return str(Path.cwd()) if unpacked else request.folder


MOST_FAILURES = 6
"""Actors on one bundle that may die one after the other, each soon after its start."""

SETTLED_S = 10.0

KILLED = FIRST_SIGNAL + signal.SIGKILL
"""The exit code of an agent that was killed, or whose main worker was when training was complete."""


@dataclass(slots=True)
class _Place:
    """A bundle, and the agent there.

    Attributes:
        actor: the actor; None while there is none.
        agent: the id of its agent.
        node: the id of the node on which it runs, or did.
        ended: the reference to the agent's exit code.
        left: the node that the agent was asked to leave: no other one is started before the bundle is elsewhere.
        began: the time of the actor's start.
        failures: the number of actors in a row that have died soon.
        is_over: whether no agent is started here any more.
    """

    actor: Any = None
    agent: str = ""
    node: str = ""
    ended: Any = None
    left: str = ""
    began: float = 0.0
    failures: int = 0
    is_over: bool = False


class Agents:
    """All agents of a job.

    Args:
        request: the job.
        access: what each needs to take part.
        bundles: the bundles on which they run, given back at the end.
        say: a function that shows a line to the person at the terminal.
        draining: a function that gives the ids of nodes that are about to go.

    Attributes:
        last_words: the end of the last agent that is not started again.
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
        self._told = ""
        self.last_words = ""
        self.ends: list[AgentEnd] = []

    @property
    def are_over(self) -> bool:
        """Whether no agent runs or is awaited on any bundle."""
        return all(place.is_over for place in self._places)

    def look(self) -> None:
        """See which have ended, start those that can be, and ask those to leave whose nodes are about to go."""
        draining, nodes = self._draining(), self._bundles.nodes()
        for number, (place, node) in enumerate(zip(self._places, nodes, strict=True)):
            place.node = node or place.node
            if place.actor is not None:
                self._hear(place)
            if place.actor is not None and node in draining and place.left != node:
                self._say(f"node {node[:12]} is about to go: its worker leaves after this step")
                place.left = node
                place.actor.leave.remote()
            is_elsewhere = bool(node) and node not in draining and node != place.left
            if place.actor is None and not place.is_over and (not place.left or is_elsewhere):
                self._start(place, number)
        self._tell(nodes)

    def close(self) -> None:
        """End them, and give their bundles back."""
        for place in self._places:
            if place.actor is not None:
                ray.kill(place.actor)
        self._bundles.close()

    def until_ended(self, timeout_s: float) -> None:
        """The job is over. Wait until all on placed bundles have ended; say so if they have not in time, and are lost.

        Args:
            timeout_s: the seconds that the last lines of their workers' scripts may take.
        """
        placed = [place for place, node in zip(self._places, self._bundles.nodes(), strict=True) if node]
        running = [place.ended for place in placed if place.actor is not None]
        if running and (left := ray.wait(running, num_returns=len(running), timeout=timeout_s)[1]):
            self._say(
                f"agents that have not ended {timeout_s:g} s after the job are killed ({len(left)} of them): what "
                f"their scripts still do after run.finish is cut short (--grace-s gives them longer)"
            )
        for place in self._places:
            if place.actor is not None:
                code = None
                with suppress(RayError):
                    code = ray.get(place.ended, timeout=0)
                self._note(place, code)

    def _start(self, place: _Place, number: int) -> None:
        place.actor, place.agent = self._bundles.actor(number, AgentActor, self._request), new_agent()
        place.ended = place.actor.run.remote(self._access, place.agent)
        place.began, place.left = time.monotonic(), ""

    def _hear(self, place: _Place) -> None:
        done, _ = ray.wait([place.ended], timeout=0)
        if not done:
            return
        place.actor, code = None, None
        try:
            code = ray.get(place.ended)
        except RayActorError as error:
            self._lost(place, _line(error))
        except RayTaskError as error:
            place.is_over, self.last_words = True, f"it could not be started on {_where(place)}: {_line(error.cause)}"
            self._say(f"an agent has ended: {self.last_words}")
        else:
            self._ended(place, code)
        self._note(place, code)

    def _ended(self, place: _Place, code: int) -> None:
        if code == KILLED:
            self._lost(place, f"it was killed on {_where(place)}")
            return
        if code == PREEMPTED:  # with a drained node, or on a cloud's notice: Ray finds another one for the bundle
            place.left = place.left or place.node
        place.is_over = code != PREEMPTED
        self.last_words = f"exit code {code}, on {_where(place)}"

    def _note(self, place: _Place, code: int | None) -> None:
        self.ends.append(AgentEnd(place.agent, _where(place), None if code == KILLED else code))

    def _lost(self, place: _Place, why: str) -> None:
        self._say(f"an agent is lost with its node or its process, and its bundle is asked for again: {why}")
        soon = time.monotonic() - place.began < SETTLED_S
        place.failures = place.failures + 1 if soon else 0
        place.is_over, self.last_words = place.failures >= MOST_FAILURES, why

    def _tell(self, nodes: Any) -> None:
        placed, least = sum(map(bool, nodes)), self._request.settings.workers.smallest
        words = (
            f"waiting for Ray: {placed} of {len(nodes)} bundles {self._request.bundle} are placed, {least} are needed"
        )
        if placed < least and words != self._told:
            self._say(words)
        self._told = words


def _where(place: _Place) -> str:
    return f"node {place.node[:12]}"


def _line(error: object) -> str:
    """The first line of what Ray says."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:400]
