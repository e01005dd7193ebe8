"""The layers that K-FAC knows, and how the two factors of each are added up in a backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from unisono.errors import ModelError
from unisono.train.model.slices import is_sliced

KNOWN = (nn.Linear, nn.Conv2d)
"""Classes with a rule. Subclasses may compute something else."""


@dataclass(eq=False)
class KnownLayer:
    """A layer with two factors: A of what goes in, and G of the gradient at what comes out.

    The backward pass leaves in ``grad`` of each of the following its sum, where a is what goes in (a patch of it, with
    a 1 for the bias), and g is the gradient of the loss, as the backward pass has it. Calls of a layer in one pass
    count like positions.

    Attributes:
        name: the name of the module.
        module: the module.
        inputs: Σ a aᵀ over samples and positions. Shape (n, n).
        outputs: Σ g gᵀ, likewise. Shape (m, m).
        counts: the number of all a, and that of samples. Shape (2,).
    """

    name: str
    module: nn.Linear | nn.Conv2d
    inputs: Tensor
    outputs: Tensor
    counts: Tensor
    _newest_pass: tuple[int, int] = field(default=(-1, 0), init=False)

    @classmethod
    def of(cls, name: str, module: nn.Linear | nn.Conv2d) -> KnownLayer:
        """A layer without sums."""
        weight, has_bias = module.weight, _trains_bias(module)
        rows, columns = weight.shape[0], weight[0].numel() + has_bias
        dtype = weight.dtype if weight.dtype.itemsize >= 4 else torch.float32
        shapes = (columns, columns), (rows, rows), (2,)
        made = (torch.zeros(shape, dtype=dtype, device=weight.device, requires_grad=True) for shape in shapes)
        return cls(name, module, *made)

    @property
    def parameters(self) -> list[Tensor]:
        """The weight, and the bias if it is trained."""
        bias = self.module.bias
        return [self.module.weight, bias] if _trains_bias(self.module) and bias is not None else [self.module.weight]

    @property
    def sums(self) -> dict[str, Tensor]:
        """What backward passes leave, by name; where the weights are."""
        if self.counts.device != (device := self.module.weight.device):  # the model has been moved
            own = self.inputs, self.outputs, self.counts
            self.inputs, self.outputs, self.counts = (one.detach().to(device).requires_grad_() for one in own)
        return {
            f"inputs of {self.name}": self.inputs,
            f"outputs of {self.name}": self.outputs,
            f"counts of {self.name}": self.counts,
        }

    @property
    def gradient(self) -> Tensor | None:
        """The gradient as a matrix, with that of the bias as its last column. Shape (m, n)."""
        found = [one.grad for one in self.parameters]
        if any(one is None for one in found):
            return None
        return torch.cat([one.to(self.inputs.dtype).reshape(len(one), -1) for one in found if one is not None], 1)

    def cut(self, matrix: Tensor) -> list[Tensor]:
        """Copies of the parts of a matrix like the gradient that belong to each parameter, in its shape."""
        own = self.parameters
        parts = matrix.split([one[0].numel() for one in own], 1)
        return [
            part.reshape(one.shape).to(one.dtype, copy=True, memory_format=torch.contiguous_format)
            for part, one in zip(parts, own, strict=True)
        ]

    def factor(self, number: int) -> Tensor | None:
        """A (0) or G (1) by the mean over the step's samples; None if no sample has come by.

        Where the loss is a mean over the samples, g has been divided by their number once, and whoever adds up divides
        everything by some weight. Both drop out of A = inputs / counts[0] and G = outputs · counts[1].
        """
        total, counts = (self.inputs, self.outputs)[number].grad, self.counts.grad
        if total is None or counts is None:
            return None
        return total / counts[0] if number == 0 else total * counts[1]

    def forget(self) -> None:
        """The sums are used."""
        for one in self.sums.values():
            one.grad = None

    def listen(self, is_due: Callable[[], bool]) -> Any:
        """Have each backward pass add to the sums. Returns the handle of the hook."""
        return self.module.register_forward_hook(_Listener(self, is_due), with_kwargs=True)

    @torch.no_grad()
    def sums_of(self, found: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What a call adds to the sums, given what has gone in and the gradient at what has come out."""
        rows, samples = self.rows_of_inputs(found.detach())
        others = self.rows_of_outputs(gradient.detach())
        counts = float(len(rows)), float(self._new_samples(samples))
        return rows.T @ rows, others.T @ others, self.counts.new_tensor(counts)

    def _new_samples(self, samples: int) -> int:
        """How many of the samples of a call have not been counted for another one in the same backward pass."""
        newest, counted = self._newest_pass
        current = torch._C._current_graph_task_id()
        if current != newest:
            counted = 0
        self._newest_pass = current, max(counted, samples)
        return max(0, samples - counted)

    def rows_of_inputs(self, found: Tensor) -> tuple[Tensor, int]:
        """What goes in, as rows a, and the number of samples that it has."""
        module = self.module
        if isinstance(module, nn.Conv2d):
            found = found if found.dim() == 4 else found[None]
            mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
            padded = F.pad(found, module._reversed_padding_repeated_twice, mode)
            patches = F.unfold(padded, module.kernel_size, module.dilation, 0, module.stride)
            rows = patches.transpose(1, 2).flatten(0, 1)
        else:
            found = found if found.dim() > 1 else found[None]
            rows = found.flatten(0, -2)
        rows = rows.to(self.inputs.dtype)
        return (F.pad(rows, (0, 1), value=1.0) if len(self.parameters) == 2 else rows), len(found)

    def rows_of_outputs(self, found: Tensor) -> Tensor:
        """The gradient at what comes out, as rows g."""
        if isinstance(self.module, nn.Conv2d):
            found = (found if found.dim() == 4 else found[None]).flatten(2).transpose(1, 2)
        return found.reshape(-1, found.shape[-1]).to(self.outputs.dtype)


