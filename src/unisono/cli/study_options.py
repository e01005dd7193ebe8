"""The options of ``unisono study``, each declared once."""

from pathlib import Path
from typing import Annotated, Literal

import typer

STUDIES = Path("studies")
"""Where studies are, unless somebody says otherwise; a search for the largest batch lies beside its script's."""

TRIAL_GRACE_S = 5.0
"""How long the workers of a run that is interrupted may take to leave: nobody wants their checkpoint."""

StudyScript = Annotated[
    str | None, typer.Argument(help="The script to measure; a module's name with -m.", metavar="SCRIPT")
]
ScriptArgs = Annotated[list[str] | None, typer.Argument(help="What belongs to the script.", metavar="-- ARGS")]
Workers = Annotated[str, typer.Option(metavar="N,N,…", help="Numbers of workers to measure.")]
ScalingMode = Annotated[
    Literal["strong", "weak", "both"],
    typer.Option(help="Strong keeps the global batch; weak multiplies batch and learning rate by the workers."),
]
Repeats = Annotated[int, typer.Option(help="How often each is measured, interleaved in random order.")]
Steps = Annotated[int | None, typer.Option(help="Cut each run short after so many steps.")]
Epochs = Annotated[int | None, typer.Option(help="Cut each run short after so many epochs.")]
Warmup = Annotated[int, typer.Option(help="Steps at the beginning of each run that are left out.")]
Baseline = Annotated[
    str | None, typer.Option(metavar="SCRIPT", help="The plain loop to compare with, with its arguments.")
]
Out = Annotated[
    Path | None, typer.Option(help="The study's folder; one with figures is gone on with.", show_default=False)
]
Label = Annotated[str | None, typer.Option(help="A name for what is measured.", show_default=False)]
Price = Annotated[float | None, typer.Option(help="Of a worker's hour, to recommend by cost.")]
Waiting = Annotated[float, typer.Option(help="What it is worth to be ready an hour earlier, like --price.")]
Efficiency = Annotated[float, typer.Option(help="That workers should reach, up to 1, to recommend by it.")]
Predict = Annotated[
    str | None,
    typer.Option(metavar="N,N,…", help="Numbers of workers to predict; by default two and four times the most."),
]
Seed = Annotated[int, typer.Option(help="Of the order.")]
KeepGoing = Annotated[
    bool, typer.Option("--keep-going", help="Go on even if the first run of each kind fails for the same reason.")
]
From = Annotated[
    Path | None,
    typer.Option("--from", metavar="FILE", help="Measure nothing: a report of this table, or of this study."),
]
