"""The kinds of devices: the CPU, and the accelerator that torch offers. No other file names a kind.

All goes over ``torch.accelerator`` and the module that torch has for the kind, such as ``torch.cuda`` or ``torch.xpu``.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from time import perf_counter
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.errors import JobError
from unisono.received import LONGEST_SHOWN, short

NEEDED = ("is_available", "is_initialized", "get_rng_state", "set_rng_state", "manual_seed")
"""The functions that torch's module of a kind must have, so that the generators of its devices can be seeded."""

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")
"""The workspaces with which cuBLAS gives the same bits each time, according to its manual."""

SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
"""The share of a device that NVIDIA's multi-process service gives this process; kernels choose their grids by it."""

NCCL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""The variables that disable torch's watchdog of NCCL: it ends this process when another worker is lost. In elastic
jobs the others go on, and the coordinator finds workers that hang."""


# Which device.


def choose_device(name: str | int | torch.device | None, local_rank: int) -> torch.device:
    """The device of a worker: the named one, else an accelerator by local rank if there is one, else the CPU.

    If there are more workers than devices, several workers share a device.

    Raises:
        JobError: there is no such device, or it lacks what a run needs.
    """
    kind = torch.accelerator.current_accelerator(check_available=True)
    if name is None:
        name = kind or "cpu"
    try:
        device = torch.device(name)
    except (RuntimeError, ValueError) as error:
        raise JobError(f"device={short(name)}: {str(error).splitlines()[0][:LONGEST_SHOWN]}") from None
    if device.type == "meta":
        raise JobError("device='meta' computes nothing: use device='cpu', or leave it out")
    if not is_accelerator(device):
        return device
    if kind is None or device.type != kind.type:
        raise JobError(
            f"device={short(name)}: torch {torch.__version__} sees no device of this kind here; use device='cpu'"
        )
    _require_usable(device)
    index: int | None = device.index
    if index is not None and index >= device_count():
        raise JobError(f"device={short(name)}: this process sees {', '.join(names()[1:])}")
    return torch.device(device.type, local_rank % device_count() if index is None else index)


OF_HOST = ("cpu", "meta")
"""The kinds that are no accelerators."""


def is_accelerator(device: torch.device) -> bool:
    """Whether a device computes beside the host, in streams and memory of its own."""
    return device.type not in OF_HOST


def device_count() -> int:
    """The number of accelerators that this process sees."""
    return torch.accelerator.device_count()


def _require_usable(device: torch.device) -> None:
    missing = [name for name in NEEDED if not hasattr(torch.get_device_module(device), name)]
    try:
        torch.Stream(device=torch.device(device.type))
    except RuntimeError:
        missing.append("Stream")
    if missing:
        raise JobError(
            f"device={device.type}: torch {torch.__version__} has no {', '.join(missing)} for such devices, which "
            f"a run needs to seed its generators and to order its work; use device='cpu'"
        )


def use(device: torch.device, *, deterministic: bool) -> dict[str, str]:
    """Make a device this thread's current one. Returns the environment variables to set for its libraries.

    Raises:
        JobError: a variable that is set already allows other bits each time.
    """
    if not is_accelerator(device):
        return {}
    torch.accelerator.set_device_index(device)
    return variables_for(device.type, deterministic=deterministic)


def variables_for(kind: str, *, deterministic: bool) -> dict[str, str]:
    """The environment variables to set for the libraries of a kind of accelerator.

    Raises:
        JobError: a variable that is set already allows other bits each time.
    """
    if kind != "cuda" or not deterministic:
        return {}
    if (workspace := os.environ.get(WORKSPACE, DETERMINISTIC_WORKSPACES[0])) not in DETERMINISTIC_WORKSPACES:
        raise JobError(
            f"{WORKSPACE}={short(workspace)} lets cuBLAS give other bits each time: leave it unset, or set it to "
            f"{' or '.join(DETERMINISTIC_WORKSPACES)}"
        )
    return {WORKSPACE: DETERMINISTIC_WORKSPACES[0]}


def disable_nccl_watchdog(device: torch.device) -> None:
    """Have this process go on when another worker is lost: the others form a new generation."""
    for name, value in NCCL.items() if is_accelerator(device) else ():
        os.environ.setdefault(name, value)


def bits_of_device(device: torch.device) -> dict[str, Any]:
    """The facts of a device, its libraries and torch's switches that must agree for the bits of workers to agree."""
    facts: dict[str, Any] = {"device": _name(device), "attention kernels": _attention_kernels()}
    if not is_accelerator(device):
        return facts | {"float32 precision": _precisions("mkldnn")}
    module = torch.get_device_module(device)
    device_info = module.get_device_properties(device) if hasattr(module, "get_device_properties") else None
    fields = ("multi_processor_count", "gpu_eu_count", "total_memory", "driver_version")
    names_there = [name for name in fields if hasattr(device_info, name)]
    facts |= {f"device's {name.replace('_', ' ')}": getattr(device_info, name) for name in names_there}
    facts |= {"share of the device": os.environ.get(SHARE, "all"), "float32 precision": _precisions("cuda", "cudnn")}
    if device.type == "cuda":
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        facts |= {
            "toolkit": torch.version.cuda or torch.version.hip,
            "driver": getattr(torch._C, "_cuda_getDriverVersion", str)(),
            "cuDNN": f"{cudnn.version()}, enabled {cudnn.enabled}, benchmark {cudnn.benchmark}",
            "reduced precision": f"fp16 {matmul.allow_fp16_reduced_precision_reduction}, "
            f"bf16 {matmul.allow_bf16_reduced_precision_reduction}, fp16 sums {matmul.allow_fp16_accumulation}",
            WORKSPACE: os.environ.get(WORKSPACE, ""),
        }
    return facts


