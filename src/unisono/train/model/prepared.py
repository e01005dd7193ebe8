"""The models and optimizers that a run trains."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from itertools import chain, compress
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from unisono.checkpoint.tensor_bytes import form_of
from unisono.errors import ModelError
from unisono.train.model.places import BufferPlace, further_places, places_of
from unisono.train.model.shared_work import sharing_in, statistics_of
from unisono.train.model.slices import held_whole, let_go_of_gathered, slice_of, update_slices
from unisono.train.model.staging import groups_of, require_memory, staging_of, update_own
from unisono.train.model.tensors import tensors_of, version_of

_DTYPE_AND_SHAPE = attrgetter("dtype", "shape")


@dataclass(frozen=True)
class Prepared:
    """The models and optimizers given to ``prepare``, with an inventory.

    Attributes:
        model: the model that the loss function gets: one module, or the list that was given.
        parameters: the parameters that the optimizers update, each once, by name.
        outside: parameters that optimizers hold and no module does, also frozen ones, by optimizer, group and place: a
            learned temperature, the centres of a loss. They are treated like the modules' parameters.
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
    _identities: frozenset[int] = field(repr=False)
    _forms: dict[str, list[Any]] = field(default_factory=dict, repr=False)
    _weights: dict[str, Tensor] = field(default_factory=dict, repr=False)
    _kept: list[tuple[torch.dtype, torch.Size]] = field(default_factory=list, repr=False)
    _by_ids: dict[tuple[int, ...], dict[str, Tensor]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, model: Any, optimizers: Sequence[Optimizer], state: Mapping[str, Any] | None = None) -> Prepared:
        """Take inventory. Frozen parameters lose the gradients that they had before they were frozen.

        ``state`` is further state that shards change, see :func:`~unisono.train.model.places.further_places`.

        Raises:
            ModelError: there is nothing to train, or an argument is no module, optimizer or state.
        """
        modules = tuple(model) if isinstance(model, list | tuple) else (model,)
        _check_kinds(modules, optimizers)
        update_slices(optimizers)
        update_own(modules, optimizers)
        places = _places(modules, state or {})
        held = chain((place.tensor for place in places), *(map(slice_of, module.parameters()) for module in modules))
        outside = outside_of(set(map(id, held)), optimizers)
        for name, tensor in outside.items():
            require_memory(tensor, name)
        parameters = _named_parameters(modules, optimizers, outside)
        for frozen in held_by(optimizers):
            if not frozen.requires_grad:  # or the optimizer would go on using the gradient from before
                frozen.grad = None
        if not parameters:
            raise ModelError("the optimizers hold no parameter that requires a gradient: there is nothing to train")
        prepared = cls(
            model,
            modules,
            tuple(optimizers),
            parameters,
            outside,
            places,
            _registries(modules),
            [(layer._buffers, _present(layer._buffers)) for root in modules for layer in root.modules()],
            trained_by(optimizers),
            frozenset(id(parameter) for module in modules for parameter in module.parameters()),
        )
        prepared._forms.update(prepared._forms_now())
        prepared._weights.update(prepared.weights())
        prepared._kept.extend(map(_DTYPE_AND_SHAPE, prepared._weights.values()))
        return prepared

    def trained_by(self, optimizers: Sequence[Optimizer]) -> Mapping[str, Tensor]:
        """The parameters that these optimizers update, by name, in the inventory's order."""
        ids = (*map(id, held_by(optimizers)),)
        if ids not in self._by_ids:
            held = set(ids)
            self._by_ids[ids] = {name: tensor for name, tensor in self.parameters.items() if id(tensor) in held}
        return self._by_ids[ids]

    def reduced_for(self, optimizers: Sequence[Optimizer]) -> Mapping[str, Tensor]:
        """The tensors whose gradients the next update of these optimizers uses: parameters, then statistics."""
        trained = self.trained_by(optimizers)
        return {**trained, **statistics_of(optimizers)} if self._have_statistics else trained

    def gradient_holders(self) -> list[Tensor]:
        """All tensors in which backward passes may leave gradients: the parameters, and statistics that are due."""
        return [*self.reduced_for(self.optimizers).values()]

    def clear_gradients(self, but: Sequence[Tensor] = ()) -> None:
        """Delete the gradients of parameters and statistics, except those of some tensors."""
        kept = set(map(id, but))
        for parameter in self.gradient_holders() if self._have_statistics else self.parameters.values():
            if id(parameter) not in kept:
                parameter.grad = None

    @cached_property
    def _have_statistics(self) -> bool:
        return bool(sharing_in(self.optimizers))

    def tensors(self, model: nn.Module | Sequence[nn.Module] | None = None) -> dict[str, Tensor]:
        """All modules' parameters and buffers by name, and parameters that only optimizers hold.

        Args:
            model: other modules. Parameters that only optimizers hold are included if something of these modules is
                trained.
        """
        modules = [model] if isinstance(model, nn.Module) else model or self.modules
        own, tensors = {id(tensor) for _, tensor in self._named()}, tensors_by_name(modules)
        is_ours = model is None or any(id(slice_of(held)) in own for module in modules for held in module.parameters())
        return tensors | self.outside if is_ours else tensors

    def weights(self) -> dict[str, Tensor]:
        """All parameters by name, each once: the modules' own, also frozen ones, and others that optimizers hold.

        Parameters that are further state, which shards change, are left out.
        """
        named: dict[int, tuple[str, Tensor]] = {}
        state = {id(place.tensor) for place in self.buffers}
        for name, parameter in chain(self._named(), self.outside.items()):
            named.setdefault(id(parameter), (name, parameter))
        return {name: tensor for name, tensor in named.values() if id(tensor) not in state and not tensor.is_meta}

    def _has_other_parameters(self) -> bool:
        """Whether the modules have other parameters than at first; if not, modules were replaced by their like."""
        present = frozenset(id(parameter) for module in self.modules for parameter in module.parameters())
        if present != self._identities:
            return True
        self._registries[:] = _registries(self.modules)
        return False

    def check_unchanged(self) -> None:
        """Refuse a model whose parameters, buffers or modules were replaced since ``prepare``.

        Raises:
            ModelError: says what to do.
        """
        for registry, members in self._registries:
            if (*map(id, registry.values()),) == members:
                continue
            let_go_of_gathered(self.modules)  # an evaluation may have gathered slices, and leaves other tensors there
            if (*map(id, registry.values()),) != members and self._has_other_parameters():
                raise ModelError(
                    f"the model changed after run.prepare: one of {', '.join(map(repr, registry))} was added, "
                    f"removed or replaced. Build and change the model first, or call run.prepare again after it"
                )
        for buffers, names in self._buffer_names:
            if (buffers or names) and _present(buffers) != names:
                raise ModelError(
                    f"the model changed after run.prepare: it had the buffers {names or 'none'} in one module, and now "
                    f"has {_present(buffers)}. Register buffers when the model is built, or call run.prepare again"
                )
        if [*map(_DTYPE_AND_SHAPE, self._weights.values())] != self._kept:  # in each step, so not one by one
            name, was = next(
                (name, was)
                for (name, tensor), was in zip(self._weights.items(), self._kept, strict=True)
                if _DTYPE_AND_SHAPE(tensor) != was
            )
            raise ModelError(
                f"the model changed after run.prepare: {name} was {_words(*was)}, and is {_form(self._weights[name])}. "
                f"Change the model first (model.double(), …), or call run.prepare again after it"
            )
        if trained_by(self.optimizers) != self._trained:
            change = change_of(self._names(), self._trained, self.optimizers)
            raise ModelError(f"what is trained changed after run.prepare: {change}")

    def unheld(self) -> list[str]:
        """The names of the modules' parameters that require a gradient, and that no optimizer holds."""
        held = set(map(id, held_by(self.optimizers)))
        return [
            name
            for name, tensor in self._named()
            if tensor.requires_grad and not tensor.is_meta and id(tensor) not in held
        ]

    def _named(self) -> list[tuple[str, Tensor]]:
        """The modules' parameters by name; of those that lie in slices, this device's slice."""
        return [
            (prefix + name, slice_of(parameter))
            for prefix, module in prefixed(self.modules)
            for name, parameter in module.named_parameters()
        ]

    def _names(self) -> dict[int, str]:
        """The names of all parameters by their ids."""
        return {id(tensor): name for name, tensor in chain(self.outside.items(), self._named())}

    def require_forms(self) -> None:
        """Refuse a state that could not be restored into what the script makes at its start.

        Raises:
            ModelError: a tensor has another dtype or shape than at ``prepare``; names it, and says what to do.
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

        The layout is the same on all devices of a worker.
        """
        described = {name: _form(tensor) for name, tensor in self.tensors().items()}
        trained, order = dict(self.parameters), self.order()
        if staging_of(self.modules) is not None:
            order = [[name for group in groups_of(optimizer) for name in group] for optimizer in self.optimizers]
            (module,) = self.modules
            trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
            trained = {name: trained[name] for names in order for name in names if name in trained}
        for name, tensor in trained.items():
            whole = held_whole(tensor)
            described[f"trained {name}"] = _form(tensor if whole is None else whole)
        described |= {place.name: f"{place.form} {place.rule}" for place in self.buffers if place.chosen is not None}
        return described | {f"order of optimizer {n}": ", ".join(names) for n, names in enumerate(order)}

    def order(self) -> list[list[str]]:
        """The names of each optimizer's parameters, in its order, by which its state is numbered."""
        named = self._names()
        return [[named.get(id(tensor), "?") for tensor in held_by([optimizer])] for optimizer in self.optimizers]


