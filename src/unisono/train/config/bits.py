"""The bits that a machine computes, and how x86 processors of several makers and generations compute the same ones.

With the variables of :mod:`unisono.host.machine`, torch, oneDNN and MKL take the same path on each of them. What is
left are functions of MKL's vector library that begin with the processor's approximate reciprocal root, which makers
build otherwise, and oneDNN's LSTM. For these, other kernels stand in torch's dispatcher while a portable run is open.
Large matrix products go to oneDNN, which has no slow path for other makers' processors, as MKL has.
"""

import ctypes
import hashlib
import os
import platform
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from unisono.errors import JobError
from unisono.host.machine import AS_EXPORT, missing_portable_variables

Kernel = Callable[..., Any]

FLOATS = (torch.float32, torch.float64)
"""The dtypes that MKL's vector functions compute; torch's own code computes the others."""

LEAST_PRODUCT = 2**20
"""Multiplications from which on oneDNN computes a matrix product in less time than MKL does on its compatible path."""

_RUNS = {"CompositeImplicitAutograd": "AutogradCPU"}
"""For each key that stands for several keys, the key in whose place its kernel runs."""

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
    wrong = missing_portable_variables(environ)
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
    """The replaced operators, each with its dispatch key and a function that makes its kernel from torch's own."""
    kernels: list[tuple[str, str, Callable[[Kernel], Kernel]]] = [
        ("lstm.input", "CompositeImplicitAutograd", _without_onednn)
    ]
    for names, compute in OPERATORS:
        makers = _new(compute), _into_out(compute), _in_place(compute)
        kernels += [(name, "CPU", make) for name, make in zip(names, makers, strict=True) if name]
    return kernels


Compute = Callable[..., Tensor | None]
"""Computes what an operator does, without gradients; None to leave it to torch's kernel."""


def _new(compute: Compute) -> Callable[[Kernel], Kernel]:
    def make(original: Kernel) -> Kernel:
        def kernel(keys: Any, *args: Any, **more: Any) -> Any:
            result = compute(*args, **more)
            return original(keys, *args, **more) if result is None else result

        return kernel

    return make


def _into_out(compute: Compute) -> Callable[[Kernel], Kernel]:
    def make(original: Kernel) -> Kernel:
        def kernel(keys: Any, *args: Any, out: Tensor, **more: Any) -> Any:
            result = None if out.dtype not in FLOATS else compute(*args, **more)
            if result is None:
                return original(keys, *args, **more, out=out)
            return (out if out.shape == result.shape else out.resize_(result.shape)).copy_(result)

        return kernel

    return make


def _in_place(compute: Compute) -> Callable[[Kernel], Kernel]:
    def make(original: Kernel) -> Kernel:
        def kernel(keys: Any, this: Tensor, *args: Any, **more: Any) -> Any:
            result = compute(this, *args, **more)
            return original(keys, this, *args, **more) if result is None else this.copy_(result)

        return kernel

    return make


def _root(x: Tensor) -> Tensor:
    """Rounded correctly, as IEEE 754 has it: the processor's own instruction, which NumPy uses."""
    root = torch.empty_like(x)
    with np.errstate(all="ignore"):
        np.sqrt(x.detach().numpy(), out=root.numpy())
    return root


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
    """Multiply by oneDNN, on the path that its variable fixes, unless the product is small."""
    if a.dtype != torch.float32 or b.dtype != torch.float32 or a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        return None
    if a.shape[0] * a.shape[1] * b.shape[1] < LEAST_PRODUCT or a.layout != torch.strided or b.layout != torch.strided:
        return None
    product: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    return product


def _addmm(this: Tensor, a: Tensor, b: Tensor, *, beta: complex = 1, alpha: complex = 1) -> Tensor | None:
    if this.dtype != torch.float32 or this.ndim > 2 or (product := _mm(a, b)) is None:
        return None
    product = product if alpha == 1 else product.mul_(alpha)
    return product if beta == 0 else product.add_(this if beta == 1 else this * beta)


def _without_onednn(original: Kernel) -> Kernel:
    """Return an LSTM kernel that takes torch's own steps, without oneDNN."""

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

