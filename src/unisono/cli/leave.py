"""``unisono leave``: one worker, or all of one host, take part no more."""

from typing import Annotated

import typer

from unisono.cli.options import RunningIn
from unisono.cli.status import line
from unisono.launch.address import address_of, find_run
from unisono.launch.control import Control


def leave(
    who: Annotated[str, typer.Argument(help="A worker's id or rank, or an agent's id, as status shows them.")],
    run_dir: RunningIn = None,
) -> None:
    """Have a worker of an elastic job leave after the step that is under way."""
    typer.echo(line(Control(address_of(find_run(run_dir))).leave(who)))
