"""``unisono replay``: what was decided in a run, when and why."""

from pathlib import Path
from typing import Annotated

import typer

from unisono.cli.completion import run_folders


def replay(
    run: Annotated[Path, typer.Argument(autocompletion=run_folders, metavar="RUN", help="The run folder.")],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            help="Show what this policy would have decided in the run: noise-scale, or module:Class; repeat for "
            "more. It sees what the run measured, which does not react to its decisions: only batch size and "
            "learning rate follow them.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw a chart, too: .png, .svg or .pdf. Needs matplotlib: pip install matplotlib."
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Print a row for each decision and each event, even where many are alike.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print lines of JSON, for programs.")] = False,
) -> None:
    """Show what was decided in a run, when and why; or what a policy would have done in it."""
    from unisono_lab.commands.replay_report import report

    report(run, policy or (), plot, everything=everything, as_json=as_json)
