"""The script of a Slurm job: written from a template, checked by bash, and given to sbatch."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from unisono.errors import FIRST_SIGNAL, PREEMPTED, JobError, LaunchError
from unisono.launch.slurm.batch_job import BatchJob, shell_word

TEMPLATE = Path(__file__).with_suffix(".sh.j2")

MARK = "written by: "
"""How the second line begins: a file with it may be written anew."""

INTERRUPTED = FIRST_SIGNAL + signal.SIGTERM
"""Exit code of what SIGTERM ends: a study, which keeps what it has measured; a worker that still loads torch."""

PATIENCE_S = 120.0
"""For sbatch, which waits when the cluster is busy."""


def text_of(job: BatchJob, command: Sequence[str]) -> str:
    """The text of a batch script.

    Args:
        job: the job that the script starts.
        command: the command that asked for the script, for the person who reads it.

    Raises:
        JobError: the job cannot work, or jinja2 is not installed.
    """
    job.check()
    if find_spec("jinja2") is None:
        raise JobError(
            "unisono slurm needs jinja2, which is not installed: pip install '.[study]' in a clone of Unisono"
        )
    from jinja2 import Environment, StrictUndefined

    shell = Environment(trim_blocks=True, undefined=StrictUndefined, autoescape=False)  # noqa: S701 (it is no HTML)
    shell.filters["word"] = lambda value: shell_word(str(value))
    template = shell.from_string(TEMPLATE.read_text(encoding="utf-8"))
    made_by = " ".join(map(shell_word, command))
    asked_to_leave = INTERRUPTED if job.study else PREEMPTED
    rendered: str = template.render(
        job=job, mark=MARK, made_by=made_by, asked_to_leave=asked_to_leave, interrupted=INTERRUPTED
    )
    return rendered + "\n"


def require_valid(script: str) -> None:
    """Have bash read a script without running it.

    Raises:
        LaunchError: bash does not understand it, or there is no bash.
    """
    try:
        read = subprocess.run(
            ["bash", "-n"],  # noqa: S607 (the one that Slurm will find)
            input=os.fsencode(script),
            capture_output=True,
            timeout=PATIENCE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"the script cannot be checked with bash -n: {error}") from error
    if read.returncode != 0:
        raise LaunchError(f"bash does not understand the script: {_said(read.stderr)}")


def write(script: str, path: Path) -> None:
    """Write a script into a file: a new one, or one that was written so before.

    Raises:
        JobError: the file is another's, or cannot be written.
    """
    try:
        if path.exists() and not _is_ours(path):
            raise JobError(f"{path} is there already, and unisono slurm did not write it: name another file")
        path.write_bytes(os.fsencode(script))
    except OSError as error:
        raise JobError(f"{path} cannot be written: {error.strerror}") from error


def _is_ours(path: Path) -> bool:
    with path.open("rb") as file:
        return file.readline() == b"#!/bin/bash\n" and file.readline().startswith(f"# {MARK}".encode())


def submit(script: str, path: Path | None) -> str:
    """Give a script to sbatch.

    Args:
        script: the text of the script, which sbatch gets if there is no file of it.
        path: the path of the script's file, if there is one.

    Returns:
        what sbatch said.

    Raises:
        LaunchError: there is no sbatch here, it refused, or it did not answer.
    """
    command = ["sbatch", *([] if path is None else [str(path.absolute())])]
    try:
        done = subprocess.run(
            command,
            input=os.fsencode(script) if path is None else b"",
            capture_output=True,
            timeout=PATIENCE_S,
            check=False,
        )
    except FileNotFoundError:
        raise LaunchError(
            "there is no sbatch here: --submit needs a host of the cluster from which jobs are submitted. "
            "Without --submit the script is written, and sbatch can be given it there"
        ) from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"sbatch could not be asked: {error}") from error
    if done.returncode != 0:
        raise LaunchError(f"sbatch refused (exit code {done.returncode}): {_said(done.stderr) or _said(done.stdout)}")
    return _said(done.stdout)


def _said(output: bytes) -> str:
    return output.decode(errors="backslashreplace").strip()
