"""``unisono stop``: the job ends with a checkpoint, from which it can be started again."""

import typer

from unisono.cli.options import RunningIn
from unisono.cli.status import line
from unisono.launch.address import address_of, find_run
from unisono.launch.control import Control


def stop(run_dir: RunningIn = None) -> None:
    """Have all workers of an elastic job leave with a checkpoint; unisono run then ends with exit code 75."""
    typer.echo(line(Control(address_of(find_run(run_dir))).stop()))
