"""``unisono resize``: another number of workers, while the job trains."""

from typing import Annotated

import typer

from unisono.cli.options import RunningIn
from unisono.cli.remote import TokenFile, Trusted, Url
from unisono.cli.status import line
from unisono.launch.elastic.address import Whereabouts
from unisono.launch.elastic.control import Control


def resize(
    workers: Annotated[int, typer.Argument(help="How many workers there are to be.", metavar="N", min=1)],
    run_dir: RunningIn = None,
    url: Url = None,
    token_file: TokenFile = None,
    certificate: Trusted = None,
) -> None:
    """Have an elastic job go on with N workers. The weights stay the same, bit for bit."""
    typer.echo(line(Control(Whereabouts(url, token_file, certificate, run_dir).address()).resize(workers)))
