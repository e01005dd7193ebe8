"""``unisono simulate``: how long a job takes and what it costs, before it is paid for."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.text import Text

from unisono.cli.options import grouped, opt
from unisono.errors import FIRST_SIGNAL, JobError
from unisono.received import LONGEST_S

if TYPE_CHECKING:
    from unisono_lab.simulation.simulation import Simulation

UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


ScenarioFile = Annotated[Path, typer.Argument(metavar="SCENARIO", help="A TOML file: the work, the hosts, the job.")]
Policies = Annotated[
    list[str] | None,
    typer.Option(
        "--policies",
        metavar="NAMES",
        help="Policies to put side by side on the same seeds: names with commas, or none; repeat for more.",
        show_default=False,
    ),
]
Processes = Annotated[
    int | None, typer.Option(min=1, max=512, help="Processes that simulate; by default one for each core.")
]


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """The options of this command."""

    measured: Annotated[list[Path] | None, opt("--from", metavar="FOLDER")] = None
    """A run folder or a study's, from which times are taken; repeat for more."""
    deadline: Annotated[str | None, opt(metavar="TIME")] = None
    """The time that it may take, such as 8h or 90m."""
    budget: Annotated[float | None, opt()] = None
    """What it may cost, in the scenario's currency."""
    minimise: Annotated[Literal["cost", "time"] | None, opt()] = None
    """Search for the hosts, checkpoints and policies with the least cost or time."""
    seeds: Annotated[int, opt(min=1, max=100_000)] = 40
    """The number of simulated jobs."""
    seed: Annotated[int, opt(min=0, max=2**62)] = 0
    """The first seed."""
    out: Annotated[Path | None, opt(metavar="FOLDER")] = None
    """Write a report and its plots there."""
    as_json: Annotated[bool, opt("--json")] = False
    """Print JSON, for programs."""


@grouped
def simulate(
    scenario: ScenarioFile,
    policies: Policies = None,
    processes: Processes = None,
    *,
    own: SimulateOptions,
) -> None:
    """Simulate a job on hosts that come, go and cost: how long, how dear, how likely by the deadline.

        unisono simulate job.toml --from studies/train --deadline 8h

        unisono simulate job.toml --from runs/mine --deadline 8h --budget 200 --minimise cost

    The coordinator's decisions and the policies are the real ones; time is virtual. The same seeds give the same
    answers.
    """
    from unisono.host.cgroup import usable_cores
    from unisono_lab.report.report import require_reports
    from unisono_lab.simulation.calibration import measured as read_measured
    from unisono_lab.simulation.scenario import read_scenario
    from unisono_lab.simulation.simulation import Goal, SimulationSettings, simulation
    from unisono_lab.simulation.simulation import as_json as written

    if own.budget is not None and not 0 <= own.budget < float("inf"):
        raise JobError(f"--budget {own.budget}: a number from 0")
    if own.out is not None:
        require_reports()
    known = read_measured(own.measured or ())
    for words in known.damaged:
        typer.echo(f"unisono: {words}", err=True)
    given = read_scenario(scenario, known)
    wish = Goal(own.minimise or "cost", None if own.deadline is None else seconds_of(own.deadline), own.budget)
    sets = [_names(each) for each in policies or ()]
    asked = SimulationSettings(
        wish, sets, own.seeds, own.seed, processes or usable_cores(), searches=own.minimise is not None
    )
    try:
        found = simulation(given, asked)
    except KeyboardInterrupt:
        typer.echo("unisono: ended by SIGINT: nothing is kept", err=True)
        raise typer.Exit(FIRST_SIGNAL + signal.SIGINT) from None
    if own.as_json:
        typer.echo(json.dumps(written(found), indent=1))
    if not own.as_json or own.out is not None:
        _report(found, scenario.stem, own.out, quiet=own.as_json)


def seconds_of(text: str) -> float:
    """A time with its unit: ``90m``, ``8h``, ``1.5d``, ``3600``.

    Raises:
        JobError: it is none, not above 0, or longer than anybody lives to see.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d)?", text.strip(), re.ASCII)
    if found is None or not (seconds := float(found[1]) * UNITS[found[2] or ""]) > 0:
        raise JobError(f"--deadline {text[:40]}: a number with its unit, such as 8h, 90m or 2d")
    if seconds > LONGEST_S:
        raise JobError(f"--deadline {text[:40]}: no job takes more than thirty years")
    return seconds


def _names(text: str) -> tuple[str, ...]:
    return () if text == "none" else tuple(name.strip() for name in text.split(",") if name.strip())


def _report(found: Simulation, title: str, out: Path | None, quiet: bool) -> None:
    from unisono_lab.commands.study_report import show
    from unisono_lab.report.report import HTML_NAME, write_document
    from unisono_lab.report.simulated import simulated_charts, simulated_document

    console = Console(highlight=False, emoji=False)
    pictures = [] if out is None else simulated_charts(found)
    document = simulated_document(found, pictures, f"Simulation: {title}")
    if not quiet:
        show(document, console)
    if out is not None:
        write_document(document, pictures, out)
        Console(highlight=False, emoji=False, stderr=quiet).print(Text(f"report: {out / HTML_NAME}", "dim"))
