"""Commands for a running elastic job: they join it, show it, or change it."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Annotated, Any

import typer

from unisono.checkpoint.folder import RunFolder
from unisono.cli.options import (
    FOLDER,
    SCRIPT,
    FailureTimeout,
    JobPlace,
    Module,
    RemoteCommand,
    TokenFile,
    Training,
    Trusted,
    Url,
    grouped,
    opt,
)
from unisono.errors import JobError, LaunchError
from unisono.launch.elastic.address import Control, Whereabouts
from unisono.launch.elastic.elastic_settings import FAILURE_TIMEOUT_S, ElasticSettings, Range
from unisono.launch.outcome import open_folder, report
from unisono.launch.settings import LaunchSettings, Script
from unisono.launch.terminal import Terminal
from unisono.membership.token import read_token, token_file

app = typer.Typer()


@app.command(cls=RemoteCommand)
@grouped
def status(
    job: JobPlace,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the workers of an elastic job.

    For each worker: its rank, host, step and speed. For the job: how many workers there are to be.
    """
    state = job.control.status()
    typer.echo(json.dumps(state, indent=1) if as_json else table(state))


def line(state: Mapping[str, Any]) -> str:
    """The status of a job in one line: ``training, generation 3: 4 of 6 workers (2:8)``."""
    sizes = f"{state['smallest']}:{state['largest']}"
    over = state["over"]
    if over is not None:
        return f"over: {over['reason'] or 'done'}"
    count = f"{len(state['members'])} of {state['wanted']} workers ({sizes})"
    return f"{state['phase']}, generation {state['generation']}: {count}"