def _precisions(*backends: str) -> str:
    """The precision of the libraries for float32. Torch's older functions fail after a newer one was called."""
    precisions = {
        f"{backend}.{part}": getattr(getattr(getattr(torch.backends, backend), part, None), "fp32_precision", None)
        for backend in backends
        for part in ("matmul", "conv", "rnn")
    }
    return ", ".join(f"{name} {value}" for name, value in precisions.items() if value is not None)


def _attention_kernels() -> str:
    """The kernels of ``scaled_dot_product_attention`` that torch may choose, on any device."""
    switches = torch.backends.cuda
    kernels = {
        "flash": switches.flash_sdp_enabled(),
        "memory-efficient": switches.mem_efficient_sdp_enabled(),
        "math": switches.math_sdp_enabled(),
        "cuDNN": switches.cudnn_sdp_enabled(),
    }
    return ", ".join(name for name, is_on in kernels.items() if is_on)


def _name(device: torch.device) -> str:
    if not is_accelerator(device):
        return device.type
    get_name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(get_name(device)) if get_name else device.type


def described() -> list[str]:
    """The accelerators that this process sees, a line for each."""
    module = _built()
    return [] if module is None else [_described(module, index) for index in range(device_count())]


def _described(module: Any, index: int) -> str:
    if not hasattr(module, "get_device_properties"):
        return _name(torch.device(names()[1 + index]))
    properties = module.get_device_properties(index)
    capability = f", compute capability {properties.major}.{properties.minor}" if hasattr(properties, "major") else ""
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB{capability}"


def names() -> list[str]:
    """The names of this host's devices in torch, the CPU first."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    return ["cpu", *(f"{kind.type}:{index}" for index in range(device_count()))] if kind else ["cpu"]


def builds() -> dict[str, Any]:
    """The toolkits that this torch was built for, and its libraries."""
    has_nccl = dist.is_available() and dist.is_nccl_available() and hasattr(torch._C, "_nccl_version")
    nccl = torch.cuda.nccl.version() if has_nccl else None
    return {
        "nccl": None if nccl is None else ".".join(map(str, nccl)),
        "cuda build": torch.version.cuda,
        "hip build": torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
    }


def identity(device: torch.device) -> str:
    """A text that no other device has: two processes with the same text use the same device."""
    module: Any = torch.get_device_module(device) if is_accelerator(device) else None
    properties = module.get_device_properties(device) if hasattr(module, "get_device_properties") else None
    return str(getattr(properties, "uuid", f"{platform.node()} {device}"))


def supports_nccl(device: torch.device) -> bool:
    """Whether torch has NCCL for devices of this kind."""
    return dist.Backend.default_device_backend_map.get(device.type) == "nccl" and dist.is_nccl_available()


def nccl_shares_devices() -> bool:
    """Whether NCCL was asked to allow several workers on one device; versions without this variable refuse them."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def group_of(device: torch.device, workers: int) -> str:
    """The kind of process group for tensors on a device: ``nccl``, or ``gloo``, which goes through the host's memory.

    Args:
        device: the device of this worker.
        workers: the number of workers on this host. With NCCL each of them needs a device of its own.
    """
    return "nccl" if supports_nccl(device) and workers <= device_count() else "gloo"


def describe_reduction() -> str:
    """A sentence on how workers of this host would add up gradients."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return "through shared memory: there are CPUs only"
    if not supports_nccl(kind):
        return f"through the host's memory: torch has no NCCL for {kind.type}"
    return f"over NCCL where each worker has one of the {device_count()} devices, else through the host's memory"


# The random generator of the device that this process uses.


@cache
def _built() -> Any:
    kind = torch.accelerator.current_accelerator()
    return None if kind is None else torch.get_device_module(kind)


def in_use() -> Any:
    """Torch's module of the accelerator; None if this process has not used it yet."""
    module = _built()
    return module if module is not None and module.is_initialized() else None