# Operations on fixed inputs, each with a digest of its result.

_HASH = 2_654_435_761  # Knuth's multiplier: neighbours in a sequence become numbers that look drawn

Operation = Callable[[Callable[..., Tensor]], Tensor | tuple[Tensor, ...]]
"""Computes something from inputs of the shapes that it asks for."""


def bits_of(device: torch.device) -> Mapping[str, str]:
    """Return the results of the operations that trainings consist of, with torch's switches as they are.

    Processors of one capability and different makers may compute other bits, and so may GPUs and drivers.

    Returns:
        a digest of 12 hexadecimal digits for each operation, by its name.
    """
    switches = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), KERNELS.are_in_place
    return _kept(str(device), *switches)


@cache
def _kept(device: str, threads: int, deterministic: bool, portable: bool) -> Mapping[str, str]:
    return computed(OPERATIONS, torch.device(device))


def computed(operations: Mapping[str, Operation], device: torch.device) -> dict[str, str]:
    """A digest of what each operation computes on a device, computed anew each time."""

    def draw(*shape: int) -> Tensor:
        return _numbers(shape).to(device)

    with torch.enable_grad():
        return {name: _digest(operation(draw)) for name, operation in operations.items()}


def _numbers(shape: tuple[int, ...]) -> Tensor:
    """From -0.5 to 0.5, alike on all machines: whole numbers, and one division by a power of two."""
    count = 1
    for size in shape:
        count *= size
    return (((torch.arange(1, count + 1) * _HASH) % 2**24).to(torch.float32) / 2**24 - 0.5).view(shape)


def _digest(result: Tensor | tuple[Tensor, ...]) -> str:
    digest = hashlib.sha256()
    for tensor in (result,) if isinstance(result, Tensor) else result:
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]


