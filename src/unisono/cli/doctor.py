"""``unisono doctor``: everything that a bug report needs."""

import json
from typing import Annotated

import typer


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print it for programs.")] = False) -> None:
    """Look at this machine: versions, devices, limits, and whether workers can talk to each other.

    Exit code 1 if nothing can be trained here; other problems are listed with what to do.
    """
    from unisono.launch.doctor.doctor import examine

    diagnosis = examine()
    typer.echo(json.dumps(diagnosis.as_json(), indent=1) if as_json else diagnosis.as_text())
    raise typer.Exit(1 if diagnosis.stops else 0)
