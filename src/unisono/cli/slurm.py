"""``unisono slurm``: write the script of a Slurm job that trains, and submit it."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from unisono.cli.options import Offered, grouped, read_workers
from unisono.errors import JobError
from unisono.launch.ending.result import RUNS
from unisono.launch.settings import Script
from unisono.launch.slurm.batch_job import REQUEUES, Allocation, BatchJob, read_nodes, split_words
from unisono.launch.slurm.batch_script import require_valid, submit, text_of, write
from unisono.settings.table import Settings

Words = Annotated[
    list[str] | None,
    typer.Argument(help="After --: the arguments of the script; or the word study, and its options.", metavar="ARGS"),
]
Time = Annotated[str, typer.Option(help="The time limit, as Slurm takes it: 00:30:00 or 1-12:00:00.", metavar="TIME")]
Cores = Annotated[
    int | None,
    typer.Option(
        "--cores-per-gpu",
        "--cores-per-worker",
        help="CPU cores for each worker; by default as many as the cluster gives.",
    ),
]
Modules = Annotated[
    list[str] | None, typer.Option("--module", help="Load this environment module first; repeat for more.")
]
More = Annotated[
    list[str] | None,
    typer.Option("--sbatch", metavar="NAME=VALUE", help="Another option of sbatch; repeat for more."),
]
Workers = Annotated[
    str | None,
    typer.Option(metavar="N,N,…", help="Write a job array, with one element for each of these numbers of workers."),
]
Interpreter = Annotated[
    str, typer.Option(help="The Python interpreter; by default the one that runs this command.", show_default=False)
]
Output = Annotated[
    Path | None,
    typer.Option("-o", "--output", metavar="FILE", help="Write the script into this file, not to the terminal."),
]


@grouped
def slurm(
    script: Annotated[str, typer.Argument(help="The script to train with; a module's name with -m.", metavar="SCRIPT")],
    time: Time,
    args: Words = None,
    nodes: Annotated[
        str, typer.Option(metavar="N|N-M", help="The number of nodes; from N to M, as many as are free at each start.")
    ] = "1",
    gpus: Annotated[int, typer.Option(help="The number of GPUs of each node; each GPU gets one worker.")] = 0,
    workers_per_node: Annotated[
        int | None, typer.Option(help="Without GPUs: the number of workers on each node.")
    ] = None,
    cores: Cores = None,
    account: Annotated[str | None, typer.Option(help="The account to charge.")] = None,
    partition: Annotated[str | None, typer.Option(help="The partition to run in.")] = None,
    job_name: Annotated[str | None, typer.Option(help="The name of the job; by default the script's.")] = None,
    load: Modules = None,
    more: More = None,
    workers: Workers = None,
    is_module: Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a Python module.")] = False,
    python: Interpreter = sys.executable,
    runs: Annotated[Path, typer.Option(metavar="FOLDER", help="The folder in which run folders are made.")] = RUNS,
    *,
    options: Annotated[Settings, Offered(("checkpoints.every", "arithmetic.numerics"))],
    requeues: Annotated[
        int, typer.Option(help="The number of times that a preempted job is started again.")
    ] = REQUEUES,
    output: Output = None,
    send: Annotated[bool, typer.Option("--submit", help="Submit the script with sbatch.")] = False,
) -> None:
    """Write the script of a Slurm job that trains: unisono slurm train.py --time 00:30:00 --gpus 4 -- --its-own flags.

    It starts one worker for each GPU, asks them for a checkpoint before the time is over or when the job has to make
    room, and goes on from there when Slurm starts it again.
    """
    study, words = split_words(args or ())
    target = Script(script, () if study else words, is_module=is_module)
    target.require_readable()
    least, most = read_nodes(nodes)
    job = BatchJob(
        script=target,
        allocation=Allocation(
            time, most, gpus, workers_per_node, cores, account, partition, tuple(more or ()), least_nodes=least
        ),
        name=target.stem if job_name is None else job_name,
        folder=_here(),
        python=python,
        workers=() if workers is None else read_workers(workers),
        study_words=words if study else None,
        modules=tuple(load or ()),
        runs=runs,
        requeues=requeues,
        options=options,
    )
    text = text_of(job, ["unisono", *sys.argv[1:]])
    require_valid(text)
    if output is not None:
        write(text, output)
        typer.echo(f"written: {output}")
    if send:
        typer.echo(submit(text, output))
    elif output is None:
        sys.stdout.buffer.write(os.fsencode(text))


def _here() -> Path:
    try:
        return Path.cwd()
    except OSError as error:
        raise JobError(f"the working folder is gone: {error}") from error
