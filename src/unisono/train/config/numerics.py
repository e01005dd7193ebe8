"""Torch as a job needs it: the device, the switches that decide bits, and both as a fingerprint."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache, wraps
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from unisono.device import bits_of_device, use
from unisono.errors import JobError
from unisono.host.machine import unpin_from_too_few_cores
from unisono.job import Job
from unisono.train.config.bits import KERNELS, require_portable

MOST_SHAPES = 64
"""How many shapes a function is compiled for, unless the script allows more. Torch allows 8."""


@dataclass(frozen=True, slots=True)
class Compilers:
    """The switches of torch's compilers.

    Attributes:
        dynamo: some of ``torch._dynamo.config``, by name.
        inductor: some of ``torch._inductor.config``, by name.
        profiles: whether TorchScript computes its first runs otherwise than those that follow. Of this thread.
        refuses: whether is refused what goes by what a process met before: kernels for several shapes, some stances.
    """

    dynamo: Mapping[str, Any]
    inductor: Mapping[str, Any]
    profiles: bool
    refuses: bool

    @classmethod
    def current(cls) -> Compilers:
        """The switches now."""
        dynamo, inductor = _configs()
        return cls(
            {name: getattr(dynamo, name) for name in _DYNAMO if hasattr(dynamo, name)},
            {name: getattr(inductor, name) for name in _INDUCTOR if hasattr(inductor, name)},
            torch._C._get_graph_executor_optimize(),
            _is_refused(),
        )

    def for_job(self, *, deterministic: bool) -> Compilers:
        """The switches that a job needs, in place of these."""
        most = max(MOST_SHAPES, self.dynamo["recompile_limit"])
        return Compilers(
            {name: {**_DYNAMO, "recompile_limit": most}[name] for name in self.dynamo},
            {name: deterministic or was for name, was in self.inductor.items()},
            profiles=False,
            refuses=True,
        )

    def apply(self) -> None:
        """Set torch's switches to these."""
        for config, values in zip(_configs(), (self.dynamo, self.inductor), strict=True):
            for name, value in values.items():
                setattr(config, name, value)
        torch._C._set_graph_executor_optimize(self.profiles)
        _refuse(self.refuses)


_DYNAMO: Mapping[str, Any] = {
    # Else the first shape that a process meets gets kernels of its own, and the second one makes kernels for all.
    "automatic_dynamic_shapes": False,
    "assume_static_by_default": True,
    # Else what is beyond the limit, or cannot be compiled on one host, is computed without compiler, without a word.
    "recompile_limit": MOST_SHAPES,
    "fail_on_recompile_limit_hit": True,
    "suppress_errors": False,
}
_INDUCTOR = ("deterministic",)  # it chooses kernels by no measurement


def _configs() -> tuple[Any, Any]:
    import torch._dynamo.config  # takes seconds to load, as every optimizer of torch does
    import torch._inductor.config

    return torch._dynamo.config, torch._inductor.config


# What the script asks of the compiler that would go by what a process met before.


@cache
def _refused_shape() -> type[Exception]:
    from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

    class DynamicShape(JobError, ConstraintViolationError):
        """A kernel for several shapes. The compiler hands on errors of its own kinds alone as they are."""

    return DynamicShape


def _shapes_apart(decide: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(decide)
    def refusing(tensor: Any, tx: Any, source: Any, *rest: Any, **named: Any) -> Any:
        decided = decide(tensor, tx, source, *rest, **named)
        kinds = getattr(decided, "dynamic_sizes", ())
        for size, kind in zip(tensor.size(), kinds, strict=False):
            # What an export says of shapes is for its user; and what is without a value has none that came first.
            if type(size) is int and kind.name in ("DYNAMIC", "DUCK") and not tx.output.export:
                raise _refused_shape()(
                    f"torch.compile: {source.name} is to be compiled for several shapes (dynamic=True, mark_dynamic). "
                    f"Such kernels are made for the shape that a process meets first, which depends on its shards and "
                    f"on where it resumed, so the same job could end in other bits: leave it out. In a run each shape "
                    f"is compiled for itself"
                )
        return decided

    return refusing


def _same_stance(choose: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(choose)
    def refusing(callback: Any) -> Any:
        from torch._dynamo import eval_frame

        stance = eval_frame._stance
        if stance.stance not in _STANCES or stance.skip_guard_eval_unsafe:
            what = f"set_stance({stance.stance!r}{', skip_guard_eval_unsafe=True' * stance.skip_guard_eval_unsafe})"
            raise JobError(
                f"torch.compiler.{what}: which kernel computes what would depend on the shapes that a process has "
                f"met before, that is on its shards and on where it resumed, so the same job could end in other bits: "
                f"leave it out, or use one of {', '.join(_STANCES)}"
            )
        return choose(callback)

    return refusing


_STANCES = ("default", "force_eager", "fail_on_recompile")
_DECISIONS: Mapping[tuple[str, str], Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    ("torch._dynamo.variables.builder", "_automatic_dynamic"): _shapes_apart,
    ("torch._dynamo.eval_frame", "_callback_from_stance"): _same_stance,
}


def _is_refused() -> bool:
    return any(hasattr(decide, "__wrapped__") for _, _, decide in _decisions())


def _refuse(wanted: bool) -> None:
    for module, name, decide in _decisions():
        is_refused = hasattr(decide, "__wrapped__")
        if wanted != is_refused:
            setattr(module, name, _DECISIONS[module.__name__, name](decide) if wanted else decide.__wrapped__)


def _decisions() -> Iterator[tuple[ModuleType, str, Any]]:
    for path, name in _DECISIONS:
        module = import_module(path)
        if (decide := getattr(module, name, None)) is not None:
            yield module, name, decide


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
    def current(cls) -> Numerics:
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

    def for_job(self, job: Job) -> Numerics:
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
    unpin_from_too_few_cores(job.threads)
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
