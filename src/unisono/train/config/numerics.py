"""Torch as a job needs it: the device, the switches that decide bits, and both as a fingerprint."""

import hashlib
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unisono.errors import JobError
from unisono.host.cgroup import leave_too_few_cores
from unisono.job import Job
from unisono.received import LONGEST_SHOWN, short
from unisono.train.config.portable import KERNELS, require_portable

_determinism: Any = torch.utils.deterministic  # a module that answers attributes by itself


@dataclass(frozen=True, slots=True)
class Numerics:
    """Torch's global switches, as they were, so that they can be put back."""

    threads: int
    deterministic: bool
    warn_only: bool
    fill_uninitialized: bool
    cudnn_benchmark: bool
    cudnn_deterministic: bool
    portable: bool = False

    @classmethod
    def current(cls) -> "Numerics":
        """The switches now."""
        return cls(
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            _determinism.fill_uninitialized_memory,
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
            KERNELS.are_in_place,
        )

    @classmethod
    def of(cls, job: Job) -> "Numerics":
        """The switches that a job needs."""
        # Filling fresh memory costs a pass over every new tensor and only serves programs that read it unset.
        portable = job.numerics == "portable"
        return cls(job.threads, job.deterministic, False, False, False, job.deterministic, portable)

    def apply(self) -> None:
        """Set torch's global switches to these."""
        torch.set_num_threads(self.threads)
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warn_only)
        _determinism.fill_uninitialized_memory = self.fill_uninitialized
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        torch.backends.cudnn.deterministic = self.cudnn_deterministic
        KERNELS.put(self.portable)


def choose_device(wanted: str | int | torch.device | None, local_rank: int) -> torch.device:
    """The device of a worker: the wanted one, else a GPU by local rank if there is one, else the CPU.

    Workers beyond the number of GPUs share them.

    Raises:
        JobError: there is no such device.
    """
    has_cuda: bool = torch.cuda.is_available()
    if wanted is None:
        wanted = "cuda" if has_cuda else "cpu"
    try:
        device = torch.device(wanted)
    except (RuntimeError, ValueError) as error:
        raise JobError(f"device={short(wanted)}: {str(error).splitlines()[0][:LONGEST_SHOWN]}") from None
    if device.type != "cuda":
        return device
    if not has_cuda:
        raise JobError(f"device={short(wanted)}: torch {torch.__version__} sees no CUDA device here; use device='cpu'")
    index: int | None = device.index
    return torch.device("cuda", local_rank % torch.cuda.device_count() if index is None else index)


def apply_numerics(job: Job, device: torch.device) -> Numerics:
    """Set torch up for a job; returns the switches as they were before.

    Raises:
        JobError: the job is portable, and this process is not.
    """
    if job.numerics == "portable":
        require_portable(device)
    before = Numerics.current()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if job.deterministic:
            # cuBLAS reads it when it is first used; without it, deterministic matrix products are refused.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    leave_too_few_cores(job.threads)
    Numerics.of(job).apply()
    return before


def fingerprint(job: Job, device: torch.device) -> dict[str, Any]:
    """Everything that workers must have in common for their bits to agree, field by field."""
    fields: dict[str, Any] = {f"job.{name}": value for name, value in job.model_dump(mode="json").items()}
    return fields | {
        "torch": str(torch.__version__),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "machine": platform.machine(),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "torch threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "default dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "oneDNN": torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled,
    }


def script_digest() -> str:
    """The sha256 of the script that runs, in hex; of nothing in an interactive session."""
    path = Path(getattr(sys.modules.get("__main__"), "__file__", None) or sys.argv[0] or "")
    return hashlib.sha256(path.read_bytes() if path.is_file() else b"").hexdigest()
