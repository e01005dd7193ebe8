"""``unisono chaos``: inject faults into a job until it is done, and compare it with the same job without faults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from unisono.cli.options import Module, grouped, named_folder, opt
from unisono.cli.tables import bare_table, show_table
from unisono.errors import JobError
from unisono.launch.elastic.elastic import Range
from unisono.launch.ending.result import RUNS
from unisono.launch.settings import Script
from unisono.received import LONGEST_S

if TYPE_CHECKING:
    from unisono_lab.chaos import ChaosResult

DIGITS = 16
MOST_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """The options of this command."""

    seed: Annotated[int, opt()] = 0
    """The seed of the fault plan: the same seed gives the same faults."""
    faults: Annotated[int, opt(min=1)] = 50
    """The number of faults."""
    written: Annotated[Path | None, opt("--script")] = None
    """A fault plan (TOML) to use instead of one drawn from the seed."""
    workers: Annotated[str, opt("-n", "--workers", metavar="A:B")] = "1:4"
    """The range of workers."""
    devices_per_worker: Annotated[int, opt(min=1)] = 1
    """The devices of each worker; the job without faults has one."""
    module: Module = False
    run_dir: Annotated[Path | None, opt(parser=named_folder, metavar="FOLDER")] = None
    """A new folder for both jobs and the report."""
    checkpoint_every: Annotated[int | None, opt(min=1)] = None
    """Steps between checkpoints; by default such that the run writes fifty."""
    failure_timeout_s: Annotated[float, opt()] = 5.0
    """Seconds of silence after which a worker counts as lost."""
    patience_s: Annotated[float, opt()] = 120.0
    """Seconds without a step after which the job is ended."""


@grouped
def chaos(
    script: Annotated[str, typer.Argument(help="The script to train with; a module's name with -m.", metavar="SCRIPT")],
    args: Annotated[
        list[str] | None, typer.Argument(help="The arguments of the script, after --.", metavar="-- ARGS")
    ] = None,
    *,
    own: ChaosOptions,
) -> None:
    """Train with random faults, and compare the weights and the samples used with those of a run without faults.

    Exit code 0 if weights and samples are the same, else 1.
    """
    from unisono.checkpoint.folder import new_run_folder
    from unisono_lab.chaos import REPORT, SCRIPT, ChaosSpec, run_chaos
    from unisono_lab.faults.faults import Faults

    wanted = Range.read(own.workers)
    for name, seconds in {"failure-timeout-s": own.failure_timeout_s, "patience-s": own.patience_s}.items():
        if not 0 < seconds <= LONGEST_S:
            raise JobError(f"--{name} {seconds:g}: needs a number of seconds above 0, at most {LONGEST_S:g}")
    if not 1 <= wanted.smallest < wanted.largest:
        raise JobError(f"--workers {own.workers}: faults change the number of workers, so write a range, such as 1:4")
    trained = Script(script, tuple(args or ()), is_module=own.module)
    trained.require_readable()
    found = None if own.written is None else Faults.read(own.written)
    folder = (own.run_dir or new_run_folder(RUNS, f"chaos-{trained.stem}")).absolute()
    spec = ChaosSpec(
        script=trained,
        folder=folder,
        seed=own.seed,
        faults=own.faults,
        workers=str(wanted),
        largest=wanted.largest,
        devices=own.devices_per_worker,
        failure_timeout_s=own.failure_timeout_s,
        patience_s=own.patience_s,
        checkpoint_every=own.checkpoint_every,
        written=found,
    )
    out, err = (Console(stderr=stderr, highlight=False, emoji=False) for stderr in (False, True))
    verdict = run_chaos(spec, lambda line: err.print(Text(f"unisono: {line}"), soft_wrap=True))
    _show(verdict, out)
    out.print(Text(f"fault plan: {folder / SCRIPT}; report: {folder / REPORT}", "dim"), soft_wrap=True)
    raise typer.Exit(0 if verdict.is_good else 1)


def _show(verdict: ChaosResult, out: Console) -> None:
    rows = [(kind, str(number), str(verdict.struck.get(kind, 0))) for kind, number in verdict.planned.items()]
    rows.append(("all", str(sum(verdict.planned.values())), str(sum(verdict.struck.values()))))
    show_table(bare_table(("fault", "planned", "injected"), rows), out)
    facts = {
        "steps": f"{verdict.steps}; a step was begun again {verdict.repeated} times",
        "generations": f"{verdict.generations}",
        "starts": f"{verdict.starts}",
        "seconds": f"{verdict.seconds:g}",
        "weights": f"{_short(verdict.serial_digest)} alone, {_short(verdict.digest)} with faults",
        "samples": "see below" if verdict.problems else "each used exactly once",
    }
    for name, fact in facts.items():
        out.print(Text(f"{name:>12}  {fact}"), soft_wrap=True)
    for problem in verdict.problems[:MOST_PROBLEMS]:
        out.print(Text(problem, "red"), soft_wrap=True)
    if len(verdict.problems) > MOST_PROBLEMS:
        out.print(Text(f"… and {len(verdict.problems) - MOST_PROBLEMS} problems more", "red"))
    words = Text("passed: weights and samples are those of the run without faults", "bold green")
    out.print(words if verdict.is_good else Text("FAILED", "bold red"), soft_wrap=True)


def _short(digest: str | None) -> str:
    return "none" if digest is None else digest[:DIGITS]
