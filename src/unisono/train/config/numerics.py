"""Torch as a job needs it: the device, the switches that decide bits, and both as a fingerprint."""

import hashlib
import os
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from unisono.device import bits_of_device, use
from unisono.host.cgroup import leave_too_few_cores
from unisono.job import Job
from unisono.train.config.compilers import Compilers
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
    portable: bool
    compilers: Compilers

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
            Compilers.current(),
        )

    def for_job(self, job: Job) -> "Numerics":
        """The switches that a job needs, in place of these."""
        # Filling fresh memory costs a pass over every new tensor and only serves programs that read it unset.
        portable, compilers = job.numerics == "portable", self.compilers.for_job(deterministic=job.deterministic)
        return Numerics(job.threads, job.deterministic, False, False, False, job.deterministic, portable, compilers)

    def apply(self) -> None:
        """Set torch's global switches to these."""
        torch.set_num_threads(self.threads)
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warn_only)
        _determinism.fill_uninitialized_memory = self.fill_uninitialized
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        torch.backends.cudnn.deterministic = self.cudnn_deterministic
        KERNELS.put(self.portable)
        self.compilers.apply()


def apply_numerics(job: Job, device: torch.device) -> Numerics:
    """Set torch up for a job; returns the switches as they were before.

    Raises:
        JobError: the job is portable, and this process is not.
    """
    if job.numerics == "portable":
        require_portable(device)
    before = Numerics.current()
    for name, value in use(device, deterministic=job.deterministic).items():
        os.environ.setdefault(name, value)
    leave_too_few_cores(job.threads)
    before.for_job(job).apply()
    return before


def autocast(job: Job, device: torch.device) -> torch.autocast:
    """The context in which forward passes of a job are computed."""
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return torch.autocast(device.type, narrow.get(job.precision, torch.bfloat16), enabled=job.precision in narrow)


def fingerprint(job: Job, device: torch.device) -> dict[str, Any]:
    """Everything that workers must have in common for their bits to agree, field by field."""
    fields: dict[str, Any] = {f"job.{name}": value for name, value in asdict(job).items()}
    return (
        fields
        | bits_of_device(device)
        | {
            "torch": str(torch.__version__),
            "machine": platform.machine(),
            "cpu capability": torch.backends.cpu.get_cpu_capability(),
            "torch threads": torch.get_num_threads(),
            "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
            "default dtype": str(torch.get_default_dtype()).removeprefix("torch."),
            "oneDNN": torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled,
        }
    )


def script_digest() -> str:
    """The sha256 of the script that runs, in hex; of nothing in an interactive session."""
    path = Path(getattr(sys.modules.get("__main__"), "__file__", None) or sys.argv[0] or "")
    return hashlib.sha256(path.read_bytes() if path.is_file() else b"").hexdigest()
