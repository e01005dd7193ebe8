"""Commands that are given a URL before anything else: those that reach a job on another host."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

SCHEMES = ("http://", "https://")


class RemoteCommand(TyperCommand):
    """A command whose first word may be the coordinator's URL, though options follow it."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The URL comes first."""
        return ["[URL]", *super().collect_usage_pieces(ctx)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take the URL for an option, so that it ends none of the others."""
        if args and args[0].lower().startswith(SCHEMES):
            args = ["--url", *args]
        return super().parse_args(ctx, args)


Url = Annotated[
    str | None, typer.Option("--url", metavar="URL", help="Of a coordinator on another host; comes first.", hidden=True)
]
TokenFile = Annotated[
    Path | None, typer.Option(help="With URL: a copy of the file 'token' of the job's run folder.", show_default=False)
]
Trusted = Annotated[
    Path | None,
    typer.Option(
        "--certificate",
        help="With URL: a copy of its 'certificate.pem', or of the one that vouches for it.",
        show_default=False,
    ),
]
