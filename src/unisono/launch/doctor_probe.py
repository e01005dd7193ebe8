"""The doctor's probes that load torch, in a process of its own: that may crash, and the doctor goes on.

``python -m unisono.launch.doctor_probe facts`` prints PyTorch's version and devices as JSON. With the name of a backend
it is a worker that does one all-reduce with the others, and checks the sum: whether that backend really works here.
"""

import faulthandler
import json
import os
import platform
import sys
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist

from unisono.device import builds, describe_reduction, described, names
from unisono.errors import JobError
from unisono.host.machine import LEVEL
from unisono.train.config.bits import KERNELS, bits_of, require_portable

TIMEOUT_S = 30.0
LONGEST_S = 90.0


def main() -> None:
    """Print the facts, or do an all-reduce over the backend that the first argument names."""
    if sys.argv[1] == "facts":
        print(json.dumps(torch_facts()))  # noqa: T201
    else:
        all_reduce(sys.argv[1])


def all_reduce(backend: str) -> None:
    """Check the sum over all workers.

    Raises:
        ValueError: an unknown backend.
        ArithmeticError: the sum is wrong.
    """
    # Imported here, since a torch that is built without torch.distributed has facts all the same.
    from unisono.device import choose_device
    from unisono.membership.environment import recognise
    from unisono.membership.rendezvous import Generation, form_group, open_store
    from unisono.plan.split import Split

    faulthandler.dump_traceback_later(LONGEST_S, exit=True)  # a backend that hangs is a result too
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"{backend}: the backends are gloo and nccl")
    environment = recognise(os.environ)
    device = choose_device("cpu" if backend == "gloo" else None, environment.local_rank)
    store: Any = open_store(environment, TIMEOUT_S) if environment.world_size > 1 else dist.HashStore()
    generation = Generation(1, environment.rank, Split.even(environment.world_size, environment.world_size))
    _check_sum(form_group(store, generation, backend, TIMEOUT_S), environment.rank, environment.world_size, device)
    faulthandler.cancel_dump_traceback_later()


def _check_sum(group: Any, rank: int, workers: int, device: torch.device) -> None:
    tensor = torch.full((1024,), float(rank + 1), device=device)
    group.allreduce([tensor]).wait()
    expected = sum(range(1, workers + 1))
    if not bool((tensor == expected).all()):
        raise ArithmeticError(f"the sum over {workers} workers is {tensor[0]}, not {expected}")


def torch_facts() -> dict[str, Any]:
    """PyTorch's version and devices."""
    return {
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
        "gradients of workers": describe_reduction(),
        "numerics": (level := _level()),
        "bits": _bits(level),
    }


def _bits(level: str) -> dict[str, str]:
    """The digest of the bits that each device computes: it is the same on hosts of one kind."""
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
    """The level of numerics that the environment asks for; ``native``, and why, if this process cannot have it."""
    if os.environ.get(LEVEL) != "portable":
        return "native"
    try:
        require_portable(torch.device("cpu"))
    except JobError as error:
        return f"native, since {error}"
    return "portable"


if __name__ == "__main__":
    main()
