"""``unisono page``: a job in a browser, while it runs or afterwards."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from unisono.cli.options import TokenFile, Trusted
from unisono.errors import JobError

Where = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN_DIR|URL]",
        help="A run folder, or the URL of a coordinator on another host; by default the elastic job that runs.",
        show_default=False,
    ),
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="The port on 127.0.0.1; 0 for any free one.")]


def page(where: Where = None, port: Port = 0, token_file: TokenFile = None, certificate: Trusted = None) -> None:
    """Show a job in a browser: who trains, its curves, and what happened; until Ctrl-C ends the page.

    The link that is printed opens once. Who has opened it may press buttons, and finds there a link to share with those
    who may only look.
    """
    from unisono.dashboard.serve import NICE, serve
    from unisono.dashboard.source import CoordinatorSource, FolderSource, RunSource
    from unisono.launch.elastic.address import Whereabouts, find_run

    source: RunSource
    if where is not None and where.lower().startswith(("http://", "https://")):
        source = CoordinatorSource(Whereabouts(where, token_file, certificate).address())
    else:
        source = FolderSource(_run_folder(find_run(None if where is None else Path(where))), certificate)
    with suppress(OSError):  # it stands back far already
        os.nice(NICE)
    serve(source, port, lambda link: typer.echo(f"{source.name}: {link} (opens once, within an hour; Ctrl-C ends it)"))


def _run_folder(path: Path) -> Path:
    if not path.is_dir():
        raise JobError(f"there is no run folder {path}: unisono run prints where it is when it starts")
    if not any((path / name).exists() for name in ("job.json", "journal.jsonl")):
        raise JobError(f"{path} is no run folder: it has neither job.json nor journal.jsonl")
    return path
