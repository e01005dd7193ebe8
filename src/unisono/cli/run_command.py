"""``unisono run``: start the workers of a job, on this host and on others."""

import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unisono.checkpoint.folder import RunFolder
from unisono.cli.options import (
    FOLDER,
    SCRIPT,
    Module,
    Resources,
    RestartOptions,
    ScriptArguments,
    ScriptName,
    Training,
    grouped,
    opt,
)
from unisono.errors import PREEMPTED, JobError
from unisono.host.machine import usable_cores
from unisono.host.process import allow_open_files, resume_command
from unisono.host.status_line import VARIABLE
from unisono.launch.command import dry_run, elastic_dry_run
from unisono.launch.elastic.elastic_settings import ElasticSettings, Entrance, Range
from unisono.launch.engine import engine_named, reach
from unisono.launch.hostfile import HostPlan, is_here, read_hosts
from unisono.launch.local import launch
from unisono.launch.outcome import RUNS, Outcome, open_folder, report
from unisono.launch.settings import LaunchSettings, Script
from unisono.launch.terminal import Terminal
from unisono.named import load_named
from unisono.received import short
from unisono.settings.table import CLUSTERS, FAILURES, SEVERAL_HOSTS

if TYPE_CHECKING:
    from unisono.launch.elastic.host_agents import HostAgents


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """The options of a job on the nodes of a cluster."""

    engine: Annotated[str | None, opt("--on", panel=CLUSTERS, metavar="ray|ENGINE")] = None
    """Train on the nodes of a cluster: ray (found as ray.init does, by RAY_ADDRESS, say). With --hosts: an engine of a
    package, which reaches them instead of ssh.
    """
    resources: Resources = None

    def check(self, *others: object) -> None:
        """Refuse options that contradict each other.

        Args:
            others: the values of the options about this host.

        Raises:
            JobError: two options contradict each other; names them.
        """
        if not self.is_ray and self.resources is not None:
            raise JobError("--resources-per-worker is for --on ray")
        if self.is_ray and any(value is not None for value in others):
            raise JobError(
                "--on ray starts all workers: --hosts, --here, --coordinator, what goes with that, and --page are not "
                "for it"
            )

    @property
    def is_ray(self) -> bool:
        """Whether the job trains on the nodes of a Ray cluster."""
        return self.engine == "ray"


