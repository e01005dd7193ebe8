"""``unisono curvature``: how curved is the loss where a run has come to?

The script runs from a checkpoint to its first update, and ends there.
"""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from unisono.checkpoint.folder import ASKED, FOUND, RunFolder
from unisono.cli.completion import run_folders
from unisono.cli.options import SCRIPT, Module, grouped, opt
from unisono.errors import JobError, LaunchError, Unreadable
from unisono.jsonl import to_json
from unisono.launch.ending.result import in_a_line, last_lines, open_folder
from unisono.launch.local import launch
from unisono.launch.settings import LaunchSettings, Script
from unisono.launch.terminal.terminal import SilentTerminal
from unisono.received import read_object
from unisono.settings.reading import settings_by_path

app = typer.Typer()


@dataclass(frozen=True)
class CurvatureOptions:
    """The options that say what is to be measured."""

    workers: Annotated[int, opt("--workers", "-n")] = 1
    """The number of workers; decides no bit."""
    step: Annotated[int | None, opt()] = None
    """The checkpoint after so many steps; by default the newest."""
    samples: Annotated[int, opt()] = 16
    """The number of drawn vectors for the trace."""
    iterations: Annotated[int, opt()] = 50
    """The most products with the Hessian for its largest eigenvalue."""
    batches: Annotated[int, opt()] = 1
    """Measure the mean loss over so many global batches."""

    def checkpoint(self, run: Path) -> Path:
        """The folder of the checkpoint.

        Raises:
            JobError: a number is out of range, or there is no such checkpoint; lists those that there are.
        """
        for name, value, least in (
            ("--samples", self.samples, 2),  # one says nothing of its error
            ("--iterations", self.iterations, 1),
            ("--batches", self.batches, 1),
        ):
            if value < least:
                raise JobError(f"{name} {value}: at least {least} is needed")
        found = {int(path.name[5:]): path for path in run.glob("checkpoints/step-*") if path.name[5:].isdigit()}
        if not found:
            raise JobError(f"{run} has no checkpoint: name the run folder of a job that wrote some")
        step = max(found) if self.step is None else self.step
        if step not in found:
            raise JobError(f"{run} has no checkpoint of step {step}: it has {', '.join(map(str, sorted(found)))}")
        return found[step].absolute()

    def settings(self, run: Path, script: Script, place: Path) -> LaunchSettings:
        """How to start the script.

        Raises:
            JobError: the run folder does not say what its batches are, or the script cannot be run.
        """
        job = _job_of(run)
        shards, batch = job.get("shards"), job.get("batch_size")
        environment = {"UNISONO_CURVATURE": str(place)}
        if self.batches > 1:
            if not isinstance(batch, int) or not isinstance(shards, int):
                raise JobError(
                    f"--batches {self.batches}: {run / 'job.json'} names no batch size, since the script says it "
                    f"in run.steps: leave --batches out"
                )
            environment["UNISONO_BATCH_SIZE"] = str(self.batches * batch)
        options = {
            "shards": shards * self.batches if isinstance(shards, int) else None,
            "checkpoints.allow_job_change": True,
        }
        found = LaunchSettings.tuned(
            script, settings_by_path(options), workers=self.workers, extra_environment=environment
        )
        found.check()
        return found


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
    asked: CurvatureOptions,
) -> None:
    """Measure the curvature of a run's loss at a checkpoint: critical sharpness, largest eigenvalue and trace.

    The script runs up to its first step.run, whose loss function and first batches are taken, and ends there. Nothing
    is trained, and the run folder gets one file: curvature-step-….json.

        unisono curvature runs/train-1 train.py --lr 0.1

        unisono curvature -n 2 --batches 8 --samples 64 runs/train-1 train.py --lr 0.1
    """
    found = measure(asked, run, Script(script, tuple(args or ()), is_module=module))
    typer.echo(json.dumps(found, indent=1) if as_json else text_of(found))


def measure(asked: CurvatureOptions, run: Path, script: Script) -> dict[str, Any]:
    """Measure, and write the figures into the run folder. Main thread only.

    Args:
        asked: what is to be measured.
        run: the run folder with the checkpoint.
        script: the script that made it, with its arguments.

    Returns:
        figures by name, as :class:`~unisono.adapt.curvature.Curvature` has them, with the step, batches and samples.

    Raises:
        JobError: the request cannot work.
        LaunchError: the script failed, or took no step; says where its output is.
    """
    checkpoint = asked.checkpoint(run)
    with tempfile.TemporaryDirectory(prefix="unisono-curvature-") as name:
        place = Path(name)
        settings = asked.settings(run, script, place)
        (place / ASKED).write_bytes(to_json({"iterations": asked.iterations, "vectors": asked.samples}))
        (place / "run" / "checkpoints").mkdir(parents=True)
        (place / "run" / "checkpoints" / checkpoint.name).symlink_to(checkpoint, target_is_directory=True)
        folder = open_folder(place / "run", script.stem)
        outcome = launch(settings, folder, SilentTerminal())
        if outcome.exit_code:
            words, log = in_a_line(outcome, folder)
            raise LaunchError("\n  ".join([f"{script.target} failed: {words}", *last_lines(log)]))
        try:
            found = read_object(place / FOUND)
        except (OSError, Unreadable):
            raise LaunchError(
                f"{script.target} has called step.run nowhere, so there is no loss to measure: give it the "
                f"arguments with which it trains"
            ) from None
    told = {"step": int(checkpoint.name[5:]), "batches": asked.batches, **found}
    (run / f"curvature-{checkpoint.name}.json").write_bytes(to_json(told, indent=1))
    return told


def _job_of(run: Path) -> dict[str, Any]:
    try:
        return RunFolder(run).read_job() or {}
    except (OSError, Unreadable) as error:
        raise JobError(f"{run / 'job.json'} cannot be read: {error}") from error


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
