"""The actor that keeps the coordinator, takes no resources, and has an agent run on each bundle."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ray.util import get_node_ip_address
from ray.util.metrics import Counter, Gauge

from unisono.checkpoint.folder import RunFolder, new_run_folder
from unisono.errors import JobError, LaunchError, Unreadable
from unisono.jsonl import read_lines
from unisono.launch.command_process import CommandProcess
from unisono.launch.elastic.address import Address, Control, address_of
from unisono.launch.elastic.elastic import AgentEnd, conclusion_of, lines_about
from unisono.launch.elastic.host_order import HostOrder
from unisono.launch.ending.result import RUNS, JobEnd, write_end
from unisono.launch.ray.agents import Agents, working_folder
from unisono.launch.ray.cluster import Bundles
from unisono.launch.ray.request import RayEnd, RayRequest
from unisono.launch.terminal.terminal import Terminal
from unisono.membership.messages import JobOver

RUN = "run"
"""The tag that tells jobs apart; ``job`` is Prometheus' own."""


class RayMetrics:
    """Passes on what the coordinator tells. Ray puts ``ray_`` before each name, and tags of its own beside ours.

    Args:
        run: the value of our tag: the name of the run folder.
        say: a function that shows a line to the person at the terminal.
    """

    def __init__(self, run: str, say: Callable[[str], None]) -> None:
        self._run, self._say = run, say
        self._made: dict[str, Any] = {}
        self._counted: dict[str, float] = {}
        self._obstacle = ""

    def show(self, control: Control) -> None:
        """Ask the coordinator, and pass it on; a coordinator that does not answer just now is asked again later."""
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
        if family.name not in self._made:
            self._made[family.name] = kind(family.name, family.documentation, tag_keys=(RUN, *sample.labels))
        made, tags = self._made[family.name], {RUN: self._run, **sample.labels}
        if kind is Gauge:
            made.set(sample.value, tags)
            return
        more = sample.value - self._counted.get(family.name, 0)  # our counters have no labels
        self._counted[family.name] = sample.value
        if more > 0:
            made.inc(more, tags)


def after_the_coordinator(
    run_dir: Path, code: int, why: str, agents: Sequence[AgentEnd], terminal: Terminal
) -> tuple[int, str]:
    """The exit code of a job, and why it ended so, when its agents have ended, too; ``result.json`` says the same then.

    Args:
        run_dir: the run folder.
        code: the exit code by the coordinator.
        why: the reason for it, if the coordinator has not said it.
        agents: the ends of all agents of the job.
        terminal: the terminal on which agents that are not missed are told.
    """
    over = _word_in(run_dir)
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


def _word_in(run_dir: Path) -> JobOver | None:
    """The coordinator's last word, if training is complete and its journal can be read."""
    with suppress(OSError, Unreadable, KeyError, ValueError):
        said = [line for line in read_lines(run_dir / "journal.jsonl") if line.get("event") == "over"][-1:]
        for line in said:
            over = JobOver(digest=line["digest"], main_agent=line["main_agent"], agents=tuple(line["agents"]))
            return over if over.is_done else None
    return None


LOOK_S = 0.5
LISTENS_S = 60.0
"""How long the coordinator may take until it listens."""

FAREWELL_S = 20.0
"""How long the coordinator may take to end when no agent is left."""


class CoordinatorActor:
    """Keeps a job's coordinator to its end. Two calls may be under way at the same time: ``run``, and ``leave``.

    Args:
        request: the job.
    """

    def __init__(self, request: RayRequest) -> None:
        self._request = request
        self._process: CommandProcess | None = None
        self._leaves = False

    def run(self) -> RayEnd:
        """From the first bundle to the last end.

        Raises:
            JobError: the run folder cannot be used.
            LaunchError: the coordinator does not listen.
            OSError: the working folder is not on this node.
        """
        launch, folder = self._request.settings.launch, working_folder(self._request)
        run_dir = Path(folder, launch.run_dir or new_run_folder(Path(folder, RUNS), launch.script.stem))
        (run_dir / "coordinator.json").unlink(missing_ok=True)  # of a start before this one
        words = self._request.coordinator(get_node_ip_address(), run_dir)
        self._process = CommandProcess(words, self._request.variables, folder)
        try:
            if self._leaves:
                self._process.leave()
            why, agents = self._attend(self._process, run_dir)
        finally:
            self._process.close()
        code = self._process.code
        assert code is not None
        by_then = 1 if why and not code else code
        code, why = after_the_coordinator(run_dir, by_then, why, agents, Terminal.of_this_process())
        return RayEnd(code, str(run_dir), socket.gethostname(), _result(run_dir), why)

    def leave(self) -> None:
        """Have all workers leave with a checkpoint; called again, as the second Ctrl-C."""
        self._leaves = True
        if self._process is not None:
            self._process.leave()

    def _attend(self, process: CommandProcess, run_dir: Path) -> tuple[str, list[AgentEnd]]:
        """Have agents run as long as there is a coordinator; why it was ended, if it was, and how they have ended."""
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
                metrics.show(Control(address))
                if agents.are_over and not why and process.wait(FAREWELL_S) is None:
                    why = f"no agent is left; the last one: {agents.last_words}"
                    process.leave()
            agents.until_ended(self._request.settings.launch.options.launch.grace_s)
        finally:
            agents.close()
        return why, agents.ends


def _address(process: CommandProcess, run_dir: Path) -> Address | None:
    """Where the coordinator listens; None if it ends first.

    Raises:
        LaunchError: it does not listen in time.
    """
    begun = time.monotonic()
    while process.wait(0.05) is None:
        if (run_dir / "coordinator.json").exists():
            return address_of(run_dir)
        if time.monotonic() - begun > LISTENS_S:
            raise LaunchError(f"the coordinator does not listen after {LISTENS_S:g} s (logs in {run_dir / 'logs'})")
    return None


def _result(run_dir: Path) -> dict[str, Any]:
    try:
        found = RunFolder(run_dir).read_result()
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _say(words: str) -> None:
    print(f"unisono: {words}", flush=True)  # noqa: T201 (an actor's output is what Ray logs, and the driver shows)