def generator_checksum() -> int:
    """A checksum of the state of the device's generator, which changes when it is used; 0 if there is none."""
    module = in_use()
    return 0 if module is None else crc32(module.get_rng_state().numpy())


# Streams, and memory.


def new_stream(device: torch.device) -> Any:
    """A new stream of a device."""
    return torch.Stream(device=device)


def current_stream(device: torch.device) -> Any:
    """The stream of a device in which this thread works."""
    return torch.accelerator.current_stream(device)


class Handover:
    """A moment in the current stream of a device, for another stream to wait for. On the CPU there is nothing to do.

    Args:
        device: the device of the tensors that are handed over.
    """

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None if device.type in OF_HOST else current_stream(device).record_event()
        self.device = device

    def accept(self, *tensors: Tensor) -> None:
        """Have the current stream wait for that moment before its further work.

        Args:
            tensors: the tensors that the stream uses from now on. Their memory is reused only after that work.
        """
        if self._event is not None:
            stream = current_stream(self.device)
            stream.wait_event(self._event)
            for tensor in tensors:
                tensor.record_stream(stream)

    def wait(self) -> None:
        """Wait on the host for that moment."""
        if self._event is not None and not self._event.query():
            self._event.synchronize()


class StreamMoment:
    """A moment in the work of this thread: of the current stream, where it computes on a device.

    Args:
        device: the device of the worker.

    Attributes:
        host_s: the time at which it came for the host, which goes ahead of a device, by ``perf_counter``.
    """

    def __init__(self, device: torch.device) -> None:
        self.host_s = perf_counter()
        self._event: Any = None
        if device.type not in OF_HOST:
            self._event = torch.Event(device=device, enable_timing=True)
            self._event.record(current_stream(device))

    @property
    def is_over(self) -> bool:
        """Whether the device has come to it."""
        return self._event is None or bool(self._event.query())

    def seconds_to(self, later: StreamMoment) -> float:
        """The seconds to a later moment: by the device if it has come to that moment, else by the host."""
        if self._event is None or not later.is_over:
            return later.host_s - self.host_s
        return float(self._event.elapsed_time(later._event)) / 1000


def beside(device: torch.device) -> AbstractContextManager[Any]:
    """Work in a separate stream, beside the one that computes."""
    return nullcontext() if device.type in OF_HOST else in_stream(_stream(device))


@contextmanager
def in_stream(stream: Any) -> Iterator[None]:
    """Work in a stream on this thread; other threads may use the same stream."""
    before = current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


@cache
def _stream(device: torch.device) -> Any:
    return new_stream(device)


def page_locked(tensor: Tensor) -> Tensor:
    """The same values in page-locked memory, from which a copy to a device does not make the host wait."""
    return tensor if is_accelerator(tensor.device) or tensor.is_pinned() else tensor.pin_memory()


def sent_to(device: torch.device, tensor: Tensor) -> Tensor:
    """The same values on a device, or in the host's memory once the current stream was waited for."""
    if tensor.device == device:
        return tensor
    if is_accelerator(device):
        source = tensor if is_accelerator(tensor.device) else page_locked(tensor)
        return source.to(device, non_blocking=True)
    return torch.empty_like(tensor, device=device, pin_memory=True).copy_(tensor, non_blocking=True)


class HostRead:
    """Values on their way from a device to the host. One wait is enough for all reads that have begun.

    Args:
        values: the values. Those on a CPU must not change until they are read.
    """

    def __init__(self, values: Tensor) -> None:
        self._values, self._event = values.detach(), None
        if values.device.type not in OF_HOST:
            self._stream: Any = current_stream(values.device)
            self._values = sent_to(torch.device("cpu"), self._values)
            self._event = self._stream.record_event()

    def values(self) -> Tensor:
        """The values, in the host's memory."""
        if self._event is not None and not self._event.query():
            self._stream.synchronize()  # not the event: so that all reads that began later are complete, too
        return self._values

    def __float__(self) -> float:
        """The only value."""
        return float(self.values())


def wait_for(device: torch.device) -> None:
    """Wait until a device has done all of its work."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def peak_device_bytes(device: torch.device) -> int | None:
    """The most bytes of a device's memory that this process has held; None on the CPU, or if torch does not count."""
    count = getattr(torch.get_device_module(device), "max_memory_reserved", None) if is_accelerator(device) else None
    return None if count is None else int(count(device))
