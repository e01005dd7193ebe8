"""Models whose parameters lie in slices on the devices of a worker, by torch's ``fully_shard``."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from unisono.errors import ModelError
from unisono.train.model.shared_work import cost_of
from unisono.train.model.ties import Ties
from unisono.train.model.update import READERS

# Torch's modules for models in slices take seconds to import, so only models in slices import them.

_slices: WeakIdKeyDictionary = WeakIdKeyDictionary()
_wholes: WeakIdKeyDictionary = WeakIdKeyDictionary()


def is_sliced(tensor: Tensor) -> bool:
    """Whether a tensor lies in slices on several devices."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def slice_of(tensor: Tensor) -> Tensor:
    """This device's part of a tensor: its slice along the first dimension, or all of a tensor without slices.

    The slice of a parameter is the same object each time, with a gradient of its own: optimizers update it.
    """
    if not is_sliced(tensor):
        return tensor
    part: Tensor | None = _slices.get(tensor)
    if part is None:
        with torch.no_grad():
            part = tensor.to_local()  # type: ignore[attr-defined]
        if isinstance(tensor, nn.Parameter):
            part = _slices[tensor] = nn.Parameter(part, requires_grad=tensor.requires_grad)
            _wholes[part] = weakref.ref(tensor)
    return part


def held_whole(parameter: Tensor) -> Tensor | None:
    """Torch's own object for the parameter of a slice; None for a tensor that is no slice."""
    reference = _wholes.get(parameter)
    return None if reference is None else reference()


