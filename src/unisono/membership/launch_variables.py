"""The variables by which launchers tell workers their ranks, out of sight while a run is open."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, MutableMapping

NAMES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
    *("TORCHELASTIC_USE_AGENT_STORE",),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE"),
    *("SLURM_TASKS_PER_NODE", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    *("PMI_RANK", "PMI_SIZE", "PMIX_RANK", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
)
"""Whoever reads these starts process groups by itself, or takes its rank for the whole truth. What a script may want to
know of its job, such as SLURM_JOB_ID, is none of them."""


class LaunchVariables:
    """Hides them from the rest of a process, and puts them back.

    Args:
        environ: the variables of the process.
    """

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        self._environ = environ
        self._hidden: dict[str, str] = {}
        self._runs = 0
        self._lock = threading.Lock()

    def all(self) -> Mapping[str, str]:
        """All variables, also those that are hidden."""
        return {**self._hidden, **self._environ}

    def hide(self) -> Callable[[], None]:
        """Hide them for a run.

        Returns:
            what puts them back, once it was called for every run; a variable that was set meanwhile stays.
        """
        with self._lock:
            self._runs += 1
            self._hidden |= {name: self._environ.pop(name) for name in NAMES if name in self._environ}
        return self._show

    def _show(self) -> None:
        with self._lock:
            self._runs -= 1
            if self._runs:
                return
            for name, value in self._hidden.items():
                self._environ.setdefault(name, value)
            self._hidden = {}


OF_THIS_PROCESS = LaunchVariables(os.environ)
"""Those of this process, which all of its runs share."""
