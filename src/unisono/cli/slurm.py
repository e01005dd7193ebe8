"""``unisono slurm``: write the script of a Slurm job that trains, and submit it."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from unisono.cli.options import Offered, grouped, opt, read_workers
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


@dataclass(frozen=True, slots=True)
class SlurmOptions:
    """The options of a job of Slurm."""

    time: Annotated[str, opt(metavar="TIME")]
    """The time limit, as Slurm takes it: 00:30:00 or 1-12:00:00."""
    nodes: Annotated[str, opt(metavar="N|N-M")] = "1"
    """The number of nodes; from N to M, as many as are free at each start."""
    gpus: Annotated[int, opt()] = 0
    """The number of GPUs of each node; each GPU gets one worker."""
    workers_per_node: Annotated[int | None, opt()] = None
    """Without GPUs: the number of workers on each node."""
    cores: Annotated[int | None, opt("--cores-per-gpu", "--cores-per-worker")] = None
    """CPU cores for each worker; by default as many as the cluster gives."""
    account: Annotated[str | None, opt()] = None
    """The account to charge."""
    partition: Annotated[str | None, opt()] = None
    """The partition to run in."""
    job_name: Annotated[str | None, opt()] = None
    """The name of the job; by default the script's."""
    load: Annotated[list[str] | None, opt("--module")] = None
    """Load this environment module first; repeat for more."""
    more: Annotated[list[str] | None, opt("--sbatch", metavar="NAME=VALUE")] = None
    """Another option of sbatch; repeat for more."""
    workers: Annotated[str | None, opt(metavar="N,N,…")] = None
    """Write a job array, with one element for each of these numbers of workers."""
    is_module: Annotated[bool, opt("-m")] = False
    """SCRIPT is the name of a Python module."""
    python: Annotated[str, opt()] = sys.executable
    """The Python interpreter; by default the one that runs this command."""
    runs: Annotated[Path, opt(metavar="FOLDER")] = RUNS
    """The folder in which run folders are made."""
    requeues: Annotated[int, opt()] = REQUEUES
    """The number of times that a preempted job is started again."""
    output: Annotated[Path | None, opt("-o", "--output", metavar="FILE")] = None
    """Write the script into this file, not to the terminal."""
    send: Annotated[bool, opt("--submit")] = False
    """Submit the script with sbatch."""


@grouped
def slurm(
    script: Annotated[str, typer.Argument(help="The script to train with; a module's name with -m.", metavar="SCRIPT")],
    args: Words = None,
    *,
    own: SlurmOptions,
    options: Annotated[Settings, Offered(("checkpoints.every", "arithmetic.numerics"))],
) -> None:
    """Write the script of a Slurm job that trains: unisono slurm train.py --time 00:30:00 --gpus 4 -- --its-own flags.

    It starts one worker for each GPU, asks them for a checkpoint before the time is over or when the job has to make
    room, and goes on from there when Slurm starts it again.
    """
    study, words = split_words(args or ())
    target = Script(script, () if study else words, is_module=own.is_module)
    target.require_readable()
    least, most = read_nodes(own.nodes)
    job = BatchJob(
        script=target,
        allocation=Allocation(
            own.time,
            most,
            own.gpus,
            own.workers_per_node,
            own.cores,
            own.account,
            own.partition,
            tuple(own.more or ()),
            least_nodes=least,
        ),
        name=target.stem if own.job_name is None else own.job_name,
        folder=_here(),
        python=own.python,
        workers=() if own.workers is None else read_workers(own.workers),
        study_words=words if study else None,
        modules=tuple(own.load or ()),
        runs=own.runs,
        requeues=own.requeues,
        options=options,
    )
    text = text_of(job, ["unisono", *sys.argv[1:]])
    require_valid(text)
    if own.output is not None:
        write(text, own.output)
        typer.echo(f"written: {own.output}")
    if own.send:
        typer.echo(submit(text, own.output))
    elif own.output is None:
        sys.stdout.buffer.write(os.fsencode(text))


def _here() -> Path:
    try:
        return Path.cwd()
    except OSError as error:
        raise JobError(f"the working folder is gone: {error}") from error
