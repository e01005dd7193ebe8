"""``unisono status``: who trains, and how far they are."""

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from unisono.cli.options import JobPlace, RemoteCommand, grouped

app = typer.Typer()


@app.command(cls=RemoteCommand)
@grouped
def status(
    job: JobPlace,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show an elastic job: its workers with rank, host, step and speed, and how many there are to be."""
    found = job.control.status()
    typer.echo(json.dumps(found, indent=1) if as_json else table(found))


def line(found: Mapping[str, Any]) -> str:
    """The job in a line: ``training, generation 3: 4 of 6 workers (2:8)``."""
    sizes = f"{found['smallest']}:{found['largest']}"
    over = found["over"]
    if over is not None:
        return f"over: {over['reason'] or 'done'}"
    count = f"{len(found['members'])} of {found['wanted']} workers ({sizes})"
    return f"{found['phase']}, generation {found['generation']}: {count}"


def table(found: Mapping[str, Any]) -> str:
    """The job in a line, and below it a line for each worker and each agent."""
    rows = [("worker", "rank", "host", "phase", "step", "samples/s"), *map(_row, (*found["members"], *found["others"]))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    excluded = [f"{one['worker']} on {one['host']} was excluded: {one['why']}" for one in found["excluded"]]
    return "\n".join([line(found), *(aligned if len(rows) > 1 else []), *map(_agent, found["agents"]), *excluded])


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


# ``unisono leave``: one worker, or all of one host, take part no more.


@app.command(cls=RemoteCommand)
@grouped
def leave(
    who: Annotated[str, typer.Argument(help="A worker's id or rank, or an agent's id, as status shows them.")],
    job: JobPlace,
) -> None:
    """Have a worker of an elastic job leave after the step that is under way."""
    typer.echo(line(job.control.leave(who)))


# ``unisono resize``: another number of workers, while the job trains.


@app.command(cls=RemoteCommand)
@grouped
def resize(
    workers: Annotated[int, typer.Argument(help="The new number of workers.", metavar="N", min=1)],
    job: JobPlace,
) -> None:
    """Change the number of workers of an elastic job to N. The weights stay the same, bit for bit."""
    typer.echo(line(job.control.resize(workers)))


# ``unisono replace``: another worker instead of one that is slow, say.


@app.command(cls=RemoteCommand)
@grouped
def replace(
    who: Annotated[str, typer.Argument(help="A worker's id or rank, as status shows them.")],
    job: JobPlace,
) -> None:
    """Have a worker of an elastic job leave after the step that is under way, and start another in its place."""
    typer.echo(line(job.control.replace(who)))


# ``unisono checkpoint``: one now, besides those that the job writes by itself.


@app.command(cls=RemoteCommand)
@grouped
def checkpoint(job: JobPlace) -> None:
    """Have an elastic job write a checkpoint after the step that is under way."""
    typer.echo(line(job.control.checkpoint()))


# ``unisono stop``: the job ends with a checkpoint, from which it can be started again.


@app.command(cls=RemoteCommand)
@grouped
def stop(job: JobPlace) -> None:
    """Have all workers of an elastic job leave with a checkpoint; unisono run then ends with exit code 75."""
    typer.echo(line(job.control.stop()))
