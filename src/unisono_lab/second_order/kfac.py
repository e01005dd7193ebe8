"""K-FAC: natural gradient descent with Kronecker-factored curvature."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from unisono.arguments import require_types
from unisono.errors import ModelError, NonFiniteLoss
from unisono.host.tracebacks import warn
from unisono.received import short
from unisono.train.model.shared_work import Piece, SharingOptimizer
from unisono.train.model.slices import is_sliced

KNOWN = (nn.Linear, nn.Conv2d)
"""The classes of layers with a rule. Subclasses have none, since they may compute something else."""


@dataclass(eq=False)
class KnownLayer:
    """A layer with two factors: A of its inputs, and G of the gradient at its outputs.

    The tensors ``inputs``, ``outputs`` and ``counts`` are zero; the backward pass accumulates the sums below in their
    ``grad``. Here a is an input (for a convolution a patch of it; with a 1 for the bias), and g is the gradient of the
    loss at an output. Several calls of a layer in one pass count like positions.

    Attributes:
        inputs: Σ a aᵀ over samples and positions. Shape (n, n).
        outputs: Σ g gᵀ over samples and positions. Shape (m, m).
        counts: the number of vectors a, and the number of samples. Shape (2,).
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
        tensors = (torch.zeros(shape, dtype=dtype, device=weight.device, requires_grad=True) for shape in shapes)
        return cls(name, module, *tensors)

    @property
    def parameters(self) -> list[Tensor]:
        """The weight, and the bias if it is trained."""
        bias = self.module.bias
        return [self.module.weight, bias] if _trains_bias(self.module) and bias is not None else [self.module.weight]

    @property
    def sums(self) -> dict[str, Tensor]:
        """The tensors in whose ``grad`` backward passes accumulate, by name; on the device of the weights."""
        if self.counts.device != (device := self.module.weight.device):  # the model has been moved
            own = self.inputs, self.outputs, self.counts
            self.inputs, self.outputs, self.counts = (tensor.detach().to(device).requires_grad_() for tensor in own)
        return {
            f"inputs of {self.name}": self.inputs,
            f"outputs of {self.name}": self.outputs,
            f"counts of {self.name}": self.counts,
        }

    @property
    def gradient(self) -> Tensor | None:
        """The gradient as a matrix, with that of the bias as its last column. Shape (m, n)."""
        gradients = [gradient.grad for gradient in self.parameters]
        if any(gradient is None for gradient in gradients):
            return None
        return torch.cat(
            [
                gradient.to(self.inputs.dtype).reshape(len(gradient), -1)
                for gradient in gradients
                if gradient is not None
            ],
            1,
        )

    def cut(self, matrix: Tensor) -> list[Tensor]:
        """Copies of the parts of a matrix like the gradient that belong to each parameter, in its shape."""
        own = self.parameters
        parts = matrix.split([parameter[0].numel() for parameter in own], 1)
        return [
            part.reshape(parameter.shape).to(parameter.dtype, copy=True, memory_format=torch.contiguous_format)
            for part, parameter in zip(parts, own, strict=True)
        ]

    def factor(self, number: int) -> Tensor | None:
        """A (0) or G (1), the mean over the step's samples; None if there was no sample.

        The loss is a mean over the samples, so each g was divided by their number, and the reduction divides all sums
        by one weight. Both divisors cancel out in A = inputs / counts[0] and G = outputs · counts[1].
        """
        total, counts = (self.inputs, self.outputs)[number].grad, self.counts.grad
        if total is None or counts is None:
            return None
        return total / counts[0] if number == 0 else total * counts[1]

    def forget(self) -> None:
        """Clear the sums, which have been used."""
        for tensor in self.sums.values():
            tensor.grad = None

    def listen(self, is_due: Callable[[], bool]) -> Any:
        """Make each backward pass add to the sums; returns the handle of the hook."""
        return self.module.register_forward_hook(_Listener(self, is_due), with_kwargs=True)

    @torch.no_grad()
    def sums_of(self, layer_input: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The addends of a call to the three sums, from its input and the gradient at its output."""
        rows, samples = self.rows_of_inputs(layer_input.detach())
        others = self.rows_of_outputs(gradient.detach())
        counts = float(len(rows)), float(self._new_samples(samples))
        return rows.T @ rows, others.T @ others, self.counts.new_tensor(counts)

    def _new_samples(self, samples: int) -> int:
        """The number of a call's samples that other calls in the same backward pass have not counted."""
        newest, counted = self._newest_pass
        current = torch._C._current_graph_task_id()
        if current != newest:
            counted = 0
        self._newest_pass = current, max(counted, samples)
        return max(0, samples - counted)

    def rows_of_inputs(self, tensor: Tensor) -> tuple[Tensor, int]:
        """The rows a of an input, and the number of its samples."""
        module = self.module
        if isinstance(module, nn.Conv2d):
            tensor = tensor if tensor.dim() == 4 else tensor[None]
            mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
            padded = F.pad(tensor, module._reversed_padding_repeated_twice, mode)
            patches = F.unfold(padded, module.kernel_size, module.dilation, 0, module.stride)
            rows = patches.transpose(1, 2).flatten(0, 1)
        else:
            tensor = tensor if tensor.dim() > 1 else tensor[None]
            rows = tensor.flatten(0, -2)
        rows = rows.to(self.inputs.dtype)
        return (F.pad(rows, (0, 1), value=1.0) if len(self.parameters) == 2 else rows), len(tensor)

    def rows_of_outputs(self, tensor: Tensor) -> Tensor:
        """The rows g of the gradient at an output."""
        if isinstance(self.module, nn.Conv2d):
            tensor = (tensor if tensor.dim() == 4 else tensor[None]).flatten(2).transpose(1, 2)
        return tensor.reshape(-1, tensor.shape[-1]).to(self.outputs.dtype)


class _Listener:
    """The hook of a layer. On a copy of the model, pickled or not, it does nothing."""

    def __init__(self, layer: KnownLayer, is_due: Callable[[], bool]) -> None:
        self._layer, self._is_due = weakref.ref(layer), weakref.WeakMethod(is_due)

    def __call__(self, module: nn.Module, args: Sequence[Any], options: Any, output: Tensor) -> Tensor | None:
        layer, due = self._layer(), self._is_due()
        if layer is None or due is None or layer.module is not module or not torch.is_grad_enabled() or not due():
            return None
        layer_input = args[0] if args else options["input"]
        tapped: Tensor = _Tap.apply(output, layer_input, *layer.sums.values(), layer)  # type: ignore[no-untyped-call]
        return tapped

    def __deepcopy__(self, memo: dict[int, Any]) -> _Listener:
        return self

    def __reduce__(self) -> Any:
        # A function that ignores its arguments, and can be unpickled without unisono.
        return getattr, (nullcontext(), "__exit__")


class _Tap(torch.autograd.Function):
    """Returns a layer's output and its gradient unchanged; the backward pass adds to the layer's sums."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, layer_input: Tensor, *others: Any) -> Tensor:
        ctx.mark_dirty(output)  # it is unchanged, but later operations may write to it in place only if it is marked
        ctx.save_for_backward(layer_input)
        ctx.layer = others[-1]
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        layer: KnownLayer = ctx.layer
        (layer_input,) = ctx.saved_tensors
        return gradient, None, *layer.sums_of(layer_input, gradient), None


def known_layers(model: nn.Module, skip: Sequence[str]) -> tuple[list[KnownLayer], dict[str, list[Tensor]]]:
    """The layers with a rule, and all other trained parameters by their module, as "name (Kind)".

    Modules to skip, with all modules in them, count as unknown.

    Raises:
        ModelError: a layer shares its weights with another module, or holds slices of them; the message names a remedy.
    """
    holders = _holders(model)
    if unknown := next((name for name in skip if name not in dict(model.named_modules())), ""):
        raise ModelError(f"KFAC(skip=…): the model has no module {unknown!r}; names are those of model.named_modules()")
    layers: list[KnownLayer] = []
    for name, module in model.named_modules():
        is_skipped = any(name == skipped or name.startswith(f"{skipped}.") for skipped in skip)
        weight = module._parameters.get("weight")  # a weight that a hook or a parametrization computes is no parameter
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
    """The names of each parameter in all modules that hold it, by its id."""
    names: dict[int, list[str]] = {}
    for prefix, parameter in _named(model):
        names.setdefault(id(parameter), []).append(prefix)
    return names


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, module in model.named_modules():
        for own, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{name}.{own}" if name else own, parameter


_NAMES = ("inputs", "outputs")


class KFAC(SharingOptimizer):
    """K-FAC for ``nn.Linear`` and ``nn.Conv2d``, experimental: the update of a layer is (A ⊗ G + λI)⁻¹ ∇L.

    A = E[a aᵀ] of the layer's inputs, G = E[g gᵀ] of the loss's gradient at its outputs (J. Martens and
    R. Grosse, arXiv 1503.05671; for convolutions R. Grosse and J. Martens, arXiv 1602.01407). G is that of the batch's
    own labels, as in K. Osawa et al., arXiv 1811.12019. The inverse is made of eigendecompositions, as in
    J. G. Pauloski et al. (KAISA), arXiv 2107.01739. Parameters without a rule are trained by another optimizer.

    Under ``run.prepare`` factors have the same bits on any number of workers, and each decomposition is computed by one
    of them. In a plain loop it is an ordinary optimizer. The loss must be a mean over samples, which are counted along
    the first dimension of a layer's inputs. A ``GradScaler`` is refused.

    Args:
        model: the module, all of whose trained parameters are updated.
        lr: the learning rate η.
        momentum: the momentum of the preconditioned gradients, as in ``torch.optim.SGD``.
        weight_decay: the weight decay of the layers with a rule, as in ``torch.optim.SGD``.
        damping: λ, above 0.
        kl_clip: κ: all updates u are multiplied by min(1, √(κ / (η² Σ u·∇L))), summed over layers; None for 1.
        decay: the decay of the running averages of factors; for the k-th factor it is min(1 − 1/k, decay).
        factors_every: the number of steps between new factors.
        inverses_every: the number of steps between decompositions; a multiple of ``factors_every``.
        fallback: a function that makes the optimizer of all other parameters.
        skip: names of modules that the other optimizer trains as well.

    Raises:
        ModelError: no layer has a rule, weights are tied, or a setting is out of its range.
        JobError: a setting is of another type.
    """

    _is_whole = False
    _step_supports_amp_scaling = True
    """Makes a ``GradScaler`` set ``found_inf`` before a step, by which the step recognises and refuses it."""

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.1,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        damping: float = 1e-2,
        kl_clip: float | None = 1e-3,
        decay: float = 0.95,
        factors_every: int = 1,
        inverses_every: int = 10,
        fallback: Callable[[list[Tensor]], Optimizer] = optim.AdamW,
        skip: Sequence[str] = (),
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ModelError(f"KFAC({short(model)}): pass the model, an nn.Module, whose layers KFAC reads")
        settings: dict[str, Any] = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "damping": damping,
            "kl_clip": kl_clip,
            "decay": decay,
            "factors_every": factors_every,
            "inverses_every": inverses_every,
        }
        require_types(KFAC.__init__, {**settings, "fallback": fallback, "skip": skip})
        _check(settings)
        self._layers, others = known_layers(model, skip)
        if not self._layers:
            raise ModelError("KFAC: the model trains no nn.Linear or nn.Conv2d without groups: use another optimizer")
        super().__init__(
            [{"params": [parameter for layer in self._layers for parameter in layer.parameters]}], settings
        )
        self._fallback = (
            fallback([parameter for parameters in others.values() for parameter in parameters]) if others else None
        )
        self._notice = ""
        if others and not isinstance(self._fallback, Optimizer):
            raise ModelError(f"KFAC(fallback=…): the function returned {short(self._fallback)}, which is no optimizer")
        if self._fallback is not None:
            self.param_groups.extend(self._fallback.param_groups)
            self._notice = f"KFAC has no rule for {', '.join(others)}: {type(self._fallback).__name__} trains them"
        self._is_whole = True
        self._hooks = [layer.listen(self._takes_factors) for layer in self._layers]

    @property
    def statistics(self) -> Mapping[str, Tensor]:
        """The sums of which the next step makes factors; empty if it makes none."""
        if not self._takes_factors():
            return {}
        return {name: tensor for layer in self._layers for name, tensor in layer.sums.items()}

    def notice(self) -> str:
        """A sentence about layers without a rule and their optimizer; empty without such layers, and on later calls."""
        sentence, self._notice = self._notice, ""
        return sentence

    @torch.no_grad()
    def trouble(self) -> str:
        """A sentence about the first factor that is not finite; empty if there is none."""
        for layer in self._layers:
            for place, name in enumerate(_NAMES):
                total = (layer.inputs, layer.outputs)[place].grad
                if total is not None and not torch.isfinite(total).all():
                    return f"KFAC: the factor of the {name} of {layer.name} is not finite"
        return ""

    def pieces(self) -> list[float]:
        """The cost of each factor's decomposition in multiplications, about 9 n³."""
        if not self._is_due("inverses_every"):
            return []
        return [9.0 * len((layer.inputs, layer.outputs)[place]) ** 3 for layer in self._layers for place in (0, 1)]

    def forms(self, piece: int) -> list[Tensor]:
        """Tensors without data, of the shapes of the factor's eigenvectors and eigenvalues."""
        like = (self._layers[piece // 2].inputs, self._layers[piece // 2].outputs)[piece % 2]
        size = len(like)
        return [torch.empty(shape, dtype=like.dtype, device="meta") for shape in ((size, size), (size,))]

    @torch.no_grad()
    def worked_out(self, piece: int) -> Piece:
        """Decompose the factor that the next step will have; zeros if there is none yet."""
        return self._decomposed(piece, self._averaged(self._layers[piece // 2], piece % 2))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters.

        Args:
            closure: a function that computes the loss and its gradients, and returns the loss.

        Raises:
            NonFiniteLoss: a factor is not finite; nothing was changed.
            ModelError: a ``GradScaler`` calls the step; nothing was changed.
        """
        if self.__dict__.pop("found_inf", None) is not None:
            raise ModelError(
                "KFAC depends on the sizes of gradients, which a GradScaler changes first: leave the scaler out. "
                "torch.autocast with torch.bfloat16 needs none"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if sentence := self.notice():
            warn(sentence)
        if trouble := self.trouble():
            raise NonFiniteLoss(
                f"{trouble}; nothing was updated. Lower the learning rate, raise the damping, or check the data"
            )
        received, self.given = self.given, {}
        averages = {
            (number, place): self._averaged(layer, place)
            for number, layer in enumerate(self._layers)
            for place in (0, 1)
        }
        decompositions = {
            piece: received[piece] if piece in received else self._decomposed(piece, averages[divmod(piece, 2)])
            for piece in range(len(self.pieces()))
        }
        for number, layer in enumerate(self._layers):
            pieces = [decompositions[piece] for piece in (2 * number, 2 * number + 1) if piece in decompositions]
            self._keep(layer, [averages[number, place] for place in (0, 1)], pieces)
        self._update()
        if self._fallback is not None:
            # A loaded checkpoint has replaced these objects, which both optimizers share.
            self._fallback.param_groups, self._fallback.state = self.param_groups[1:], self.state
            self._fallback.step()
        self.state[self._layers[0].module.weight]["step"] = self._own.get("step", torch.tensor(0.0)) + 1
        return loss

    def __getstate__(self) -> dict[str, Any]:
        """Refuse copies and pickles: they would listen to the layers of no model.

        Raises:
            ModelError: always.
        """
        raise ModelError(
            "KFAC cannot be copied or pickled, since it listens to the layers of its model: copy the model, make "
            "unisono_lab.KFAC(copy), and load the state with load_state_dict(optimizer.state_dict())"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse groups after construction: a parameter alone does not tell its layer's inputs.

        Raises:
            ModelError: the optimizer is constructed already.
        """
        if self._is_whole:
            raise ModelError(
                "KFAC(model) trains the layers that the model trained at the construction of the optimizer: after "
                "unfreezing layers, make another optimizer, before run.prepare"
            )
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, and the sums of which factors are made."""
        super().zero_grad(set_to_none)
        for layer in self._layers:
            layer.forget()

    @property
    def _own(self) -> dict[str, Any]:
        """The state of the whole optimizer. Groups hold the script's settings, so it is part of a parameter's state."""
        own: dict[str, Any] = self.state.get(self._layers[0].module.weight, {})
        return own

    def _is_due(self, name: str) -> bool:
        return int(self._own.get("step", 0)) % int(self.param_groups[0][name]) == 0

    def _takes_factors(self) -> bool:
        return self._is_due("factors_every")

    def _averaged(self, layer: KnownLayer, place: int) -> Tensor | None:
        """The running average of a factor that the next step will have; None if there is none yet."""
        state = self.state.get(layer.module.weight, {})
        before: Tensor | None = state.get(_NAMES[place])
        new = layer.factor(place)
        if new is None or before is None:
            return before if new is None else new
        decay = min(1 - 1 / (int(state["estimates"]) + 1), float(self.param_groups[0]["decay"]))
        return before * decay + new * (1 - decay)

    def _decomposed(self, piece: int, average: Tensor | None) -> Piece:
        if average is None:
            device = self._layers[piece // 2].module.weight.device
            return [torch.zeros_like(form, device=device) for form in self.forms(piece)]
        values, vectors = torch.linalg.eigh(average)
        return [vectors.contiguous(), values.clamp(min=0.0)]  # rounding makes small eigenvalues negative

    def _keep(self, layer: KnownLayer, averages: Sequence[Tensor | None], decomposed: Sequence[Piece]) -> None:
        state = self.state[layer.module.weight]
        if layer.counts.grad is not None:
            state["estimates"] = state.get("estimates", torch.tensor(0.0)) + 1
        layer.forget()
        for name, average in zip(_NAMES, averages, strict=True):
            if average is not None:
                state[name] = average
        if averages[0] is not None:
            for name, (vectors, values) in zip(_NAMES, decomposed, strict=False):
                state[f"{name}_vectors"], state[f"{name}_values"] = vectors, values

    def _update(self) -> None:
        group = self.param_groups[0]
        updates = {
            number: (gradient, self._preconditioned(layer, gradient))
            for number, layer in enumerate(self._layers)
            if (gradient := layer.gradient) is not None
        }
        # In the layers' order, so that all workers get the same bits.
        total = sum(float((gradient.double() * update.double()).sum()) for gradient, update in updates.values())
        size, limit = total * float(group["lr"]) ** 2, group["kl_clip"]
        factor = 1.0 if limit is None or size <= limit else math.sqrt(limit / size)
        for number, (_, update) in updates.items():
            layer = self._layers[number]
            for parameter, part in zip(layer.parameters, layer.cut(update * factor), strict=True):
                if group["weight_decay"]:
                    part.add_(parameter, alpha=group["weight_decay"])
                parameter.add_(self._with_momentum(parameter, part), alpha=-float(group["lr"]))

    def _with_momentum(self, parameter: Tensor, part: Tensor) -> Tensor:
        if not (momentum := self.param_groups[0]["momentum"]):
            return part
        state = self.state[parameter]
        if "momentum_buffer" in state:
            part.add_(state["momentum_buffer"], alpha=momentum)
        state["momentum_buffer"] = part
        return part

    def _preconditioned(self, layer: KnownLayer, gradient: Tensor) -> Tensor:
        """(A ⊗ G + λI)⁻¹ times a layer's gradient; the gradient itself until there are factors."""
        state = self.state.get(layer.module.weight, {})
        if "inputs_vectors" not in state:
            return gradient
        right, left = state["inputs_vectors"], state["outputs_vectors"]
        values = torch.outer(state["outputs_values"], state["inputs_values"]) + self.param_groups[0]["damping"]
        update: Tensor = left @ ((left.T @ gradient @ right) / values) @ right.T
        return update


def _check(settings: Mapping[str, Any]) -> None:
    ranges = {
        "lr": 0 <= settings["lr"] < math.inf,
        "momentum": 0 <= settings["momentum"] < 1,
        "weight_decay": 0 <= settings["weight_decay"] < math.inf,
        "damping": 0 < settings["damping"] < math.inf,
        "kl_clip": settings["kl_clip"] is None or settings["kl_clip"] > 0,
        "decay": 0 <= settings["decay"] < 1,
        "factors_every": settings["factors_every"] >= 1,
        "inverses_every": settings["inverses_every"] >= 1
        and settings["inverses_every"] % max(1, settings["factors_every"]) == 0,
    }
    if name := next((name for name, is_right in ranges.items() if not is_right), ""):
        raise ModelError(
            f"KFAC({name}={settings[name]!r}): rates and decays are from 0 on, momentum and decay below 1, damping and "
            f"kl_clip above 0, and inverses_every is a multiple of factors_every, which is at least 1"
        )
