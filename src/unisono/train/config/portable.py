"""The same bits on x86 processors of several makers and generations: what torch's kernels leave to the processor.

With the variables of :mod:`unisono.host.processor_paths`, torch, oneDNN and MKL take the same path on each of them.
What is left are functions of MKL's vector library that begin with the processor's approximate reciprocal root, which
makers build otherwise, and oneDNN's LSTM. For these, other kernels stand in torch's dispatcher while a portable run is
open. Large matrix products go to oneDNN, which has no slow path for other makers' processors, as MKL has.
"""

import ctypes
import os
import platform
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unisono.errors import JobError
from unisono.host.processor_paths import AS_EXPORT, missing_in

Kernel = Callable[..., Any]

FLOATS = (torch.float32, torch.float64)
"""The dtypes that MKL's vector functions compute; torch's own code computes the others."""

LEAST_PRODUCT = 2**20
"""Multiplications from which on oneDNN computes a matrix product in less time than MKL does on its compatible path."""

_RUNS = {"CompositeImplicitAutograd": "AutogradCPU"}
"""By a key that stands for several ones, the key at whose place its kernel runs."""

_MKL_BRANCH, _MKL_COMPATIBLE = 1, 3  # of MKL_CBWR_Get


def require_portable(device: torch.device, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse a portable run where its bits would not be portable.

    Raises:
        JobError: it computes on no x86 processor with AVX2, or torch was loaded with other settings; says what to do.
    """
    if device.type != "cpu":
        raise JobError(
            f"numerics='portable' is for processors, and this run computes on {device.type}: what a GPU computes "
            f"depends on its kind, driver and libraries. Use device='cpu', or leave it out and take GPUs of one kind"
        )
    if platform.machine() not in ("x86_64", "AMD64") or not torch.cpu._is_avx2_supported():
        raise JobError(
            f"numerics='portable' needs x86 processors with AVX2 on all hosts, and host {platform.node()} has another "
            f"({platform.machine()}): leave that host out"
        )
    wrong = missing_in(environ)
    if not wrong and (
        torch.backends.cpu.get_cpu_capability() != "AVX2" or _mkl_branch() not in (_MKL_COMPATIBLE, None)
    ):
        wrong = ["they were set after torch was loaded"]
    if wrong:
        raise JobError(
            f"numerics='portable': torch reads its settings when it is loaded, and they are others in this process "
            f"({'; '.join(wrong)}). Start with unisono run --numerics portable; for torchrun, srun or python, first "
            f"{AS_EXPORT}"
        )


def _mkl_branch() -> int | None:
    """The path that MKL has taken; None where it does not say."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return int(ctypes.CDLL(str(library)).mkl_serv_cbwr_get(_MKL_BRANCH))
    except (AttributeError, OSError):
        return None


class PortableKernels:
    """Other kernels for what differs between makers, in torch's dispatcher for the whole process."""

    def __init__(self) -> None:
        self._library: torch.library.Library | None = None

    @property
    def are_in_place(self) -> bool:
        """Whether they are in use."""
        return self._library is not None

    def put(self, wanted: bool) -> None:
        """Use them, or torch's own again."""
        if wanted and self._library is None:
            self._library = torch.library.Library("aten", "IMPL")
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Warning only once for all operators")  # that is what is wanted here
                for name, key, make in _replacements():
                    kernel = make(torch.library.get_kernel(f"aten::{name}", _RUNS.get(key, key)).call_boxed)
                    self._library.impl(name, kernel, key, with_keyset=True)
        elif not wanted and self._library is not None:
            self._library._destroy()
            self._library = None


KERNELS = PortableKernels()
"""Those of this process."""


def _replacements() -> list[tuple[str, str, Callable[[Kernel], Kernel]]]:
    """Each operator, its dispatch key, and what makes its kernel of torch's own."""
    found: list[tuple[str, str, Callable[[Kernel], Kernel]]] = [
        ("lstm.input", "CompositeImplicitAutograd", _without_onednn)
    ]
    for names, compute in OPERATORS:
        new, out, in_place = names
        found += [(new, "CPU", _new(compute)), (out, "CPU", _into_out(compute)), (in_place, "CPU", _in_place(compute))]
    return [(name, key, make) for name, key, make in found if name]


Compute = Callable[..., Tensor | None]
"""Computes what an operator does, without gradients; None to leave it to torch's kernel."""


def _new(compute: Compute) -> Callable[[Kernel], Kernel]:
    def make(original: Kernel) -> Kernel:
        def kernel(keys: Any, *args: Any, **more: Any) -> Any:
            found = compute(*args, **more)
            return original(keys, *args, **more) if found is None else found

        return kernel

    return make


def _into_out(compute: Compute) -> Callable[[Kernel], Kernel]:
    def make(original: Kernel) -> Kernel:
        def kernel(keys: Any, *args: Any, out: Tensor, **more: Any) -> Any:
            found = None if out.dtype not in FLOATS else compute(*args, **more)
            if found is None:
                return original(keys, *args, **more, out=out)
            return (out if out.shape == found.shape else out.resize_(found.shape)).copy_(found)

        return kernel

    return make


def _in_place(compute: Compute) -> Callable[[Kernel], Kernel]:
    def make(original: Kernel) -> Kernel:
        def kernel(keys: Any, this: Tensor, *args: Any, **more: Any) -> Any:
            found = compute(this, *args, **more)
            return original(keys, this, *args, **more) if found is None else this.copy_(found)

        return kernel

    return make


def _root(x: Tensor) -> Tensor:
    """Rounded correctly, as IEEE 754 has it: the processor's own instruction, which NumPy uses."""
    found = torch.empty_like(x)
    with np.errstate(all="ignore"):
        np.sqrt(x.detach().numpy(), out=found.numpy())
    return found


def _sqrt(x: Tensor) -> Tensor | None:
    return _root(x) if x.dtype in FLOATS else None


# Sleef, which torch has for the angle of two numbers, has one path for each kind of vector.
def _atan(x: Tensor) -> Tensor | None:
    return torch.atan2(x, x.new_ones(())) if x.dtype in FLOATS else None


def _asin(x: Tensor) -> Tensor | None:
    return torch.atan2(x, _root((1 - x) * (1 + x))) if x.dtype in FLOATS else None


def _acos(x: Tensor) -> Tensor | None:
    return torch.atan2(_root((1 - x) * (1 + x)), x) if x.dtype in FLOATS else None


def _pow(x: Tensor, exponent: complex) -> Tensor | None:
    return _root(x) if exponent == 0.5 and x.dtype in FLOATS else None


def _mm(a: Tensor, b: Tensor) -> Tensor | None:
    """By oneDNN, on the path that its variable fixes, unless the product is small."""
    if a.dtype != torch.float32 or b.dtype != torch.float32 or a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        return None
    if a.shape[0] * a.shape[1] * b.shape[1] < LEAST_PRODUCT or a.layout != torch.strided or b.layout != torch.strided:
        return None
    found: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    return found


def _addmm(this: Tensor, a: Tensor, b: Tensor, *, beta: complex = 1, alpha: complex = 1) -> Tensor | None:
    if this.dtype != torch.float32 or this.ndim > 2 or (product := _mm(a, b)) is None:
        return None
    product = product if alpha == 1 else product.mul_(alpha)
    return product if beta == 0 else product.add_(this if beta == 1 else this * beta)


def _without_onednn(original: Kernel) -> Kernel:
    """Of an LSTM, torch's own steps."""

    def kernel(keys: Any, *args: Any) -> Any:
        enabled: Any = torch.backends.mkldnn.enabled
        torch._C._set_mkldnn_enabled(False)
        try:
            return original(keys, *args)
        finally:
            torch._C._set_mkldnn_enabled(enabled)

    return kernel


OPERATORS: tuple[tuple[tuple[str, str, str], Compute], ...] = (
    (("sqrt", "sqrt.out", "sqrt_"), _sqrt),
    (("atan", "atan.out", "atan_"), _atan),
    (("asin", "asin.out", "asin_"), _asin),
    (("acos", "acos.out", "acos_"), _acos),
    (("pow.Tensor_Scalar", "pow.Tensor_Scalar_out", "pow_.Scalar"), _pow),
    (("mm", "mm.out", ""), _mm),
    (("addmm", "addmm.out", "addmm_"), _addmm),
)
"""The names of an operator that makes a tensor, writes into one, and changes its own; and what it computes."""
