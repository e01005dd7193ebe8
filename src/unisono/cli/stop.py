"""``unisono stop``: the job ends with a checkpoint, from which it can be started again."""

import typer

from unisono.cli.options import RunningIn
from unisono.cli.remote import TokenFile, Trusted, Url
from unisono.cli.status import line
from unisono.launch.elastic.address import Whereabouts
from unisono.launch.elastic.control import Control


def stop(
    run_dir: RunningIn = None,
    url: Url = None,
    token_file: TokenFile = None,
    certificate: Trusted = None,
) -> None:
    """Have all workers of an elastic job leave with a checkpoint; unisono run then ends with exit code 75."""
    typer.echo(line(Control(Whereabouts(url, token_file, certificate, run_dir).address()).stop()))
