"""``unisono run``: start the workers of a job on this host."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from unisono.cli.hosts import HostOptions
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
from unisono.host.again import again
from unisono.host.cgroup import usable_cores
from unisono.host.status_line import VARIABLE
from unisono.launch.command import dry_run, elastic_dry_run
from unisono.launch.elastic.elastic import ElasticSettings, Range
from unisono.launch.elastic.entrance import Entrance
from unisono.launch.ending.outcome import Outcome
from unisono.launch.ending.result import RUNS, open_folder, report
from unisono.launch.hosts.hostfile import HostPlan
from unisono.launch.local import launch
from unisono.launch.settings import LaunchSettings, Script
from unisono.launch.terminal.terminal import Terminal
from unisono.named import thing_named
from unisono.settings.table import CLUSTERS, FAILURES, SEVERAL_HOSTS


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """The options of a job on the nodes of a cluster."""

    engine: Annotated[Literal["ray"] | None, opt("--on", panel=CLUSTERS)] = None
    """Train on the nodes of a cluster: ray (found as ray.init does, by RAY_ADDRESS, say)."""
    resources: Resources = None

    def check(self, *others: object) -> None:
        """Refuse what does not go together.

        Args:
            others: the values of the options that are about this host.

        Raises:
            JobError: says which options.
        """
        if self.engine is None and self.resources is not None:
            raise JobError("--resources-per-worker is for --on ray")
        if self.engine is not None and any(one is not None for one in others):
            raise JobError(
                f"--on {self.engine} starts all workers: "
                "--hosts, --here, --coordinator, what goes with that, and --page are not for it"
            )


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
        """What they say of a coordinator at this address.

        Raises:
            JobError: they do not go together, or one is none.
        """
        return Entrance.read(address, self.tls_cert, self.tls_key).made_before(self.token_file, self.known_as)


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
    """Start workers that train together: unisono run -n 4 train.py --its-own flags.

    With a range (-n 2:8) or --max-restarts the job is elastic: workers may come and go while it trains. With --hosts it
    has several hosts, and with --coordinator others may join.
    """
    given = None if own.workers is None else Range.read(own.workers)
    cluster.check(*astuple(entrance), hosts.hosts, own.page or None)
    coordinator, here = entrance.coordinator, entrance.here
    placement = hosts.placement(given)
    wanted = given or (Range(1, 1) if placement is None else Range(placement.room, placement.room))
    fitting = wanted.within(usable_cores() // (options.arithmetic.threads * options.communication.devices_per_worker))
    room = 0 if cluster.engine else here if here is not None or coordinator is None else fitting
    if placement is not None:
        if here is not None:
            raise JobError("--here with --hosts: name this host among them, as in --hosts localhost:4,b:4")
        room, coordinator = placement.here, coordinator or (":0" if placement.elsewhere else None)
    settings = LaunchSettings.tuned(
        Script(script, tuple(args or ()), is_module=own.module),
        options,
        workers=wanted.largest if room is None else min(room, wanted.largest),
        run_dir=own.run_dir,
        extra_environment=hosts.variables() | _status() | ({} if own.faults is None else _fault_injection(own.faults)),
    )
    elastic = restarts.elastic(
        settings,
        wanted,
        begin_with=None if room is not None or fitting == wanted.largest else fitting,
        entrance=replace(entrance.read(coordinator), towards=hosts.towards(placement)),
    )
    elastic.check()
    is_elastic = not wanted.is_fixed or restarts.max_restarts is not None or room is not None
    if cluster.engine:
        raise typer.Exit(start_on_ray(elastic, cluster.resources))
    if own.dry:
        typer.echo(_shown(settings, is_elastic=is_elastic))
        for line in () if placement is None else hosts.lines(placement, elastic, _run_dir(settings)):
            typer.echo(line)
        return
    beside = _page_of if own.page else _no_page
    raise typer.Exit(start_elastic(elastic, placement, hosts, beside) if is_elastic else start(settings, beside))


def _shown(settings: LaunchSettings, *, is_elastic: bool) -> str:
    show = elastic_dry_run if is_elastic else dry_run
    return show(settings, _run_dir(settings))


def _run_dir(settings: LaunchSettings) -> Path:
    return settings.run_dir or RUNS / f"TIME-{settings.script.stem}"


def _status() -> dict[str, str]:
    """The environment variable by which workers know that a progress bar can be shown."""
    return {VARIABLE: "1"} if sys.stdout.isatty() else {}


def _fault_injection(plan: Path) -> dict[str, str]:
    """The environment variables by which workers inject the faults of a plan."""
    return dict(thing_named("faults", {}, "launch option", "--faults")(plan))


Beside = Callable[[Path, Terminal], AbstractContextManager[object]]
"""Something that is there as long as a job runs: of its run folder, and the terminal that shows it."""


def _no_page(run_dir: Path, terminal: Terminal) -> AbstractContextManager[object]:
    return nullcontext()


def _page_of(run_dir: Path, terminal: Terminal) -> AbstractContextManager[object]:
    from unisono.launch.page_beside import page_beside

    return page_beside(run_dir, terminal.say)


def start(settings: LaunchSettings, beside: Beside = _no_page) -> int:
    """Run a job to its end and say how it ended.

    Args:
        settings: the settings of the launch.
        beside: what is there as long as it runs.

    Returns:
        the exit code.

    Raises:
        JobError: the run folder cannot be used.
        LaunchError: a worker could not be started.
    """
    folder = open_folder(settings.run_dir, settings.script.stem)
    terminal = Terminal.of_this_process()
    terminal.say(f"{settings.workers} worker{'s' if settings.workers > 1 else ''}, run folder {folder.path}")
    with beside(folder.path, terminal):
        outcome: Outcome = launch(settings, folder, terminal)
    terminal.conclude(report(outcome, folder) + _go_on(outcome.exit_code, folder.path))
    return outcome.exit_code


def _go_on(exit_code: int, run_dir: Path) -> str:
    return f"unisono: to go on: {again(run_dir)}\n" if exit_code == PREEMPTED else ""


def start_on_ray(settings: ElasticSettings, resources: str | None) -> int:
    """Run a job on the nodes of a Ray cluster and say how it ended.

    Returns:
        the exit code.

    Raises:
        JobError: the job cannot be started so.
        LaunchError: the cluster cannot be reached, or has lost the job.
    """
    from unisono.launch.ray.driver import train
    from unisono.launch.ray.request import RayRequest, read_resources

    per_worker = None if resources is None else read_resources(resources)
    ended = train(RayRequest.of_this_process(settings, per_worker))
    terminal = Terminal.of_this_process()
    terminal.say(f"exit code {ended.exit_code}, run folder {ended.run_dir} on host {ended.host}")
    if ended.words:
        terminal.say(ended.words)
    terminal.conclude(_go_on(ended.exit_code, Path(ended.run_dir)))
    return int(ended.exit_code)


def start_elastic(
    settings: ElasticSettings, placement: HostPlan | None, hosts: HostOptions, beside: Beside = _no_page
) -> int:
    """Run an elastic job to its end and say how it ended.

    Args:
        settings: the settings of the job.
        placement: the hosts that are reached over ssh; None if there are none.
        hosts: the options with which they are reached.
        beside: what is there as long as it runs.

    Returns:
        the exit code.

    Raises:
        JobError: the run folder cannot be used, or an option cannot be what it is.
        LaunchError: the coordinator cannot be started, or cannot be kept running.
    """
    from unisono.launch.elastic.agent import run_agent  # it loads what only elastic jobs need

    folder = open_folder(settings.launch.run_dir, settings.launch.script.stem)
    terminal = Terminal.of_this_process()
    begin = "" if settings.begin_with is None else f", {settings.begin_with} to begin with"
    if settings.launch.workers < settings.workers.largest:
        begin = f", {settings.launch.workers} of them here"
    terminal.say(f"{settings.workers} workers{begin}, run folder {folder.path}")
    others = None if placement is None else hosts.agents(placement, settings, folder, terminal)
    with beside(folder.path, terminal):
        outcome = run_agent(settings, folder, terminal, others=others)
    terminal.conclude(report(outcome, folder) + _go_on(outcome.exit_code, folder.path))
    return outcome.exit_code
