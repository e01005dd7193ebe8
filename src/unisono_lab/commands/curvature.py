"""``unisono curvature``: the curvature of the loss at a checkpoint of a run.

The script runs from the checkpoint to its first update, and ends there.
"""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from unisono.checkpoint.folder import CURVATURE_REQUEST, CURVATURE_RESULT, RunFolder
from unisono.cli.options import SCRIPT, Module, grouped, opt, run_folders
from unisono.errors import JobError, LaunchError, Unreadable
from unisono.jsonl import to_json
from unisono.launch.outcome import last_lines
from unisono.launch.settings import LaunchSettings, Script
from unisono.launch.trial import Trial
from unisono.received import read_object
from unisono.settings.reading import settings_by_path

app = typer.Typer()


@dataclass(frozen=True)
class CurvatureOptions:
    """The options of the measurement."""

    workers: Annotated[int, opt("--workers", "-n")] = 1
    """The number of workers; it changes no bit of the figures."""
    step: Annotated[int | None, opt()] = None
    """The number of steps of the checkpoint; by default that of the newest."""
    samples: Annotated[int, opt()] = 16
    """The number of random vectors for the trace."""
    iterations: Annotated[int, opt()] = 50
    """The largest number of products with the Hessian for its largest eigenvalue."""
    batches: Annotated[int, opt()] = 1
    """The number of global batches over which the loss is averaged."""

    def checkpoint(self, run: Path) -> Path:
        """The folder of the checkpoint.

        Raises:
            JobError: a number is out of range, or there is no such checkpoint; the message lists the existing ones.
        """
        for name, value, least in (
            ("--samples", self.samples, 2),  # a single sample gives no standard error
            ("--iterations", self.iterations, 1),
            ("--batches", self.batches, 1),
        ):
            if value < least:
                raise JobError(f"{name} {value}: needs a number of at least {least}")
        checkpoints = {int(path.name[5:]): path for path in run.glob("checkpoints/step-*") if path.name[5:].isdigit()}
        if not checkpoints:
            raise JobError(f"{run} has no checkpoint: name the run folder of a job that wrote checkpoints")
        step = max(checkpoints) if self.step is None else self.step
        if step not in checkpoints:
            raise JobError(f"{run} has no checkpoint of step {step}: it has {', '.join(map(str, sorted(checkpoints)))}")
        return checkpoints[step].absolute()

    def settings(self, run: Path, script: Script, place: Path) -> LaunchSettings:
        """The settings with which the script is started.

        Raises:
            JobError: the run folder does not name the batch size, or the script cannot be run.
        """
        try:
            job = RunFolder(run).read_job() or {}
        except (OSError, Unreadable) as error:
            raise JobError(f"{run / 'job.json'} cannot be read: {error}") from error
        shards, batch = job.get("shards"), job.get("batch_size")
        environment = {"UNISONO_CURVATURE": str(place)}
        if self.batches > 1:
            if not isinstance(batch, int) or not isinstance(shards, int):
                raise JobError(
                    f"--batches {self.batches}: {run / 'job.json'} names no batch size, since the script passes "
                    f"it to run.steps: leave --batches out"
                )
            environment["UNISONO_BATCH_SIZE"] = str(self.batches * batch)
        options = {
            "shards": shards * self.batches if isinstance(shards, int) else None,
            "checkpoints.allow_job_change": True,
        }
        settings = settings_by_path(options)
        launched = LaunchSettings.tuned(script, settings, workers=self.workers, extra_environment=environment)
        launched.check()
        return launched


@app.command(**SCRIPT)
@grouped
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
    module: Module = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    *,
    options: CurvatureOptions,
) -> None:
    """Measure the curvature of a run's loss at a checkpoint.

    The result is the critical sharpness, the largest eigenvalue and the trace.

    The script runs up to its first step.run, whose loss function and batches are measured, and ends there. It trains
    nothing, and the run folder gets one new file: curvature-step-….json.

        unisono curvature runs/train-1 train.py --lr 0.1

        unisono curvature -n 2 --batches 8 --samples 64 runs/train-1 train.py --lr 0.1
    """
    figures = measure(options, run, Script(script, tuple(args or ()), is_module=module))
    typer.echo(json.dumps(figures, indent=1) if as_json else text_of(figures))


def measure(options: CurvatureOptions, run: Path, script: Script) -> dict[str, Any]:
    """Measure the curvature, and write the figures into the run folder. Main thread only.

    Returns:
        figures by name, as in :class:`~unisono_lab.second_order.curvature_probe.Curvature`, with the step, batches and
        samples.

    Raises:
        JobError: the request cannot work.
        LaunchError: the script failed, or took no step; the message says where its output is.
    """
    checkpoint = options.checkpoint(run)
    with tempfile.TemporaryDirectory(prefix="unisono-curvature-") as temporary:
        place = Path(temporary)
        settings = options.settings(run, script, place)
        (place / CURVATURE_REQUEST).write_bytes(to_json({"iterations": options.iterations, "vectors": options.samples}))
        (place / "run" / "checkpoints").mkdir(parents=True)
        (place / "run" / "checkpoints" / checkpoint.name).symlink_to(checkpoint, target_is_directory=True)
        trial = Trial.run(settings, place / "run")
        if trial.failed:
            raise LaunchError("\n  ".join([f"{script.target} failed: {trial.error}", *last_lines(trial.log)]))
        try:
            measured = read_object(place / CURVATURE_RESULT)
        except (OSError, Unreadable):
            raise LaunchError(
                f"{script.target} did not call step.run, so there is no loss to measure: pass the "
                f"arguments with which it trains"
            ) from None
    figures = {"step": int(checkpoint.name[5:]), "batches": options.batches, **measured}
    (run / f"curvature-{checkpoint.name}.json").write_bytes(to_json(figures, indent=1))
    return figures


def text_of(figures: dict[str, Any]) -> str:
    """The figures as text, a line for each."""

    def value(name: str, digits: int = 5) -> str:
        return f"{figures[name]:.{digits}g}"

    if not figures["passes"]:
        critical = "not measured (the update of K-FAC depends on more than the gradient)"
    elif figures["critical_step"] is None:
        critical = "none (no multiple of the next update makes the loss larger)"
    else:
        rises = f"the loss rises from {value('critical_step')} times the next update on"
        critical = f"{value('critical_sharpness')} ({rises})"
    return "\n".join(
        (
            f"after {figures['step']} steps, over {figures['samples']} samples: loss {value('loss')}",
            f"critical sharpness  {critical}",
            f"largest eigenvalue  {value('largest')} (an eigenvalue is within {value('residual', 2)} of it)",
            f"trace               {value('trace')} ± {value('trace_error', 2)} (standard error)",
        )
    )
