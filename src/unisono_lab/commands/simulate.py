"""``unisono simulate``: the time and the cost of a job, before it runs."""

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


ScenarioFile = Annotated[Path, typer.Argument(metavar="SCENARIO", help="A TOML file: the work, the hosts and the job.")]
Policies = Annotated[
    list[str] | None,
    typer.Option(
        "--policies",
        metavar="NAMES",
        help="Policies to compare on the same seeds: names with commas, or none; repeat for more sets.",
        show_default=False,
    ),
]
Processes = Annotated[
    int | None, typer.Option(min=1, max=512, help="The number of processes; by default one for each core.")
]


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """The options of this command."""

    measured: Annotated[list[Path] | None, opt("--from", metavar="FOLDER")] = None
    """A folder of a run or a study, from which times are taken; repeat for more."""
    deadline: Annotated[str | None, opt(metavar="TIME")] = None
    """The longest time that the job may take, such as 8h or 90m."""
    budget: Annotated[float | None, opt()] = None
    """The highest cost that the job may have, in the scenario's currency."""
    minimise: Annotated[Literal["cost", "time"] | None, opt()] = None
    """Search for the hosts, checkpoints and policies with the least cost or time."""
    seeds: Annotated[int, opt(min=1, max=100_000)] = 40
    """The number of simulated jobs."""
    seed: Annotated[int, opt(min=0, max=2**62)] = 0
    """The first seed."""
    out: Annotated[Path | None, opt(metavar="FOLDER")] = None
    """The folder for a report and its plots."""
    as_json: Annotated[bool, opt("--json")] = False
    """Print JSON, for programs."""


@grouped
def simulate(
    scenario: ScenarioFile,
    policies: Policies = None,
    processes: Processes = None,
    *,
    options: SimulateOptions,
) -> None:
    """Simulate the time and cost of a job on hosts that come and go.

        unisono simulate job.toml --from studies/train --deadline 8h

        unisono simulate job.toml --from runs/mine --deadline 8h --budget 200 --minimise cost

    The decisions of the coordinator and the policies are real; time is virtual. The same seeds give the same answers.
    """
    from unisono.host.machine import usable_cores
    from unisono_lab.report.report import require_reports
    from unisono_lab.simulation.calibration import measured as read_measured
    from unisono_lab.simulation.scenario import read_scenario
    from unisono_lab.simulation.simulation import Goal, SimulationSettings, simulation
    from unisono_lab.simulation.simulation import as_json as written

    if options.budget is not None and not 0 <= options.budget < float("inf"):
        raise JobError(f"--budget {options.budget}: needs a number of at least 0")
    if options.out is not None:
        require_reports()
    calibration = read_measured(options.measured or ())
    for words in calibration.damaged:
        typer.echo(f"unisono: {words}", err=True)
    job_scenario = read_scenario(scenario, calibration)
    deadline_s = None if options.deadline is None else seconds_of(options.deadline)
    goal, policy_sets = Goal(options.minimise or "cost", deadline_s, options.budget), [*map(_names, policies or ())]
    processes, searches = processes or usable_cores(), options.minimise is not None
    settings = SimulationSettings(goal, policy_sets, options.seeds, options.seed, processes, searches)
    try:
        result = simulation(job_scenario, settings)
    except KeyboardInterrupt:
        typer.echo("unisono: ended by SIGINT: no results are kept", err=True)
        raise typer.Exit(FIRST_SIGNAL + signal.SIGINT) from None
    if options.as_json:
        typer.echo(json.dumps(written(result), indent=1))
    if not options.as_json or options.out is not None:
        _report(result, scenario.stem, options.out, quiet=options.as_json)


def seconds_of(text: str) -> float:
    """A time with its unit: ``90m``, ``8h``, ``1.5d``, ``3600``.

    Raises:
        JobError: the text is no time, or the time is not above 0, or longer than thirty years.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d)?", text.strip(), re.ASCII)
    if match is None or not (seconds := float(match[1]) * UNITS[match[2] or ""]) > 0:
        raise JobError(f"--deadline {text[:40]}: needs a number with its unit, such as 8h, 90m or 2d")
    if seconds > LONGEST_S:
        raise JobError(f"--deadline {text[:40]}: no job takes more than thirty years")
    return seconds


def _names(text: str) -> tuple[str, ...]:
    return () if text == "none" else tuple(name.strip() for name in text.split(",") if name.strip())


def _report(result: Simulation, title: str, out: Path | None, quiet: bool) -> None:
    from unisono_lab.report.report import HTML_NAME, show, write_document
    from unisono_lab.report.simulated import simulated_charts, simulated_document

    console = Console(highlight=False, emoji=False)
    pictures = [] if out is None else simulated_charts(result)
    document = simulated_document(result, pictures, f"Simulation: {title}")
    if not quiet:
        show(document, console)
    if out is not None:
        write_document(document, pictures, out)
        Console(highlight=False, emoji=False, stderr=quiet).print(Text(f"report: {out / HTML_NAME}", "dim"))
