"""PyTorch's version and devices, as JSON on stdout. Runs in a process of its own: loading torch may crash."""

import json
import os
import platform
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist

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
        "nccl": _nccl(),
        "cuda build": torch.version.cuda,
        "hip build": torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "cuda devices": _devices(),
        "numerics": (level := _level()),
        "bits": _bits(level),
    }
    print(json.dumps(facts))  # noqa: T201


def _nccl() -> str | None:
    if not (dist.is_available() and dist.is_nccl_available()):
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def _bits(level: str) -> dict[str, str]:
    """By device, one digest of the bits that it computes: hosts of one kind have the same."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    KERNELS.put(level == "portable")
    graphics = torch.cuda.device_count() if level == "native" else 0
    devices = ["cpu", *(f"cuda:{number}" for number in range(graphics))]
    return {name: sha256(json.dumps(dict(bits_of(torch.device(name)))).encode()).hexdigest()[:12] for name in devices}


def _level() -> str:
    """The level of numerics that this environment asks for, as far as this process has it."""
    if os.environ.get(LEVEL) != "portable":
        return "native"
    try:
        require_portable(torch.device("cpu"))
    except JobError as error:
        return f"native, since {error}"
    return "portable"


def _devices() -> list[str]:
    return [_device(index) for index in range(torch.cuda.device_count())]


def _device(index: int) -> str:
    about = torch.cuda.get_device_properties(index)
    return f"{about.name}, {about.total_memory / 2**30:.0f} GiB, compute capability {about.major}.{about.minor}"


if __name__ == "__main__":
    main()