def with_gradients(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    """Return the result of a function, and the gradients of the sum of its squares by its inputs."""
    leaves = [tensor.requires_grad_() for tensor in inputs]
    result = function(*leaves)
    return (result, *torch.autograd.grad(result.square().sum(), leaves))


def _stepped(
    make: Callable[..., torch.optim.Optimizer], shapes: Sequence[tuple[int, ...]] = ((1003,), (17, 33)), **settings: Any
) -> Operation:
    def operation(draw: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        weights = [draw(*shape).requires_grad_() for shape in shapes]
        optimizer = make(weights, lr=0.01, **settings)
        for _ in range(3):
            for weight in weights:
                weight.grad = (weight * 1.25).detach()
            optimizer.step()
        return tuple(weights)

    return operation


def _drawn(draw: Callable[..., Tensor]) -> Tensor:
    device = draw(1).device
    return torch.randn(1003, generator=torch.Generator(device).manual_seed(0), device=device)


def _dropped(draw: Callable[..., Tensor]) -> Tensor:
    device = draw(1).device
    return torch.empty(1003, device=device).bernoulli_(0.9, generator=torch.Generator(device).manual_seed(0))


def _lstm(x: Tensor, *weights: Tensor) -> Tensor:
    hidden = [x.new_zeros(1, x.shape[1], weights[1].shape[1]) for _ in range(2)]
    output: Tensor = torch.lstm(x, hidden, list(weights), True, 1, 0.0, True, False, False)[0]
    return output


def _elementwise(function: Callable[[Tensor], Tensor]) -> Operation:
    return lambda draw: function(draw(4099) + 0.75)  # from 0.25 to 1.25, and no multiple of a vector's length


OPERATIONS: dict[str, Operation] = {
    "a matrix product": lambda draw: with_gradients(torch.matmul, draw(128, 300), draw(300, 64)),
    "a narrow matrix product": lambda draw: with_gradients(torch.matmul, draw(7, 129), draw(129, 33)),
    "a matrix times a vector": lambda draw: torch.mv(draw(257, 129), draw(129)),
    "a product of batches": lambda draw: with_gradients(torch.bmm, draw(6, 33, 40), draw(6, 40, 17)),
    "a large linear layer": lambda draw: with_gradients(F.linear, draw(64, 400), draw(200, 400), draw(200)),
    "a linear layer": lambda draw: with_gradients(F.linear, draw(32, 100), draw(10, 100), draw(10)),
    "a linear layer in bfloat16": lambda draw: F.linear(draw(32, 100).bfloat16(), draw(10, 100).bfloat16()),
    "a convolution": lambda draw: with_gradients(
        lambda x, w: F.conv2d(x, w, padding=1), draw(4, 3, 16, 16), draw(8, 3, 3, 3)
    ),
    "a convolution with stride": lambda draw: F.conv2d(draw(2, 8, 15, 15), draw(16, 8, 3, 3), stride=2),
    "a convolution by channel": lambda draw: F.conv2d(draw(2, 8, 12, 12), draw(8, 1, 3, 3), groups=8),
    "a convolution of sequences": lambda draw: F.conv1d(draw(3, 5, 40), draw(7, 5, 3)),
    "an LSTM": lambda draw: with_gradients(_lstm, draw(5, 3, 20), draw(64, 20), draw(64, 16), draw(64), draw(64)),
    "batch normalisation": lambda draw: with_gradients(
        lambda x: F.batch_norm(x, None, None, training=True), draw(8, 6, 9, 9)
    ),
    "layer normalisation": lambda draw: with_gradients(lambda x: F.layer_norm(x, (65,)), draw(20, 65)),
    "group normalisation": lambda draw: F.group_norm(draw(4, 8, 7, 7), 4),
    "attention": lambda draw: F.scaled_dot_product_attention(
        draw(2, 2, 19, 16), draw(2, 2, 19, 16), draw(2, 2, 19, 16)
    ),
    "softmax": lambda draw: with_gradients(lambda x: F.softmax(x, 1), draw(20, 101)),
    "cross-entropy": lambda draw: with_gradients(
        lambda x: F.cross_entropy(x, torch.arange(20, device=x.device) % 11), draw(20, 11)
    ),
    "a sum": lambda draw: draw(10_007).sum(),
    "sums of rows": lambda draw: draw(101, 103).sum(1),
    "sums of columns": lambda draw: draw(101, 103).sum(0),
    "a variance": lambda draw: draw(5003).var(),
    "a norm": lambda draw: torch.linalg.vector_norm(draw(5003)),
    "exp": _elementwise(torch.exp),
    "log": _elementwise(torch.log),
    "sqrt": _elementwise(torch.sqrt),
    "sqrt in float64": _elementwise(lambda x: x.double().sqrt()),
    "atan": _elementwise(torch.atan),
    "acos": _elementwise(lambda x: (x - 0.25).acos()),
    "rsqrt": _elementwise(torch.rsqrt),
    "pow": _elementwise(lambda x: x.pow(1.7)),
    "sin": _elementwise(torch.sin),
    "tanh": _elementwise(torch.tanh),
    "sigmoid": _elementwise(torch.sigmoid),
    "erf": _elementwise(torch.erf),
    "gelu": _elementwise(F.gelu),
    "random numbers": _drawn,
    "dropped elements": _dropped,
    "a step of SGD": _stepped(torch.optim.SGD, momentum=0.9, weight_decay=0.01),
    "a step of Adam": _stepped(torch.optim.Adam),
    "a step of AdamW": _stepped(torch.optim.AdamW),
    "a step of Muon": _stepped(torch.optim.Muon, ((17, 33),)),
    "a step of NAdam": _stepped(torch.optim.NAdam),
    "a step of RAdam": _stepped(torch.optim.RAdam),
    "a step of Adamax": _stepped(torch.optim.Adamax),
    "a step of Adadelta": _stepped(torch.optim.Adadelta),
    "a step of Adafactor": _stepped(torch.optim.Adafactor),
    "a step of Adagrad": _stepped(torch.optim.Adagrad),
    "a step of ASGD": _stepped(torch.optim.ASGD),
    "a step of RMSprop": _stepped(torch.optim.RMSprop, momentum=0.9),
    "a step of Rprop": _stepped(torch.optim.Rprop),
}
"""The operations, by the names that people know."""
