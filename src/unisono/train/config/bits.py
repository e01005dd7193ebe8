"""The bits that a machine computes: operations on fixed inputs, each with a digest of its result."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unisono.train.config.portable import KERNELS

_HASH = 2_654_435_761  # Knuth's multiplier: neighbours in a sequence become numbers that look drawn

Operation = Callable[[Callable[..., Tensor]], Tensor | tuple[Tensor, ...]]
"""Computes something from inputs of the shapes that it asks for."""


def bits_of(device: torch.device) -> Mapping[str, str]:
    """What the operations that trainings are made of compute here, with torch's switches as they are.

    Processors of one capability and different makers may compute other bits, and so may GPUs and drivers.

    Args:
        device: the device that computes.

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


def _digest(found: Tensor | tuple[Tensor, ...]) -> str:
    digest = hashlib.sha256()
    for each in (found,) if isinstance(found, Tensor) else found:
        digest.update(each.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]


def with_gradients(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    """What a function computes, and the gradients of the sum of its squares by its inputs."""
    leaves = [each.requires_grad_() for each in inputs]
    found = function(*leaves)
    return (found, *torch.autograd.grad(found.square().sum(), leaves))


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
    found: Tensor = torch.lstm(x, hidden, list(weights), True, 1, 0.0, True, False, False)[0]
    return found


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
"""By the name that a person knows."""
