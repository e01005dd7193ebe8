"""The options that several commands have in common, each declared once."""

from typing import Annotated

import typer

Module = Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module.")]
Shards = Annotated[
    int | None, typer.Option(envvar="UNISONO_SHARDS", help="Shards of the job, unless the script sets them.")
]
Threads = Annotated[
    int | None, typer.Option(envvar="UNISONO_THREADS", help="Threads per worker, unless the script sets them.")
]
Tuned = Annotated[
    bool,
    typer.Option(
        "--tuning/--no-tuning",
        envvar="UNISONO_TUNING",
        help="Have the workers' memory allocator keep what it has; --dry-run and doctor show how.",
    ),
]
