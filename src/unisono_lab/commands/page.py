"""``unisono page``: a job in a browser, while it runs or afterwards."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from unisono.cli.completion import run_folders
from unisono.cli.options import TokenFile, Trusted
from unisono.errors import JobError
from unisono.host.parent_death import end_with_parent
from unisono.host.signals import ignore_notices


def page(
    where: Annotated[
        str | None,
        typer.Argument(
            autocompletion=run_folders,
            metavar="[RUN_DIR|URL]",
            help="A run folder, or the URL of a coordinator on another host; by default the elastic job that runs.",
            show_default=False,
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port on 127.0.0.1; 0 for any free one.")] = 0,
    token_file: TokenFile = None,
    certificate: Trusted = None,
    parent: Annotated[int | None, typer.Option(hidden=True, help="The launcher beside which this is the page.")] = None,
) -> None:
    """Show a job in a browser: who trains, its curves, and what happened; until Ctrl-C ends the page.

    The link that is printed opens once. Who has opened it may press buttons, and finds there a link to share with those
    who may only look.
    """
    from unisono.launch.elastic.address import Whereabouts, find_run
    from unisono_lab.page.app import NICE, serve
    from unisono_lab.page.source import CoordinatorSource, FolderSource, RunSource

    source: RunSource
    if parent is not None and where is not None:  # it reads the link from this process's output
        end_with_parent(parent)
        ignore_notices()
        source = FolderSource(Path(where))
    elif where is not None and where.lower().startswith(("http://", "https://")):
        source = CoordinatorSource(Whereabouts(where, token_file, certificate).address())
    else:
        source = FolderSource(_run_folder(find_run(None if where is None else Path(where))), certificate)
    with suppress(OSError):  # it stands back far already
        os.nice(NICE)
    told = "{}" if parent is not None else f"{source.name}: {{}} (opens once, within an hour; Ctrl-C ends it)"
    serve(source, port, lambda link: typer.echo(told.format(link)))


def _run_folder(path: Path) -> Path:
    if not path.is_dir():
        raise JobError(f"there is no run folder {path}: unisono run prints where it is when it starts")
    if not any((path / name).exists() for name in ("job.json", "journal.jsonl")):
        raise JobError(f"{path} is no run folder: it has neither job.json nor journal.jsonl")
    return path
