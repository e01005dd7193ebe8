"""PyTorch's version and devices, as JSON on stdout. Runs in a process of its own: loading torch may crash."""

import json
import os
import platform
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist

from unisono.device import builds, described, names, way_of_sums
from unisono.errors import JobError
from unisono.host.processor_paths import LEVEL
from unisono.train.config.bits import bits_of
from unisono.train.config.portable import KERNELS, require_portable


def main() -> None:
    """Print the facts."""
    facts: dict[str, Any] = {
        "version": torch.__version__,
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "interop threads": torch.get_num_interop_threads(),
        "machine": platform.machine(),
        "mkl": torch.backends.mkl.is_available(),
        "onednn": torch.backends.mkldnn.is_available(),
        "gloo": dist.is_available() and dist.is_gloo_available(),
        **builds(),
        "devices": described(),
        "gradients of workers": way_of_sums(),
        "numerics": (level := _level()),
        "bits": _bits(level),
    }
    print(json.dumps(facts))  # noqa: T201


def _bits(level: str) -> dict[str, str]:
    """By device, one digest of the bits that it computes: hosts of one kind have the same."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    KERNELS.put(level == "portable")
    devices = names() if level == "native" else ["cpu"]
    return {name: _digest(torch.device(name)) for name in devices}


def _digest(device: torch.device) -> str:
    try:
        return sha256(json.dumps(dict(bits_of(device))).encode()).hexdigest()[:12]
    except (NotImplementedError, RuntimeError) as error:  # a device that lacks an operation
        return f"fails: {str(error).splitlines()[0]}"


def _level() -> str:
    """The level of numerics that this environment asks for, as far as this process has it."""
    if os.environ.get(LEVEL) != "portable":
        return "native"
    try:
        require_portable(torch.device("cpu"))
    except JobError as error:
        return f"native, since {error}"
    return "portable"


if __name__ == "__main__":
    main()