def table(state: Mapping[str, Any]) -> str:
    """The status of a job in one line, with a line for each worker and each agent below."""
    rows = [("worker", "rank", "host", "phase", "step", "samples/s"), *map(_row, (*state["members"], *state["others"]))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    excluded = [f"{worker['worker']} on {worker['host']} was excluded: {worker['why']}" for worker in state["excluded"]]
    return "\n".join([line(state), *(aligned if len(rows) > 1 else []), *map(_agent, state["agents"]), *excluded])


def _row(worker: Mapping[str, Any]) -> tuple[str, ...]:
    rank = "" if worker["rank"] is None else str(worker["rank"])
    speed = f"{worker['samples_per_s']:.0f}" if worker["samples_per_s"] else ""
    phase = ", ".join(_phases(worker))
    return worker["id"], rank, worker["host"], phase, str(worker["step"] or ""), speed


def _phases(worker: Mapping[str, Any]) -> Iterator[str]:
    yield worker["phase"]
    if worker["leaving"]:
        yield "leaving"
    if not worker["connected"] and worker["phase"] != "asked":
        yield "not connected"


def _agent(agent: Mapping[str, Any]) -> str:
    notes = (", leaving" if agent["leaving"] else "") + ("" if agent["connected"] else ", not connected")
    notes += f", left out: {agent['left_out']}" if agent["left_out"] else ""
    return f"{agent['agent']} on {agent['host']}: room for {agent['workers']}{notes}"


@app.command(cls=RemoteCommand)
@grouped
def leave(
    who: Annotated[
        str, typer.Argument(help="A worker's id or rank, or an agent's id, as status shows them.", metavar="WHO")
    ],
    job: JobPlace,
) -> None:
    """Ask a worker to leave an elastic job.

    It leaves after the step that is under way. With an agent's id, all workers of that agent leave.
    """
    typer.echo(line(job.control.leave(who)))


@app.command(cls=RemoteCommand)
@grouped
def resize(
    workers: Annotated[int, typer.Argument(help="The new number of workers.", metavar="N", min=1)],
    job: JobPlace,
) -> None:
    """Change the number of workers of an elastic job to N. The weights stay the same, bit for bit."""
    typer.echo(line(job.control.resize(workers)))


@app.command(cls=RemoteCommand)
@grouped
def replace(
    who: Annotated[str, typer.Argument(help="A worker's id or rank, as status shows them.", metavar="WHO")],
    job: JobPlace,
) -> None:
    """Start a new worker in place of another one.

    The other worker leaves the elastic job after the step that is under way.
    """
    typer.echo(line(job.control.replace(who)))


@app.command(cls=RemoteCommand)
@grouped
def checkpoint(job: JobPlace) -> None:
    """Have an elastic job write a checkpoint.

    It is written after the step that is under way.
    """
    typer.echo(line(job.control.checkpoint()))


@app.command(cls=RemoteCommand)
@grouped
def stop(job: JobPlace) -> None:
    """Have an elastic job write a checkpoint and end.

    All of its workers leave, and unisono run ends with exit code 75.
    """
    typer.echo(line(job.control.stop()))


RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class JoinOptions:
    """The options of a host that joins a job."""

    url: Url = None
    run_dir: Annotated[Path | None, opt(**FOLDER)] = None
    """The job's run folder. With URL: a run folder on this host; by default a new one."""
    workers: Annotated[int, opt("-n", "--workers", min=1)] = 1
    """The largest number of workers on this host; by default 1."""
    token_file: TokenFile = None
    certificate: Trusted = None
    wait_s: Annotated[float, opt(min=0)] = 0
    """With URL: seconds to wait for a coordinator that does not answer yet."""
    agent: Annotated[str | None, opt(hidden=True)] = None
    """The id that the launcher gave this agent."""
    module: Module = False
    failure_timeout_s: FailureTimeout = FAILURE_TIMEOUT_S


@app.command(**{**SCRIPT, "cls": RemoteCommand})
@grouped
def join(
    script: Annotated[str, typer.Argument(help="The script of the job.", metavar="SCRIPT")],
    args: Annotated[
        list[str] | None, typer.Argument(help="The arguments of the script, as unisono run got them.", metavar="ARGS")
    ] = None,
    *,
    own: JoinOptions,
    options: Training,
) -> None:
    """Offer room for N more workers to an elastic job.

    From another host: unisono join https://HOST:PORT -n 2 --token-file token --certificate certificate.pem train.py
    With the job's run folder at hand: unisono join --run-dir runs/a -n 2 train.py
    """
    if own.url is None and own.run_dir is None:
        raise JobError("which job? unisono join https://HOST:PORT …, or unisono join --run-dir FOLDER …")
    launched = Script(script, tuple(args or ()), is_module=own.module)
    launch = LaunchSettings.tuned(launched, options, workers=own.workers, run_dir=own.run_dir)
    settings = ElasticSettings(launch, Range(1, own.workers), failure_timeout_s=own.failure_timeout_s)
    settings.check()
    where = Whereabouts(own.url, own.token_file, own.certificate, own.run_dir)
    raise typer.Exit(start(settings, where, own.agent, own.wait_s))


def start(settings: ElasticSettings, where: Whereabouts, agent: str | None = None, wait_s: float = 0) -> int:
    """Run workers for a job until it is over, or this agent is asked to leave.

    Args:
        settings: the settings of the workers on this host.
        where: the place of the job.
        agent: the id of this agent; None for a new one.
        wait_s: the seconds for which the coordinator of another host may not answer yet.

    Returns:
        the exit code.

    Raises:
        JobError: no job runs in this folder, or its address or token cannot be used.
        LaunchError: the job's coordinator does not answer, or refuses this agent.
    """
    from unisono.launch.elastic.address import new_agent
    from unisono.launch.elastic.agent import Joined, run_agent

    joined = Joined(where.address(), where.token, agent or new_agent())
    is_specified = "devices_per_worker" in settings.launch.options.communication.specified
    if not is_specified or where.url is not None:
        state = wait_for_status(Control(joined.address), wait_s if where.url is not None else 0)
        settings = settings if is_specified else settings.with_devices(state["devices_per_worker"])
    folder = _folder(settings, where)
    terminal = Terminal.of_this_process()
    terminal.say(f"room for {settings.launch.workers} more, run folder {folder.path}")
    outcome = run_agent(settings, folder, terminal, joined)
    terminal.conclude(report(outcome, folder))
    return outcome.exit_code


def wait_for_status(control: Control, wait_s: float, pause_s: float = RETRY_S) -> dict[str, Any]:
    """The status of the job, once its coordinator answers.

    Args:
        control: the connection to the coordinator.
        wait_s: the seconds for which it may not answer yet.
        pause_s: the seconds between two attempts.

    Raises:
        JobError: the address or the token is wrong; at once.
        LaunchError: the coordinator did not answer in that time.
    """
    started = monotonic()
    while True:
        try:
            return control.status()
        except LaunchError:
            if monotonic() - started >= wait_s:
                raise
        sleep(pause_s)


def _folder(settings: ElasticSettings, where: Whereabouts) -> RunFolder:
    # The folder of the job itself holds files of others: a host must not clear it, as it does a folder of its own.
    if where.run_dir is not None and (where.url is None or _is_the_jobs(where.run_dir, where.token)):
        return RunFolder(where.run_dir)
    return open_folder(where.run_dir, settings.launch.script.stem)


def _is_the_jobs(run_dir: Path, token: Path) -> bool:
    with suppress(JobError):
        return read_token(token_file(run_dir)) == read_token(token)
    return False