class _Listener:
    """The hook of a layer. On a copy of the model, pickled or not, it does nothing."""

    def __init__(self, layer: KnownLayer, is_due: Callable[[], bool]) -> None:
        self._layer, self._is_due = weakref.ref(layer), weakref.WeakMethod(is_due)

    def __call__(self, module: nn.Module, args: Sequence[Any], options: Any, output: Tensor) -> Tensor | None:
        layer, due = self._layer(), self._is_due()
        if layer is None or due is None or layer.module is not module or not torch.is_grad_enabled() or not due():
            return None
        given = args[0] if args else options["input"]
        found: Tensor = _Tap.apply(output, given, *layer.sums.values(), layer)  # type: ignore[no-untyped-call]
        return found

    def __deepcopy__(self, known: dict[int, Any]) -> _Listener:
        return self

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")  # takes anything, does nothing, and is read without unisono, too


class _Tap(torch.autograd.Function):
    """Lets a layer's output pass, and its gradient; on the way back it adds to the layer's sums."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, found: Tensor, *rest: Any) -> Tensor:
        ctx.mark_dirty(output)  # it stays as it is; without this, nothing behind it could write to it in place
        ctx.save_for_backward(found)
        ctx.layer = rest[-1]
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        layer: KnownLayer = ctx.layer
        (found,) = ctx.saved_tensors
        return gradient, None, *layer.sums_of(found, gradient), None


def known_layers(model: nn.Module, skip: Sequence[str]) -> tuple[list[KnownLayer], dict[str, list[Tensor]]]:
    """The layers with a rule, and all other trained parameters by the module that has them, as "name (Kind)".

    Args:
        model: the model.
        skip: names of modules that count as unknown, with all that is in them.

    Raises:
        ModelError: a layer shares its weights with another module, or has slices of them; names both, and the cure.
    """
    holders = _holders(model)
    if odd := next((name for name in skip if name not in dict(model.named_modules())), ""):
        raise ModelError(f"KFAC(skip=…): the model has no module {odd!r}; names are those of model.named_modules()")
    layers: list[KnownLayer] = []
    for name, module in model.named_modules():
        is_skipped = any(name == each or name.startswith(f"{each}.") for each in skip)
        weight = module._parameters.get("weight")  # others are made of parameters by a hook, or a parametrization
        if is_skipped or not isinstance(module, KNOWN) or weight is None or not weight.requires_grad:
            continue
        place = f"KFAC: the weight of {name}" if name else "KFAC: the weight of the model"
        if is_sliced(weight):
            raise ModelError(
                f"{place} lies in slices on several devices: use one device per worker, or another optimizer"
            )
        if is_lazy(weight):
            raise ModelError(f"{place} has no shape yet: pass the model a batch before")
        if type(module) not in KNOWN or weight.is_complex() or (isinstance(module, nn.Conv2d) and module.groups != 1):
            continue
        for parameter in module.parameters():
            if len(held := holders[id(parameter)]) > 1:
                raise ModelError(
                    f"KFAC: {' and '.join(held)} are one tensor (tied weights), whose gradient is no product of one "
                    f"layer's factors: untie them, or leave the layer to the other optimizer, KFAC(skip=[{name!r}])"
                )
        layers.append(KnownLayer.of(name or "model", module))
    taken = {id(parameter) for layer in layers for parameter in layer.parameters}
    others: dict[str, list[Tensor]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in taken:
                taken.add(id(parameter))
                others.setdefault(f"{name or 'model'} ({type(module).__name__})", []).append(parameter)
    return layers, others


def _trains_bias(module: nn.Linear | nn.Conv2d) -> bool:
    return module.bias is not None and module.bias.requires_grad


def _holders(model: nn.Module) -> dict[int, list[str]]:
    """Of each parameter the names under which modules have it."""
    found: dict[int, list[str]] = {}
    for prefix, parameter in _named(model):
        found.setdefault(id(parameter), []).append(prefix)
    return found


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, module in model.named_modules():
        for own, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{name}.{own}" if name else own, parameter
