"""The models and optimizers that a run trains."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import SGD, Optimizer

from unisono.checkpoint.layout import form_of
from unisono.errors import ModelError
from unisono.train.model.combining import further_places
from unisono.train.model.places import BufferPlace, places_of
from unisono.train.model.shared_work import statistics_of
from unisono.train.model.slices import held_whole, let_go_of_gathered, slice_of, update_slices
from unisono.train.model.staging import groups_of, staging_of, update_own
from unisono.train.model.tensors import tensors_of, version_of


@dataclass(frozen=True)
class Prepared:
    """The models and optimizers given to ``prepare``, with an inventory.

    Attributes:
        model: the model that the loss function gets: one module, or the list that was given.
        modules: the modules, always as a tuple.
        optimizers: the optimizers, always as a tuple.
        parameters: the parameters that the optimizers update, each once, by name.
        outside: what optimizers hold and no module does, also what is frozen, by optimizer, group and place: a learned
            temperature, the centres of a loss. It is carried along like the modules' parameters.
        buffers: the places of the modules' buffers, and of further state that shards change, each once.
    """

    model: Any
    modules: tuple[nn.Module, ...]
    optimizers: tuple[Optimizer, ...]
    parameters: dict[str, Tensor]
    outside: dict[str, Tensor]
    buffers: tuple[BufferPlace, ...]
    _registries: list[tuple[dict[str, Any], tuple[int, ...]]] = field(repr=False)
    _buffer_names: list[tuple[dict[str, Any], list[str]]] = field(repr=False)
    _trained: tuple[int, ...] = field(repr=False)
    _forms: dict[str, list[Any]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, model: Any, optimizers: Sequence[Optimizer], state: Mapping[str, Any] | None = None) -> Prepared:
        """Take inventory. Frozen parameters lose the gradients that they had before they were frozen.

        Args:
            model: one module, or a list of them.
            optimizers: the optimizers.
            state: further state that shards change, see :func:`~unisono.train.model.combining.further_places`.

        Raises:
            ModelError: nothing to train, or something that is no module, optimizer or state.
        """
        modules = tuple(model) if isinstance(model, list | tuple) else (model,)
        _check_kinds(modules, optimizers)
        update_slices(optimizers)
        update_own(modules, optimizers)
        places = _places(modules, state or {})
        known = chain((place.tensor for place in places), *(map(slice_of, module.parameters()) for module in modules))
        outside = outside_of(set(map(id, known)), optimizers)
        parameters = _named_parameters(modules, optimizers, outside)
        for frozen in held_by(optimizers):
            if not frozen.requires_grad:  # or the optimizer would go on with the gradient that it had before
                frozen.grad = None
        if not parameters:
            raise ModelError("the optimizers hold no parameter that requires a gradient: there is nothing to train")
        found = cls(
            model,
            modules,
            tuple(optimizers),
            parameters,
            outside,
            places,
            _registries(modules),
            [(layer._buffers, _present(layer._buffers)) for root in modules for layer in root.modules()],
            trained_by(optimizers),
        )
        found._forms.update(found._forms_now())
        return found

    def trained_by(self, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
        """The parameters that these optimizers update, by name, in the inventory's order."""
        ids = {id(parameter) for parameter in held_by(optimizers)}
        return {name: parameter for name, parameter in self.parameters.items() if id(parameter) in ids}

    def reduced_for(self, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
        """What the next update of these optimizers goes by: their parameters, and behind these their statistics."""
        return self.trained_by(optimizers) | statistics_of(optimizers)

    def gradient_holders(self) -> list[Tensor]:
        """All tensors in which backward passes may leave something: the parameters, and statistics that are due."""
        return [*self.parameters.values(), *statistics_of(self.optimizers).values()]

    def clear_gradients(self, but: Sequence[Tensor] = ()) -> None:
        """Have no gradients in the parameters, but in some of them; nor in statistics."""
        kept = {id(parameter) for parameter in but}
        for parameter in self.gradient_holders():
            if id(parameter) not in kept:
                parameter.grad = None

    def tensors(self, model: nn.Module | Sequence[nn.Module] | None = None) -> dict[str, Tensor]:
        """All modules' parameters and buffers by name, and what only optimizers hold.

        Args:
            model: other modules. What only optimizers hold is no part of them, unless something of them is trained.
        """
        modules = [model] if isinstance(model, nn.Module) else model or self.modules
        own, tensors = {id(each) for _, each in self._named()}, tensors_by_name(modules)
        is_ours = model is None or any(id(slice_of(each)) in own for module in modules for each in module.parameters())
        return tensors | self.outside if is_ours else tensors

    def weights(self) -> dict[str, Tensor]:
        """All parameters by name, each once: the modules' own, also frozen ones, and others that optimizers hold.

        Without those that are state, which shards change.
        """
        found: dict[int, tuple[str, Tensor]] = {}
        state = {id(place.tensor) for place in self.buffers}
        for name, parameter in chain(self._named(), self.outside.items()):
            found.setdefault(id(parameter), (name, parameter))
        return {name: tensor for name, tensor in found.values() if id(tensor) not in state and not tensor.is_meta}

    def check_unchanged(self) -> None:
        """Refuse a model whose parameters, buffers or modules were replaced since ``prepare``.

        Raises:
            ModelError: says what to do.
        """
        if any(tuple(map(id, registry.values())) != members for registry, members in self._registries):
            let_go_of_gathered(self.modules)  # by an evaluation, say
        for registry, members in self._registries:
            if tuple(map(id, registry.values())) != members:
                raise ModelError(
                    f"the model changed after run.prepare: one of {', '.join(map(repr, registry))} was added, "
                    f"removed or replaced. Build and change the model first, or call run.prepare again after it"
                )
        for buffers, names in self._buffer_names:
            if _present(buffers) != names:
                raise ModelError(
                    f"the model changed after run.prepare: it had the buffers {names or 'none'} in one module, and now "
                    f"has {_present(buffers)}. Register buffers when the model is built, or call run.prepare again"
                )
        if trained_by(self.optimizers) != self._trained:
            change = change_of(self._names(), self._trained, self.optimizers)
            raise ModelError(f"what is trained changed after run.prepare: {change}")

    def unheld(self) -> list[str]:
        """The names of the modules' parameters that want a gradient, and that no optimizer holds."""
        held = set(map(id, held_by(self.optimizers)))
        return [
            name for name, each in self._named() if each.requires_grad and not each.is_meta and id(each) not in held
        ]

    def _named(self) -> list[tuple[str, Tensor]]:
        """The modules' parameters by name; slices of those that devices hold together."""
        return [
            (prefix + name, slice_of(each))
            for prefix, module in prefixed(self.modules)
            for name, each in module.named_parameters()
        ]

    def _names(self) -> dict[int, str]:
        """The names of all parameters by their ids."""
        return {id(tensor): name for name, tensor in chain(self.outside.items(), self._named())}

    def require_forms(self) -> None:
        """Refuse a state that could not be restored into what the script makes at its start.

        Raises:
            ModelError: names what has got another dtype or shape since ``prepare``, and says what to do.
        """
        for name, form in self._forms_now().items():
            if form != (before := self._forms.get(name, form)):
                raise ModelError(
                    f"{name} has the form {form}, and had {before} at run.prepare: no run could go on from such a "
                    f"checkpoint. Leave its dtype and shape as they are, or call run.prepare again between two loops"
                )

    def _forms_now(self) -> dict[str, list[Any]]:
        """Dtype and shape of all weights, buffers and further state by name."""
        weights = {name: form_of(tensor) for name, tensor in self.weights().items()}
        return weights | {place.name: place.form for place in self.buffers}

    def layout(self) -> dict[str, str]:
        """Names, whole shapes and dtypes of all parameters and buffers, for comparison between workers.

        The same on all devices of a worker.
        """
        described = {name: _form(tensor) for name, tensor in self.tensors().items()}
        trained, order = dict(self.parameters), self.order()
        if staging_of(self.modules) is not None:
            order = [[name for group in groups_of(one) for name in group] for one in self.optimizers]
            (module,) = self.modules
            trained = {name: one for name, one in module.named_parameters() if one.requires_grad}
            trained = {name: trained[name] for names in order for name in names if name in trained}
        for name, tensor in trained.items():
            whole = held_whole(tensor)
            described[f"trained {name}"] = _form(tensor if whole is None else whole)
        described |= {place.name: f"{place.form} {place.rule}" for place in self.buffers if place.chosen is not None}
        return described | {f"order of optimizer {n}": ", ".join(names) for n, names in enumerate(order)}

    def order(self) -> list[list[str]]:
        """The names of each optimizer's parameters, in its order: its state is kept by their numbers."""
        named = self._names()
        return [[named.get(id(tensor), "?") for tensor in held_by([one])] for one in self.optimizers]


def prefixed(modules: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Each module with the prefix of its names: none for a single one, else its number."""
    if len(modules) == 1:
        return [("", modules[0])]
    return [(f"{number}.", module) for number, module in enumerate(modules)]


def tensors_by_name(modules: nn.Module | Sequence[nn.Module]) -> dict[str, Tensor]:
    """All modules' parameters and buffers by name, with the module's number in front if there are several."""
    listed = [modules] if isinstance(modules, nn.Module) else list(modules)
    return {prefix + name: tensor for prefix, module in prefixed(listed) for name, tensor in tensors_of(module).items()}


def _present(buffers: Mapping[str, Any]) -> list[str]:
    return [name for name, buffer in buffers.items() if buffer is not None]


def _check_kinds(modules: Sequence[Any], optimizers: Sequence[Any]) -> None:
    for module in modules:
        if not isinstance(module, nn.Module):
            raise ModelError(f"run.prepare needs torch modules, got {type(module).__name__}")
        if any(_averages_gradients(each) for each in module.modules()):
            raise ModelError(
                f"{type(module).__name__} averages gradients itself, in each backward pass of all workers, which have "
                f"different numbers of shards: give run.prepare the module inside it (.module), which replaces it"
            )
        if any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
            raise ModelError("the model has lazy layers without a shape yet: run one batch through it first")
        for name, tensor in chain(module.named_parameters(), module.named_buffers()):
            version_of(tensor, name)
            if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
                raise ModelError(
                    f"{name} is an expanded tensor: several of its elements share one place in memory, so it cannot be "
                    f"set. Make it with .clone() or .contiguous()"
                )
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise ModelError(f"run.prepare needs torch optimizers, got {type(optimizer).__name__}")
        closure = signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise ModelError(
                f"{type(optimizer).__name__} wants to compute the loss itself, several times a step (a closure), "
                f"which cannot be distributed among workers: use another optimizer"
            )


def _averages_gradients(module: nn.Module) -> bool:
    """Whether it is one of torch's DistributedDataParallel, or a DataParallel that makes copies for several devices."""
    is_copied = isinstance(module, nn.DataParallel) and len(module.device_ids) > 1
    return is_copied or isinstance(module, nn.parallel.DistributedDataParallel)


def _named_parameters(
    modules: Sequence[nn.Module], optimizers: Sequence[Optimizer], outside: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    owned = {id(tensor): tensor for tensor in held_by(optimizers) if tensor.requires_grad}
    named: dict[str, Tensor] = {}
    for prefix, module in prefixed(modules):
        for name, parameter in module.named_parameters():
            if owned.pop(id(own := slice_of(parameter)), None) is not None:
                named[prefix + name] = own
    return named | {name: tensor for name, tensor in outside.items() if id(tensor) in owned}


def _places(modules: Sequence[nn.Module], state: Mapping[str, Any]) -> tuple[BufferPlace, ...]:
    """Each tensor once: where the script says how one is combined, by that rule."""
    further = {id(place.tensor): place for place in further_places(state)}
    places: dict[int, BufferPlace] = {}
    for prefix, root in prefixed(modules):
        for place in places_of(prefix, root):
            if place.tensor.is_meta:  # another device has it
                continue
            places.setdefault(id(place.tensor), further.get(id(place.tensor), place))
    return tuple((places | further).values())


def _registries(modules: Sequence[nn.Module]) -> list[tuple[dict[str, Any], tuple[int, ...]]]:
    return [
        (registry, tuple(map(id, registry.values())))
        for root in modules
        for module in root.modules()
        for registry in (module._parameters, module._modules)
        if registry
    ]


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def refuse_unset_memory(optimizers: Sequence[Optimizer]) -> None:
    """Refuse the one optimizer of torch whose result depends on what happened to be in memory.

    The fused SGD on the CPU reads its momentum before setting it, for 16-bit parameters whose size is no multiple of
    the vector width (seen with torch 2.13).

    Raises:
        ModelError: says what to use instead.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            narrow = any(tensor.dtype.itemsize == 2 and tensor.device.type == "cpu" for tensor in group["params"])
            if isinstance(optimizer, SGD) and group.get("fused") and group.get("momentum") and narrow:
                raise ModelError(
                    "torch's SGD(fused=True, momentum=…) gives other bits for 16-bit parameters depending on what was "
                    "in memory before: use foreach=True, or accept it with unisono.init(arithmetic={'deterministic': "
                    "False})"
                )


def batch_norm_in(modules: Sequence[nn.Module]) -> bool:
    """Whether any layer computes statistics over the samples of a shard."""
    kinds = (torch.nn.modules.batchnorm._BatchNorm,)
    return any(isinstance(layer, kinds) for root in modules for layer in root.modules())


def held_by(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """All parameters of optimizers, in their order."""
    return [parameter for one in optimizers for group in one.param_groups for parameter in group["params"]]


def trained_by(optimizers: Sequence[Optimizer]) -> tuple[int, ...]:
    """The ids of those that want a gradient."""
    return tuple(id(parameter) for parameter in held_by(optimizers) if parameter.requires_grad)


OUTSIDE = re.compile(r"optimizer\d*\.group\d+\.\d+")
"""The names of what optimizers hold and no module does."""


def outside_of(known: Collection[int], optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """The parameters that are not known, by a name that follows from their place alone.

    Args:
        known: the ids of all that modules hold.
        optimizers: the optimizers.
    """
    found: dict[int, tuple[str, Tensor]] = {}
    for number, optimizer in enumerate(optimizers):
        prefix = f"optimizer{number if len(optimizers) > 1 else ''}"
        for group, settings in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(settings["params"]):
                if id(parameter) not in known:
                    found.setdefault(id(parameter), (f"{prefix}.group{group}.{place}", parameter))
    return dict(found.values())


def require_held(modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Refuse an optimizer that holds nothing of the modules, while one of these waits to be trained.

    Raises:
        ModelError: says what to write.
    """
    parameters = [(module, list(map(slice_of, module.parameters()))) for module in modules]
    own, held = {id(each) for _, listed in parameters for each in listed}, set(map(id, held_by(optimizers)))
    strangers = [one for one in optimizers if held_by([one]) and own.isdisjoint(map(id, held_by([one])))]
    waiting = [
        module
        for module, listed in parameters
        if any(each.requires_grad for each in listed) and held.isdisjoint(map(id, listed))
    ]
    if strangers and waiting:
        kind, model = type(strangers[0]).__name__, type(waiting[0]).__name__
        raise ModelError(
            f"the {kind} holds no parameter of the {model} that run.prepare was given, so that would never be trained: "
            f"was it made of a copy, or before the model was built anew? Make it of this one: "
            f"{kind}(model.parameters(), …). What is not to be trained is frozen before: model.requires_grad_(False)"
        )


def change_of(names: Mapping[int, str], before: Sequence[int], optimizers: Sequence[Optimizer]) -> str:
    """What was changed so that other parameters are trained now, and what to do.

    Args:
        names: the names of parameters by their ids.
        before: those that were trained before, as :func:`trained_by` gave them.
        optimizers: the optimizers.
    """
    now = trained_by(optimizers)
    first = next((each for each in (*before, *now) if each not in now or each not in before), 0)
    what = "frozen, or taken from its optimizer" if first in before else "unfrozen, or given to an optimizer"
    several = (
        "to train those of one of several optimizers in a call, leave requires_grad as it is, and name the optimizer: "
        "step.run(loss_fn, optimizer=…). Otherwise "
    )
    return (
        f"{names.get(first, 'a parameter')} was {what}: {several if len(optimizers) > 1 else ''}do that before it, or "
        f"call run.prepare again; in a framework's trainer, before a training of its own"
    )