@dataclass(frozen=True, slots=True)
class EntranceOptions:
    """The options of a coordinator that other hosts reach."""

    coordinator: Annotated[str | None, opt(panel=SEVERAL_HOSTS, metavar="HOST:PORT")] = None
    """Elastic: the address for other hosts, over TLS; :PORT for all addresses, port 0 for any free one."""
    tls_cert: Annotated[Path | None, opt(panel=SEVERAL_HOSTS)] = None
    """With --coordinator: its TLS certificate, PEM. By default one is made for the job."""
    tls_key: Annotated[Path | None, opt(panel=SEVERAL_HOSTS)] = None
    """With --coordinator: the certificate's private key, PEM."""
    token_file: Annotated[Path | None, opt(panel=SEVERAL_HOSTS)] = None
    """With --coordinator: a file with the job's token, made beforehand. By default each start makes one."""
    known_as: Annotated[str | None, opt(panel=SEVERAL_HOSTS, metavar="NAME")] = None
    """With --coordinator: the name by which other hosts know this one, if it is another."""
    here: Annotated[int | None, opt(min=0, panel=SEVERAL_HOSTS)] = None
    """Elastic: the largest number of workers on this host; 0 for none."""

    def read(self, address: str | None) -> Entrance:
        """The entrance for other hosts that these options describe, with the coordinator at an address.

        Raises:
            JobError: options contradict each other, or one cannot be read.
        """
        return Entrance.read(address, self.tls_cert, self.tls_key).prepared(self.token_file, self.known_as)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of every job."""

    workers: Annotated[str | None, opt("-n", "--workers", metavar="N|A:B")] = None
    """The number of workers; A:B for an elastic job with A to B workers. By default 1; with --hosts, as many as they
    have room for.
    """
    run_dir: Annotated[Path | None, opt(envvar="UNISONO_RUN_DIR", **FOLDER)] = None
    """The run folder; if it has checkpoints of this job, the job resumes from the newest."""
    module: Module = False
    faults: Annotated[Path | None, opt(panel=FAILURES)] = None
    """A fault plan (TOML): faults to inject into the job, to test how it recovers."""
    page: Annotated[bool, opt("--page/--no-page")] = False
    """Show the job in a browser, too: prints a link; the same as unisono page later."""
    dry: Annotated[bool, opt("--dry-run")] = False
    """Print the command and environment of each worker, and start none."""


FILES_OF_HOST = 4
"""The open files of the launcher for each host: the pipes of its ssh, and the pipe from which one of them is made."""

FILES_OF_JOB = 256


@dataclass(frozen=True, slots=True)
class HostOptions:
    """The options of a job on hosts that an engine reaches."""

    hosts: Annotated[str | None, opt(metavar="A:4,B:4|FILE", panel=SEVERAL_HOSTS)] = None
    """Start workers on these hosts, over ssh: names with room for so many, or a hostfile (a slots=4)."""
    ssh: Annotated[str, opt(panel=SEVERAL_HOSTS)] = "ssh"
    """With --hosts: ssh, with options of yours."""
    python: Annotated[str, opt(panel=SEVERAL_HOSTS)] = sys.executable
    """With --hosts: their Python interpreter; by default that of this command."""
    env: Annotated[list[str] | None, opt(metavar="NAME[=VALUE]", panel=SEVERAL_HOSTS)] = None
    """An environment variable for the workers of all hosts; repeat for more."""

    def placement(self, workers: Range | None, engine: str | None) -> HostPlan | None:
        """The hosts on which workers run; None without ``--hosts``.

        Args:
            workers: the requested numbers of workers; None for as many as there is room for.
            engine: the name of the engine that reaches the hosts; None for ssh.

        Raises:
            JobError: there is no such engine, or the hosts cannot be read, or have no room for the workers.
        """
        if self.hosts is None and engine is None:
            return None
        reaching = engine_named(engine, self.ssh, self.python)
        if self.hosts is None:
            raise JobError(f"--on {engine}: name the hosts that it reaches, as in --hosts a:4,b:4")
        plan = HostPlan.of(read_hosts(self.hosts), is_here, reaching)
        if workers is None:
            return plan
        if plan.room < workers.largest:
            raise JobError(f"--workers {workers}: the hosts of --hosts have room for {plan.room}; give them more slots")
        return plan.first(workers.largest) if workers.is_fixed else plan

    def variables(self, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """The variables of ``--env``, for all workers.

        Args:
            environ: the variables of this process.

        Raises:
            JobError: a text names no variable, or one that is not set.
        """
        variables = {}
        for word in self.env or ():
            name, equals, value = word.partition("=")
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise JobError(f"--env {short(word)}: write NAME, or NAME=value")
            if not equals and name not in environ:
                raise JobError(f"--env {short(word)}: there is no such variable here; write NAME=value to set it")
            variables[name] = value if equals else environ[name]
        return variables

    @staticmethod
    def lines(placement: HostPlan, settings: ElasticSettings, run_dir: Path) -> Iterator[str]:
        """The commands that would be run for each host, for a person to read."""
        from unisono.launch.elastic.host_agents import join_words

        for host in placement.elsewhere:
            words = shlex.join(join_words(settings, host, run_dir))
            yield f"# host {host.name}, which joins with: unisono join URL {words}"
            yield shlex.join(reach(placement.engine, host.name, settings.failure_timeout_s))

    def agents(
        self, placement: HostPlan, settings: ElasticSettings, folder: RunFolder, terminal: Terminal
    ) -> "HostAgents | None":
        """The agents of the other hosts; None if there are none.

        Raises:
            JobError: an option cannot work, or the system allows too few open files.
        """
        from unisono.launch.elastic.host_agents import HostAgents, passed_on

        if not placement.elsewhere:
            return None
        needed = FILES_OF_HOST * len(placement.elsewhere) + FILES_OF_JOB
        if (allowed := allow_open_files(needed)) < needed:
            raise JobError(
                f"--hosts: {len(placement.elsewhere)} hosts take {needed} open files here, and the system allows "
                f"{allowed}: raise the limit (ulimit -n), or name fewer hosts and start the others with unisono join"
            )
        variables = passed_on(os.environ) | self.variables()
        return HostAgents(settings, placement, variables, folder.path, terminal)


app = typer.Typer()


@app.command(**SCRIPT)
@grouped
def run(
    script: ScriptName,
    args: ScriptArguments = None,
    *,
    own: RunOptions,
    options: Training,
    restarts: RestartOptions,
    entrance: EntranceOptions,
    hosts: HostOptions,
    cluster: ClusterOptions,
) -> None:
    """Start workers that train together.

    For example: unisono run -n 4 train.py --its-own flags. With a range (-n 2:8) or --max-restarts the job is elastic:
    workers may come and go while it trains. With --hosts it has several hosts, and with --coordinator others may join.
    """
    specified = None if own.workers is None else Range.read(own.workers)
    cluster.check(*astuple(entrance), hosts.hosts, own.page or None)
    coordinator, here = entrance.coordinator, entrance.here
    placement = None if cluster.is_ray else hosts.placement(specified, cluster.engine)
    workers = specified or (Range(1, 1) if placement is None else Range(placement.room, placement.room))
    fitting = workers.within(usable_cores() // (options.arithmetic.threads * options.communication.devices_per_worker))
    room = 0 if cluster.is_ray else here if here is not None or coordinator is None else fitting
    if placement is not None:
        if here is not None:
            raise JobError("--here with --hosts: name this host among them, as in --hosts localhost:4,b:4")
        room, coordinator = placement.here, coordinator or (":0" if placement.elsewhere else None)
    settings = LaunchSettings.tuned(
        Script(script, tuple(args or ()), is_module=own.module),
        options,
        workers=workers.largest if room is None else min(room, workers.largest),
        run_dir=own.run_dir,
        extra_environment=hosts.variables()
        | ({VARIABLE: "1"} if sys.stdout.isatty() else {})  # a progress bar can be shown
        | ({} if own.faults is None else _fault_injection(own.faults)),
    )
    elastic = restarts.elastic(
        settings,
        workers,
        begin_with=None if room is not None or fitting == workers.largest else fitting,
        entrance=replace(entrance.read(coordinator), towards="" if placement is None else placement.towards),
    )
    elastic.check()
    is_elastic = not workers.is_fixed or restarts.max_restarts is not None or room is not None
    if cluster.is_ray:
        raise typer.Exit(start_on_ray(elastic, cluster.resources))
    if own.dry:
        run_dir = settings.run_dir or RUNS / f"TIME-{settings.script.stem}"
        typer.echo((elastic_dry_run if is_elastic else dry_run)(settings, run_dir))
        for line in () if placement is None else hosts.lines(placement, elastic, run_dir):
            typer.echo(line)
        return
    raise typer.Exit(start(elastic, placement, hosts, is_elastic=is_elastic, page=own.page))


def _fault_injection(plan: Path) -> dict[str, str]:
    return dict(load_named("faults", {}, "launch option", "--faults")(plan))


def start(
    settings: ElasticSettings, placement: HostPlan | None, hosts: HostOptions, *, is_elastic: bool, page: bool
) -> int:
    """Run a job to its end, and print how it ended.

    Args:
        settings: the settings of the job.
        placement: the hosts that an engine reaches; None if there are none.
        hosts: the options with which they are reached.
        is_elastic: whether workers may come and go.
        page: whether the job's page is shown while it runs.

    Returns:
        the exit code.

    Raises:
        JobError: the run folder cannot be used, or an option cannot work.
        LaunchError: a worker or the coordinator cannot be started, or the coordinator cannot be kept running.
    """
    from unisono.launch.command_process import page_beside

    folder = open_folder(settings.launch.run_dir, settings.launch.script.stem)
    terminal = Terminal.of_this_process()
    count = settings.launch.workers
    words = f"{count} worker{'s' if count > 1 else ''}"
    if is_elastic:
        begin = "" if settings.begin_with is None else f", {settings.begin_with} to begin with"
        words = f"{settings.workers} workers{f', {count} of them here' if count < settings.workers.largest else begin}"
    terminal.say(f"{words}, run folder {folder.path}")
    others = None if placement is None else hosts.agents(placement, settings, folder, terminal)
    with page_beside(folder.path, terminal.say) if page else nullcontext():
        outcome: Outcome
        if is_elastic:
            from unisono.launch.elastic.agent import run_agent  # it loads what only elastic jobs need

            outcome = run_agent(settings, folder, terminal, others=others)
        else:
            outcome = launch(settings.launch, folder, terminal)
    terminal.conclude(report(outcome, folder) + _resume_hint(outcome.exit_code, folder.path))
    return outcome.exit_code


def start_on_ray(settings: ElasticSettings, resources: str | None) -> int:
    """Run a job on the nodes of a Ray cluster, and print how it ended.

    Returns:
        the exit code.

    Raises:
        JobError: the job cannot be started with these options.
        LaunchError: the cluster cannot be reached, or has lost the job.
    """
    from unisono.launch.ray import train
    from unisono.launch.ray_request import RayRequest, read_resources

    per_worker = None if resources is None else read_resources(resources)
    ended = train(RayRequest.of_this_process(settings, per_worker))
    terminal = Terminal.of_this_process()
    terminal.say(f"exit code {ended.exit_code}, run folder {ended.run_dir} on host {ended.host}")
    if ended.words:
        terminal.say(ended.words)
    terminal.conclude(_resume_hint(ended.exit_code, Path(ended.run_dir)))
    return int(ended.exit_code)


def _resume_hint(exit_code: int, run_dir: Path) -> str:
    return f"unisono: to go on: {resume_command(run_dir)}\n" if exit_code == PREEMPTED else ""