def require_modules(model: Any) -> None:
    """Refuse to digest what is neither a module nor a list of modules; None stands for all.

    Raises:
        ModelError: it is something else; says what to write.
    """
    for module in model if isinstance(model, list | tuple) else () if model is None else (model,):
        if not isinstance(module, nn.Module):
            raise ModelError(
                f"run.finish needs a module, or a list of modules, and got {_a(module)}: write model, optimizer = "
                f"run.prepare(model, optimizer), and run.finish(model)"
            )


def _a(thing: Any) -> str:
    """A thing by its type, for messages."""
    return f"an object of type {type(thing).__name__}"


def prefixed(modules: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Each module with the prefix of its names: none for a single one, else its number."""
    if len(modules) == 1:
        return [("", modules[0])]
    return [(f"{number}.", module) for number, module in enumerate(modules)]


def tensors_by_name(modules: nn.Module | Sequence[nn.Module]) -> dict[str, Tensor]:
    """All modules' parameters and buffers by name, with the module's number in front if there are several."""
    roots = [modules] if isinstance(modules, nn.Module) else list(modules)
    return {prefix + name: tensor for prefix, module in prefixed(roots) for name, tensor in tensors_of(module).items()}


def _present(buffers: Mapping[str, Any]) -> list[str]:
    return [name for name, buffer in buffers.items() if buffer is not None]


def _check_kinds(modules: Sequence[Any], optimizers: Sequence[Any]) -> None:
    for module in modules:
        if not isinstance(module, nn.Module):
            order = ": write run.prepare(model, optimizer), in this order" if isinstance(module, Optimizer) else ""
            raise ModelError(f"run.prepare needs torch modules, got {type(module).__name__}{order}")
        if any(_averages_gradients(layer) for layer in module.modules()):
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
            raise ModelError(
                f"run.prepare needs torch optimizers, got {type(optimizer).__name__}: run.prepare([model, other], "
                f"[optimizer, other_optimizer], loader) for several"
            )
        closure = signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise ModelError(
                f"{type(optimizer).__name__} wants to compute the loss itself, several times a step (a closure), "
                f"which cannot be distributed among workers: use another optimizer"
            )


def _averages_gradients(module: nn.Module) -> bool:
    """Whether it is one of torch's DistributedDataParallel, or a DataParallel with copies on several devices."""
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
    """The place of each tensor, once. A buffer that is further state as well has the rule that the script gave."""
    further = {id(place.tensor): place for place in further_places(state)}
    places: dict[int, BufferPlace] = {}
    for prefix, root in prefixed(modules):
        for place in places_of(prefix, root):
            if place.tensor.is_meta:  # its stage lies on another device
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
    return _words(tensor.dtype, tensor.shape)


def _words(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def held_by(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """All parameters of optimizers, in their order."""
    groups = chain.from_iterable(map(attrgetter("param_groups"), optimizers))
    return [*chain.from_iterable(map(itemgetter("params"), groups))]


def trained_by(optimizers: Sequence[Optimizer]) -> tuple[int, ...]:
    """The ids of the parameters of optimizers that require a gradient."""
    held = held_by(optimizers)
    return (*map(id, compress(held, map(attrgetter("requires_grad"), held))),)


OUTSIDE = re.compile(r"optimizer\d*\.group\d+\.\d+")
"""The names of parameters that optimizers hold and no module does."""


def outside_of(module_ids: Collection[int], optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """The optimizers' parameters that modules do not hold, by names that follow from their places alone.

    ``module_ids`` are the ids of all parameters and buffers that modules hold.
    """
    named: dict[int, tuple[str, Tensor]] = {}
    for number, optimizer in enumerate(optimizers):
        prefix = f"optimizer{number if len(optimizers) > 1 else ''}"
        for group, settings in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(settings["params"]):
                if id(parameter) not in module_ids:
                    named.setdefault(id(parameter), (f"{prefix}.group{group}.{place}", parameter))
    return dict(named.values())


def require_held(modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Refuse an optimizer that holds nothing of the modules, if one of these has no optimizer.

    Raises:
        ModelError: says what to write.
    """
    parameters = [(module, list(map(slice_of, module.parameters()))) for module in modules]
    own, held = {id(tensor) for _, tensors in parameters for tensor in tensors}, set(map(id, held_by(optimizers)))
    strangers = [
        optimizer for optimizer in optimizers if held_by([optimizer]) and own.isdisjoint(map(id, held_by([optimizer])))
    ]
    waiting = [
        module
        for module, tensors in parameters
        if any(tensor.requires_grad for tensor in tensors) and held.isdisjoint(map(id, tensors))
    ]
    if strangers and waiting:
        kind, model = type(strangers[0]).__name__, type(waiting[0]).__name__
        raise ModelError(
            f"the {kind} holds no parameter of the {model} that run.prepare was given, so that would never be trained: "
            f"was it made of a copy, or before the model was built anew? Make it of this one: "
            f"{kind}(model.parameters(), …). What is not to be trained is frozen before: model.requires_grad_(False)"
        )


def change_of(names: Mapping[int, str], before: Sequence[int], optimizers: Sequence[Optimizer]) -> str:
    """Say which parameter was frozen, unfrozen, added or removed, and what to do.

    ``names`` are by the ids of parameters. ``before`` is an earlier result of :func:`trained_by`.
    """
    now = trained_by(optimizers)
    first = next((identity for identity in (*before, *now) if identity not in now or identity not in before), 0)
    what = "frozen, or taken from its optimizer" if first in before else "unfrozen, or given to an optimizer"
    several = (
        "to train those of one of several optimizers in a call, leave requires_grad as it is, and name the optimizer: "
        "step.run(loss_fn, optimizer=…). Otherwise "
    )
    return (
        f"{names.get(first, 'a parameter')} was {what}: {several if len(optimizers) > 1 else ''}do that before it, or "
        f"call run.prepare again; in a framework's trainer, before a training of its own"
    )
