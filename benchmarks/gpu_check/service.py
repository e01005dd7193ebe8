"""NVIDIA's multi-process service (MPS), in which processes use a device at the same time, and each a share of it."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

CONTROL = "nvidia-cuda-mps-control"


class NoService(Exception):
    """It cannot be started here; says why."""


@contextmanager
def multi_process_service() -> Iterator[dict[str, str]]:
    """The variables of the processes that use it; it lasts as long as the block, and has pipes of its own.

    Raises:
        NoService: it cannot be started here.
    """
    if shutil.which(CONTROL) is None:
        raise NoService(f"there is no {CONTROL}")
    with tempfile.TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as folder:
        variables = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        _told("-d", "", variables)
        try:
            yield variables
        finally:
            _told("", "quit\n", variables)


def _told(option: str, words: str, variables: dict[str, str]) -> None:
    command = [CONTROL, *([option] if option else [])]
    try:
        subprocess.run(
            command,
            env={**os.environ, **variables},
            input=words,
            text=True,
            check=True,
            timeout=20,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise NoService(f"{' '.join(command)} fails: {error}") from error
