"""``unisono leave``: one worker, or all of one host, take part no more."""

from typing import Annotated

import typer

from unisono.cli.options import RunningIn
from unisono.cli.remote import TokenFile, Trusted, Url
from unisono.cli.status import line
from unisono.launch.elastic.address import Whereabouts
from unisono.launch.elastic.control import Control


def leave(
    who: Annotated[str, typer.Argument(help="A worker's id or rank, or an agent's id, as status shows them.")],
    run_dir: RunningIn = None,
    url: Url = None,
    token_file: TokenFile = None,
    certificate: Trusted = None,
) -> None:
    """Have a worker of an elastic job leave after the step that is under way."""
    typer.echo(line(Control(Whereabouts(url, token_file, certificate, run_dir).address()).leave(who)))
