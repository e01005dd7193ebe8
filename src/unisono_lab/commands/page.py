"""``unisono page``: a job in a browser, while it runs or afterwards."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from unisono.cli.options import TokenFile, Trusted, run_folders
from unisono.errors import JobError
from unisono.host.process import end_with_parent, ignore_notices


def page(
    where: Annotated[
        str | None,
        typer.Argument(
            autocompletion=run_folders,
            metavar="[RUN_DIR|URL]",
            help="A run folder, or the URL of a coordinator on another host; by default the running elastic job.",
            show_default=False,
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port on 127.0.0.1; 0 for any free port.")] = 0,
    token_file: TokenFile = None,
    certificate: Trusted = None,
    parent: Annotated[int | None, typer.Option(hidden=True, help="The launcher beside which this is the page.")] = None,
) -> None:
    """Show a job in a browser: its workers, curves and events.

    The printed link opens once. The person who opens it may press buttons, and finds a link on the page to share with
    people who may only look.
    """
    from unisono.launch.elastic.address import Whereabouts, find_run
    from unisono_lab.page.curves import CoordinatorSource, FolderSource, RunSource
    from unisono_lab.page.page_server import NICE, serve

    source: RunSource
    if parent is not None and where is not None:  # the launcher reads the link from this process's output
        end_with_parent(parent)
        ignore_notices()
        source = FolderSource(Path(where))
    elif where is not None and where.lower().startswith(("http://", "https://")):
        source = CoordinatorSource(Whereabouts(where, token_file, certificate).address())
    else:
        source = FolderSource(_run_folder(find_run(None if where is None else Path(where))), certificate)
    with suppress(OSError):  # its niceness is high enough already
        os.nice(NICE)
    message = "{}" if parent is not None else f"{source.name}: {{}} (opens once, within an hour; Ctrl-C ends the page)"
    serve(source, port, lambda link: typer.echo(message.format(link)))


def _run_folder(path: Path) -> Path:
    if not path.is_dir():
        raise JobError(f"there is no run folder {path}: unisono run prints its path when it starts")
    if not any((path / name).exists() for name in ("job.json", "journal.jsonl")):
        raise JobError(f"{path} is no run folder: it has neither job.json nor journal.jsonl")
    return path
