"""The options of ``unisono study`` and ``unisono batch-size``, each declared once."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from unisono.cli.help import HelpfulCommand


class StudyCommand(HelpfulCommand):
    """A command whose script has options of its own, behind ``--``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Say where an option belongs that is none of the study's."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if type(error).__name__ == "NoSuchOption":
                error.message += ' (what is meant for the script stands behind "--")'  # type: ignore[attr-defined]
            raise


STUDIES = Path("studies")
"""Where studies are, unless somebody says otherwise; a search for the largest batch lies beside its script's."""

StudyScript = Annotated[
    str | None, typer.Argument(help="The script to measure; a module's name with -m.", metavar="SCRIPT")
]
ScriptArgs = Annotated[list[str] | None, typer.Argument(help="The arguments of the script.", metavar="-- ARGS")]
Workers = Annotated[str, typer.Option(metavar="N,N,…", help="Numbers of workers to measure.")]
ScalingMode = Annotated[
    Literal["strong", "weak", "both"],
    typer.Option(help="Strong keeps the global batch; weak multiplies batch and learning rate by the workers."),
]
Repeats = Annotated[
    int, typer.Option(help="The number of runs of each kind; all runs are interleaved in random order.")
]
Steps = Annotated[int | None, typer.Option(help="Cut each run short after so many steps.")]
Epochs = Annotated[int | None, typer.Option(help="Cut each run short after so many epochs.")]
Warmup = Annotated[int, typer.Option(help="The number of first steps of each run that are not measured.")]
Stages = Annotated[
    int | None,
    typer.Option(
        metavar="DEVICES",
        help="Measure one worker of so many devices by all schedules of run.pipeline, instead of numbers of workers.",
    ),
]
StudyOn = Annotated[
    Literal["ray", "slurm"] | None,
    typer.Option("--on", help="Start the workers on the nodes of a Ray cluster, or as tasks of Slurm (srun)."),
]
Baseline = Annotated[
    str | None, typer.Option(metavar="SCRIPT", help="The plain loop to compare with, with its arguments.")
]
Out = Annotated[
    Path | None, typer.Option(help="The study's folder; a folder with measurements is continued.", show_default=False)
]
Label = Annotated[
    str | None, typer.Option(help="The name of this measurement in reports and comparisons.", show_default=False)
]
Price = Annotated[
    float | None, typer.Option(help="The price of one worker for an hour, to recommend the cheapest number of workers.")
]
Waiting = Annotated[float, typer.Option(help="The price of waiting for an hour, in the currency of --price.")]
Efficiency = Annotated[float, typer.Option(help="The least efficiency, up to 1, of the recommended number of workers.")]
Predict = Annotated[
    str | None,
    typer.Option(
        metavar="N,N,…", help="Numbers of workers to predict; by default two and four times the largest measured one."
    ),
]
Seed = Annotated[int, typer.Option(help="The seed of the random order of runs.")]
KeepGoing = Annotated[
    bool, typer.Option("--keep-going", help="Go on even if the first run of each kind fails for the same reason.")
]
From = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="FILE",
        help="Measure nothing: write a report from this CSV file, results.json or study folder.",
    ),
]
