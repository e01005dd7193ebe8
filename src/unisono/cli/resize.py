"""``unisono resize``: another number of workers, while the job trains."""

from typing import Annotated

import typer

from unisono.cli.options import RunningIn
from unisono.cli.status import line
from unisono.launch.address import address_of, find_run
from unisono.launch.control import Control


def resize(
    workers: Annotated[int, typer.Argument(help="How many workers there are to be.", metavar="N", min=1)],
    run_dir: RunningIn = None,
) -> None:
    """Have an elastic job go on with N workers. The weights stay the same, bit for bit."""
    typer.echo(line(Control(address_of(find_run(run_dir))).resize(workers)))
