"""The command that goes on with a job which has left with a checkpoint: as it was typed, with its run folder."""

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path


def again(run_dir: Path, words: Sequence[str] | None = None) -> str:
    """The command for a shell: ``UNISONO_RUN_DIR=runs/a unisono run -n 2 train.py``.

    Args:
        run_dir: the run folder. It is not said again where the words name it.
        words: the command's words, from the interpreter on; by default those of this process.
    """
    typed = list(sys.orig_argv if words is None else words)
    if len(typed) > 1 and Path(typed[1]).name == "unisono":  # a script that pip has installed, started by its name
        is_found = shutil.which("unisono") == typed[1]
        typed = ["unisono" if is_found else typed[1], *typed[2:]]
    is_named = any(Path(word.removeprefix("--run-dir=")).absolute() == run_dir.absolute() for word in typed)
    return ("" if is_named else f"UNISONO_RUN_DIR={shlex.quote(str(run_dir))} ") + shlex.join(typed)