def sliced_like(tensor: Tensor, value: Tensor) -> Tensor:
    """A value, this device's slice, in torch's form for slices if ``tensor`` has it; else the value itself."""
    if not is_sliced(tensor):
        return value
    kind: Any = type(tensor.detach())
    sliced: Any = tensor
    result: Tensor = kind.from_local(
        value, sliced.device_mesh, sliced.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return result


def whole_of(tensor: Tensor) -> Tensor:
    """A tensor with all its slices. Collective among the devices of a worker, if it has slices."""
    held = tensor if is_sliced(tensor) else held_whole(tensor)
    return tensor if held is None else held.full_tensor()  # type: ignore[attr-defined]


def whole_like(held: Tensor, value: Tensor) -> Tensor:
    """All slices of a tensor that is cut like another one. Collective among the devices of a worker.

    ``held`` is torch's own object for the other one, ``value`` this device's slice.
    """
    return whole_of(sliced_like(held, value))


def whole_gradient(parameter: Tensor) -> Tensor:
    """The gradient of a parameter with all its slices. Collective among the devices of a worker, if it has slices."""
    held = held_whole(parameter)
    assert parameter.grad is not None, "there is a gradient"
    return parameter.grad if held is None else whole_like(held, parameter.grad)


def cut_like(held: Tensor, value: Tensor) -> Tensor:
    """This device's slice of a whole tensor, cut like another one; all of it if the shapes differ. No copy."""
    if value.shape != held.shape:
        return value
    mesh: Any = held.device_mesh  # type: ignore[attr-defined]
    (placement,) = held.placements  # type: ignore[attr-defined]
    if not placement.is_shard():
        return value
    chunks, rank = value.chunk(mesh.size(), placement.dim), mesh.get_local_rank()
    return chunks[rank] if rank < len(chunks) else value.narrow(placement.dim, 0, 0)


def require_options(options: Mapping[str, Any]) -> None:
    """Refuse options of torch's ``fully_shard`` that would change bits, or that do not apply to a worker.

    Raises:
        ModelError: names the option, and says what to do.
    """
    for name, value in options.items():
        if name not in _WAYS:
            raise ModelError(f"run.fully_shard takes no {name}=; of torch's options it takes reshard_after_forward=")
        if value is None or (name == "reshard_after_forward" and isinstance(value, bool)) or _is_default(name, value):
            continue
        raise ModelError(f"run.fully_shard({name}={value!r:.60}): {_WAYS[name]}")


_WAYS = {
    "reshard_after_forward": "use True or False",
    "mesh": "the devices are those of the worker: leave it out, and start workers with --devices-per-worker",
    "dp_mesh_dims": "the devices are those of the worker: leave it out, and start workers with --devices-per-worker",
    "shard_placement_fn": "slices are cut along the first dimension, on which bits depend: leave it out",
    "mp_policy": "it would decide bits on several devices alone: leave it out, and say "
    "unisono.init(arithmetic={'precision': 'bf16'})",
    "offload_policy": "slices stay on their devices: leave it out, and spread the model over more of them",
    "ignored_params": "gradients are added up in slices alone: only frozen parameters can be left out",
}


def _is_default(name: str, value: Any) -> bool:
    """Whether an option has the value that it has by default, or leaves out frozen parameters only."""
    if name == "ignored_params":
        return all(isinstance(parameter, Tensor) and not parameter.requires_grad for parameter in value)
    if name in ("mp_policy", "offload_policy"):
        from torch.distributed import fsdp  # a caller that gives such an option has imported it already

        return bool(value == {"mp_policy": fsdp.MixedPrecisionPolicy, "offload_policy": fsdp.OffloadPolicy}[name]())
    return False


def slice_modules(modules: Sequence[nn.Module], mesh: DeviceMesh, gathering: Any, **options: Any) -> None:
    """Cut modules' parameters into slices, one for each device of a worker, except those that are in slices already.

    Modules inside others have to be sliced before these. ``gathering`` is in FSDP's form (``AllGather``); ``options``
    are further arguments of torch's ``fully_shard``.

    Raises:
        ModelError: a parameter has no dimension to cut; names it.
    """
    for module in modules:
        for name, parameter in module.named_parameters():
            if not parameter.dim():
                raise ModelError(f"{name} is a single number, which cannot be cut: give it the shape (1,)")
    from torch.distributed.fsdp import fully_shard  # takes seconds to load

    # Also for the outermost module, which torch leaves gathered by default: between two steps all are in slices.
    fully_shard(list(modules), mesh=mesh, **{"reshard_after_forward": True, **options})
    sliced: Any = modules[0]
    for group in sliced._get_fsdp_state()._fsdp_param_groups:  # a module may have no parameters of its own
        group._all_gather_comm = gathering


def forget_passes(modules: Sequence[nn.Module]) -> None:
    """Reset models to their state between two passes, after a pass that was broken off. Not collective."""
    for root in modules:
        for module in root.modules():
            state = getattr(module, "_get_fsdp_state", None)
            if state is not None and state()._is_root:
                module.reset_iter_state()  # type: ignore[operator]
    for unit in units_of(modules):
        for parameter in unit.parameters:
            parameter.clear()


def let_go_of_gathered(modules: Sequence[nn.Module]) -> None:
    """Cut parameters into slices again that a pass without a backward pass has gathered. Not collective."""
    for root in modules:
        for module in root.modules():
            if hasattr(module, "_get_fsdp_state"):
                module.reshard()  # type: ignore[operator]


def materialise(modules: Sequence[nn.Module], device: torch.device) -> None:
    """Move modules to a device; tensors on the meta device get the first values that ``reset_parameters`` sets.

    Tied tensors stay tied, and have the values that the first of their layers sets.

    Raises:
        ModelError: a layer on the meta device has no such method; names it.
    """
    ties = Ties(modules)
    for module in modules:
        for name, layer in module.named_modules():
            materialise_layer(name, layer, device)
    ties.restore()
    for module in modules:
        module.to(device)


def materialise_layer(name: str, layer: nn.Module, device: torch.device) -> None:
    """Give a layer's own tensors on the meta device their first values; modules in it are left alone.

    Raises:
        ModelError: the layer has no ``reset_parameters`` to set them; names it.
    """
    tensors = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
    if not any(tensor.is_meta for tensor in tensors):
        return
    if not callable(reset := getattr(layer, "reset_parameters", None)):
        raise ModelError(
            f"{name or type(layer).__name__} ({type(layer).__name__}) is on the meta device, and has no "
            f"reset_parameters() to set its first values: give its class one, or build it on {device}"
        )
    layer.to_empty(device=device, recurse=False)
    reset()


# Slices as torch's FSDP groups them.


@dataclass(frozen=True, slots=True)
class UnitParameter:
    """A parameter of an FSDP unit.

    Attributes:
        start: the offset of the slice in this device's row of the unit's gradients, in elements.
        padded: the number of elements of a slice with its padding, the same on all devices.
        held: torch's own object for it.
    """

    slice: Tensor
    start: int
    padded: int
    held: Any

    def of(self, row: Tensor) -> Tensor:
        """This parameter's part of a row."""
        return row.as_strided(self.slice.shape, self.held.contiguous_sharded_stride, row.storage_offset() + self.start)

    @property
    def gathered(self) -> Tensor | None:
        """The parameter with all its slices, as passes see it; None before the first one."""
        parameter: Tensor | None = getattr(self.held, "_unsharded_param", None)
        return parameter

    def clear(self) -> None:
        """Delete the gradients that torch keeps for it."""
        self.held.sharded_param.grad = self.held.unsharded_accumulated_grad = None
        if self.gathered is not None:
            self.gathered.grad = None


@dataclass(frozen=True, slots=True)
class Unit:
    """The parameters that FSDP gathers, and reduces, together.

    Attributes:
        modules: the modules; torch keeps the unit's state at the first of them.
        parameters: its parameters that require gradients, in the order of its rows.
    """

    name: str
    modules: Sequence[Any]
    parameters: tuple[UnitParameter, ...]


def units_of(modules: Sequence[nn.Module]) -> list[Unit]:
    """The FSDP units of modules, in the modules' order; none for modules that are not in slices."""
    return [unit for root in modules for unit in _units_of(root)]


def _units_of(root: nn.Module) -> Iterator[Unit]:
    units = dict[int, tuple[Any, dict[str, Any]]]()
    for name, module in root.named_modules():
        if (state := getattr(module, "_get_fsdp_state", None)) is not None:
            units.setdefault(id(state()), (state(), {}))[1][name or type(root).__name__] = module
    for state, modules in units.values():
        for group in state._fsdp_param_groups:
            parameters, start = [], 0
            for held in group.fsdp_params:
                if held.sharded_param.requires_grad:
                    padded = held.padded_sharded_param_size.numel()
                    parameters.append(UnitParameter(slice_of(held.sharded_param), start, padded, held))
                    start += padded
            yield Unit(" and ".join(modules), tuple(modules.values()), tuple(parameters))


def update_slices(optimizers: Sequence[Optimizer]) -> None:
    """Replace the parameters of optimizers by this device's slices of them.

    Raises:
        ModelError: an optimizer is not known to update tensors element by element or as whole matrices, or its result
            for an element depends on the element's place in memory; says what to use.
    """
    for optimizer in optimizers:
        groups = optimizer.param_groups
        if not any(is_sliced(parameter) for group in groups for parameter in group["params"]):
            continue
        name = type(optimizer).__name__
        if cost_of(optimizer) is not None:
            _require_slices(name, [parameter for group in groups for parameter in group["params"]])
        elif type(optimizer) not in READERS:
            known = ", ".join(kind.__name__ for kind in READERS)
            raise ModelError(
                f"{name} may need whole tensors, and each device has slices of them: use one of torch's {known}, Muon; "
                f"or unisono.whole_matrix({name}), if it updates each tensor by itself"
            )
        if any(group.get("fused") for group in groups):
            raise ModelError(
                f"{name}(fused=True) gives an element other bits depending on where its slice begins: leave fused out"
            )
        for group in groups:
            group["params"] = [slice_of(parameter) for parameter in group["params"]]
        states = [(slice_of(parameter), state) for parameter, state in optimizer.state.items()]
        optimizer.state.clear()
        for parameter, state in states:  # some optimizers have a state before their first step
            optimizer.state[parameter] = {name: slice_of(value) for name, value in state.items()}


def _require_slices(name: str, parameters: Sequence[Any]) -> None:
    """Refuse to gather whole matrices of parameters that are not in slices along the first dimension."""
    if not all(
        is_sliced(tensor) and all(placement.is_shard(0) for placement in tensor.placements) for tensor in parameters
    ):
        raise ModelError(
            f"{name} updates whole matrices, and some of them lie in parts along another dimension, as run.parallelize "
            f"cuts them, or in no slices: use run.fully_shard for all, or an optimizer that goes element by element"
        )


def require_sliced(parameters: Mapping[str, Tensor], devices: int) -> None:
    """Refuse to train a parameter that each device has for itself: the devices' gradients would not be added up.

    Raises:
        ModelError: names a parameter.
    """
    for name, parameter in parameters.items():
        if held_whole(parameter) is None:
            raise ModelError(
                f"{name} is no part of a model in slices, and each worker has {devices} devices: call "
                f"run.fully_shard(model) for the whole model, last of all, before the optimizer is made"
            )
