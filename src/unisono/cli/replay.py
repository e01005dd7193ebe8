"""``unisono replay``: what was decided in a run and why, and what a policy would have done in it."""

from pathlib import Path
from typing import Annotated

import typer


def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            help="Show what this one would have done beside what was done: noise-scale, or module:Class; repeat for "
            "more. It sees what the run measured, which does not react to its decisions: only batch size and "
            "learning rate follow them.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw it too: .png, .svg or .pdf. Needs matplotlib, of the extra 'plot'."),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="A row for each decision and each event, also where many are alike.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print lines of JSON, for programs.")] = False,
) -> None:
    """Show what was decided in a run, when and why; or what a policy would have done in it."""
    from unisono.cli.replay_report import report

    report(run, policy or (), plot, everything=everything, as_json=as_json)
