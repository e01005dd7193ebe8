"""Programs that tests run to their end; `unisono` commands inside of `warm_jobs` begin at once."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from forks.commands import start


def completed(
    *words: object,
    timeout: float,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    is_merged: bool = False,
) -> "subprocess.CompletedProcess[str]":
    """Run ``unisono WORDS``, as ``subprocess.run`` does.

    Args:
        words: the command, and its arguments.
        timeout: seconds.
        cwd: its working folder.
        env: its variables; by default those of this process.
        is_merged: whether what it writes to its errors stands in its output.
    """
    with TemporaryFile() as out, TemporaryFile() as err:
        errors = subprocess.STDOUT if is_merged else err
        process = start(*map(str, words), cwd=cwd, env=os.environ if env is None else env, stdout=out, stderr=errors)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
            process.wait()
        return subprocess.CompletedProcess(process.args, code, _text(out), _text(err))


def python(
    *words: object,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 110.0,
    is_merged: bool = False,
    **variables: str,
) -> "subprocess.CompletedProcess[str]":
    """Run ``python WORDS``, a program of its own, to its end.

    Args:
        words: options of Python, and a script with its arguments.
        cwd: its working folder.
        env: its variables; by default those of this process.
        timeout: seconds.
        is_merged: whether what it writes to its errors stands in its output.
        variables: more of its variables.
    """
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env={**(os.environ if env is None else env), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if is_merged else subprocess.PIPE,
        text=True,
        timeout=timeout,
        check=False,
    )


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="backslashreplace")
