"""``unisono simulate``: how long a job takes and what it costs, before it is paid for."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.text import Text

from unisono.errors import FIRST_SIGNAL, JobError
from unisono.received import LONGEST_S

if TYPE_CHECKING:
    from unisono_lab.simulation.simulation import Simulation

UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


ScenarioFile = Annotated[Path, typer.Argument(metavar="SCENARIO", help="A TOML file: the work, the hosts, the job.")]
Folders = Annotated[
    list[Path] | None,
    typer.Option(
        "--from",
        metavar="FOLDER",
        help="A run folder or a study's, from which times are taken; repeat for more.",
        show_default=False,
    ),
]
Deadline = Annotated[str | None, typer.Option(metavar="TIME", help="The time that it may take, such as 8h or 90m.")]
Budget = Annotated[float | None, typer.Option(help="What it may cost, in the scenario's currency.")]
Minimise = Annotated[
    Literal["cost", "time"] | None,
    typer.Option(help="Search for the hosts, checkpoints and policies with the least cost or time."),
]
Policies = Annotated[
    list[str] | None,
    typer.Option(
        "--policies",
        metavar="NAMES",
        help="Policies to put side by side on the same seeds: names with commas, or none; repeat for more.",
        show_default=False,
    ),
]
Seeds = Annotated[int, typer.Option(min=1, max=100_000, help="The number of simulated jobs.")]
FirstSeed = Annotated[int, typer.Option(min=0, max=2**62, help="The first seed.")]
Processes = Annotated[
    int | None, typer.Option(min=1, max=512, help="Processes that simulate; by default one for each core.")
]
ReportFolder = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Write a report and its plots there.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def simulate(
    scenario: ScenarioFile,
    measured: Folders = None,
    deadline: Deadline = None,
    budget: Budget = None,
    minimise: Minimise = None,
    policies: Policies = None,
    seeds: Seeds = 40,
    seed: FirstSeed = 0,
    processes: Processes = None,
    out: ReportFolder = None,
    as_json: Json = False,
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

    if budget is not None and not 0 <= budget < float("inf"):
        raise JobError(f"--budget {budget}: a number from 0")
    if out is not None:
        require_reports()
    known = read_measured(measured or ())
    for words in known.damaged:
        typer.echo(f"unisono: {words}", err=True)
    given = read_scenario(scenario, known)
    wish = Goal(minimise or "cost", None if deadline is None else seconds_of(deadline), budget)
    sets = [_names(each) for each in policies or ()]
    asked = SimulationSettings(wish, sets, seeds, seed, processes or usable_cores(), searches=minimise is not None)
    try:
        found = simulation(given, asked)
    except KeyboardInterrupt:
        typer.echo("unisono: ended by SIGINT: nothing is kept", err=True)
        raise typer.Exit(FIRST_SIGNAL + signal.SIGINT) from None
    if as_json:
        typer.echo(json.dumps(written(found), indent=1))
    if not as_json or out is not None:
        _report(found, scenario.stem, out, quiet=as_json)


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
