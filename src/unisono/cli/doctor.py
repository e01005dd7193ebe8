"""``unisono doctor``: everything that a bug report needs."""

from typing import Annotated

import typer


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print it for programs.")] = False,
) -> None:
    """Look at this machine: versions, devices, limits, and whether workers can talk to each other."""
    typer.echo(str(as_json))
