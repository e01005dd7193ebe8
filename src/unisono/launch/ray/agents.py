"""The agents of a job on Ray: one on each bundle, started again with its bundle, asked to leave a node in time."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from unisono.errors import FIRST_SIGNAL, PREEMPTED
from unisono.launch.ray.agent_actor import AgentAccess, AgentActor
from unisono.launch.ray.cluster import Bundles, draining_nodes
from unisono.launch.ray.request import RayRequest

MOST_FAILURES = 6
"""Actors on one bundle that may die one after the other, each soon after its start."""

SETTLED_S = 10.0


@dataclass(slots=True)
class _Place:
    """A bundle, and the agent there.

    Attributes:
        actor: the actor; None while there is none.
        ended: the reference to the agent's exit code.
        left: the node that the agent was asked to leave: no other one is started before the bundle is elsewhere.
        began: the time of the actor's start.
        failures: the number of actors in a row that have died soon.
        is_over: whether no agent is started here any more.
    """

    actor: Any = None
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
        say: a function that shows a line to the person at the terminal.

    Attributes:
        last_words: the end of the last agent that is not started again.
    """

    def __init__(self, request: RayRequest, access: AgentAccess, say: Callable[[str], None]) -> None:
        self._request, self._say = request, say
        self._access = ray.put(access)
        sizes = request.settings.workers
        self._bundles = Bundles(request.bundle, sizes.smallest, sizes.largest)
        self._places = [_Place() for _ in range(len(self._bundles))]
        self._told = ""
        self.last_words = ""

    @property
    def are_over(self) -> bool:
        """Whether no agent runs or is awaited on any bundle."""
        return all(place.is_over for place in self._places)

    def look(self) -> None:
        """See which have ended, start those that can be, and ask those to leave whose nodes are about to go."""
        draining, nodes = draining_nodes(), self._bundles.nodes()
        for number, (place, node) in enumerate(zip(self._places, nodes, strict=True)):
            if place.actor is not None:
                self._hear(place, node)
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
        """The job is over. Wait until all on placed bundles have ended; say so if they have not in time.

        Args:
            timeout_s: the seconds that the last lines of their workers' scripts may take.
        """
        placed = zip(self._places, self._bundles.nodes(), strict=True)
        running = [place.ended for place, node in placed if place.actor is not None and node]
        if running and (left := ray.wait(running, num_returns=len(running), timeout=timeout_s)[1]):
            self._say(
                f"agents that have not ended {timeout_s:g} s after the job are killed ({len(left)} of them): what "
                f"their scripts still do after run.finish is cut short (--grace-s gives them longer)"
            )

    def _start(self, place: _Place, number: int) -> None:
        place.actor = self._bundles.actor(number, AgentActor, self._request)
        place.ended = place.actor.run.remote(self._access)
        place.began, place.left = time.monotonic(), ""

    def _hear(self, place: _Place, node: str) -> None:
        done, _ = ray.wait([place.ended], timeout=0)
        if not done:
            return
        place.actor = None
        try:
            code = ray.get(place.ended)
        except RayActorError as error:
            self._lost(place, _line(error))
        except RayTaskError as error:
            place.is_over, self.last_words = True, f"it could not be started on node {node[:12]}: {_line(error.cause)}"
            self._say(f"an agent has ended: {self.last_words}")
        else:
            if code == FIRST_SIGNAL + signal.SIGKILL:
                self._lost(place, f"it was killed on node {node[:12]}")
                return
            if code == PREEMPTED:  # with a drained node, or on a cloud's notice: Ray finds another one for the bundle
                place.left = place.left or node
            place.is_over = code != PREEMPTED
            self.last_words = f"exit code {code}, on node {node[:12]}"

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


def _line(error: object) -> str:
    """The first line of what Ray says."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:400]
