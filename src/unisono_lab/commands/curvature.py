"""``unisono curvature``: how curved is the loss where a run has come to?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from unisono.cli.completion import run_folders
from unisono.cli.options import SCRIPT, Module
from unisono.launch.settings import Script
from unisono.launch.tuning import Tuning

app = typer.Typer()


@app.command(**SCRIPT)
def curvature(
    run: Annotated[
        Path,
        typer.Argument(
            autocompletion=run_folders,
            metavar="RUN",
            help="The run folder, with a checkpoint.",
            show_default=False,
        ),
    ],
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The script that trained; a module's name with -m.")],
    args: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="The arguments of the script.")] = None,
    workers: Annotated[int, typer.Option("--workers", "-n", help="The number of workers; decides no bit.")] = 1,
    step: Annotated[
        int | None, typer.Option(help="The checkpoint after so many steps; by default the newest.", show_default=False)
    ] = None,
    samples: Annotated[int, typer.Option(help="The number of drawn vectors for the trace.")] = 16,
    iterations: Annotated[
        int, typer.Option(help="The most products with the Hessian for its largest eigenvalue.")
    ] = 50,
    batches: Annotated[int, typer.Option(help="Measure the mean loss over so many global batches.")] = 1,
    module: Module = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Measure the curvature of a run's loss at a checkpoint: critical sharpness, largest eigenvalue and trace.

    The script runs up to its first step.run, whose loss function and first batches are taken, and ends there. Nothing
    is trained, and the run folder gets one file: curvature-step-….json.

        unisono curvature runs/train-1 train.py --lr 0.1

        unisono curvature -n 2 --batches 8 --samples 64 runs/train-1 train.py --lr 0.1
    """
    from unisono_lab.curvature import CurvatureRequest, measure

    tuning = Tuning.of_this_process(wanted=True)
    asked = Script(script, tuple(args or ()), is_module=module)
    found = measure(CurvatureRequest(run, asked, step, workers, samples, iterations, batches, tuning))
    typer.echo(json.dumps(found, indent=1) if as_json else text_of(found))


def text_of(found: dict[str, Any]) -> str:
    """The figures for people."""

    def told(name: str, digits: int = 5) -> str:
        return f"{found[name]:.{digits}g}"

    if not found["passes"]:
        critical = "not measured (the update of K-FAC goes by more than the gradient)"
    elif found["critical_step"] is None:
        critical = "none (no multiple of the next update makes the loss larger)"
    else:
        rises = f"the loss rises from {told('critical_step')} times the next update on"
        critical = f"{told('critical_sharpness')} ({rises})"
    return "\n".join(
        (
            f"after {found['step']} steps, over {found['samples']} samples: loss {told('loss')}",
            f"critical sharpness  {critical}",
            f"largest eigenvalue  {told('largest')} (an eigenvalue is within {told('residual', 2)} of it)",
            f"trace               {told('trace')} ± {told('trace_error', 2)} (standard error)",
        )
    )
