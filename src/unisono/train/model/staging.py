"""A model whose stages lie on the devices of a worker: which device holds what, and how a single stage is computed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.errors import ModelError
from unisono.train.model.elsewhere import Elsewhere, all_elsewhere, decode, encode, holds_elsewhere, resolved
from unisono.train.model.slices import materialise_layer
from unisono.train.model.stages import StagePlaces, Stages
from unisono.train.model.ties import Ties


@dataclass(slots=True)
class Received:
    """What a block gets from the one before.

    Attributes:
        numbers: the encoded arguments of the module at the cut, see :func:`elsewhere.encode`.
        draw: a function that sets the random generators to their state after the block before.
    """

    numbers: Sequence[int]
    tensors: Sequence[Tensor]
    draw: Callable[[], None]


class Left(BaseException):
    """The forward pass has come to the end of the block that is computed. This is no error, and is always caught.

    Attributes:
        numbers: the encoded arguments of the module at the cut, see :func:`elsewhere.encode`.
        tensors: the tensors that go on to the next block, each once.
    """

    def __init__(self, numbers: Sequence[int], tensors: Sequence[Tensor]) -> None:
        super().__init__()  # without arguments: the text of the exception would contain whole tensors
        self.numbers, self.tensors = numbers, tensors


@dataclass(slots=True)
class _Pass:
    block: int
    received: Received | None
    reached: int = 0
    drawn: Tensor | None = None  # the generator's state when a module of another device was skipped for the first time


class Staging:
    """A model whose stages lie on the devices of a worker.

    Each device runs the model's own forward pass. A module of an earlier stage returns :class:`Elsewhere`; the module
    at the cut gets what was received; at the next cut, the pass ends. What this device does not hold is on the meta
    device: it keeps name, shape and dtype, and takes no memory.

    Args:
        model: the model, still whole, or on the meta device.
        broadcast: a function that sends one device's value to all devices, between two collective calls.

    Attributes:
        times: a file for the times of this device's passes, a line for each attempt; None for none.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Stages,
        placement: StagePlaces,
        broadcast: Callable[[Any, int], Any],
        device: torch.device,
    ) -> None:
        self.stages, self.places, self._broadcast = stages, placement, broadcast
        self._pass: _Pass | None = None
        self.times: Path | None = None
        self._names = {name: number for number, name in enumerate(stages.names)} | _renamed(model)
        ties = Ties([model])
        for number, (name, module) in enumerate(model.named_modules()):
            materialise_layer(name, module, device)
            block = self.block(number)
            is_apart = block != self.block(self._end(number) - 1)  # its own buffers are used in several blocks
            _staged[module] = _Part(self, name)
            if placement.device(block) != placement.rank:
                _let_go(module, keep_buffers=is_apart)
        ties.restore()
        self._cover(model)
        own_trained = [tensor for tensor in model.parameters() if tensor.requires_grad and not tensor.is_meta]
        if not own_trained:
            raise ModelError(
                f"run.pipeline: {self.title(placement.own[0])} has no parameter to train, so its device has nothing to "
                f"do: cut elsewhere, or use fewer devices"
            )

    def block(self, number: int) -> int:
        """The block of a module, by its number."""
        stage = self.stages.stage(number)
        return sum(first <= stage for first in self.places.firsts) - 1

    def owner(self, name: str) -> int:
        """The device that holds a parameter or buffer, by its name."""
        return self.places.device(self.block_of(name))

    def has_module_of(self, name: str) -> bool:
        """Whether the model has a module that a parameter or buffer of this name could belong to."""
        return name.rpartition(".")[0] in self._names

    def block_of(self, name: str) -> int:
        """The block of a parameter, by its name."""
        return self.block(self._names[name.rpartition(".")[0]])

    def title(self, block: int) -> str:
        """A block in words, for messages: its stages."""
        firsts = (*self.places.firsts, self.stages.count)
        return self.stages.title(firsts[block], firsts[block + 1] - 1)

    def whole(self, tensor: Tensor, owner: int) -> Tensor:
        """A tensor that one device holds, sent to all of them. Collective."""
        result: Tensor = self._broadcast(tensor.detach() if owner == self.places.rank else None, owner)
        return result

    def values_of_devices(self, value: Any) -> Iterator[Any]:
        """The values of all devices, in their order. Collective."""
        return (self._broadcast(value, device) for device in range(self.places.devices))

    @contextmanager
    def computing(self, block: int, received: Received | None) -> Iterator[None]:
        """Within the context, the model's forward pass computes a block, and raises :class:`Left` at its end."""
        self._pass = _Pass(block, received)
        try:
            yield
            if self._pass.reached != block:
                raise ModelError(
                    f"the forward pass has not come to {self._cut(self._pass.reached + 1)!r}: a model in stages goes "
                    f"through all of them, once for each loss"
                )
            if block + 1 < len(self.places.firsts):
                raise ModelError(
                    f"the forward pass has not come to {self._cut(block + 1)!r} behind {self.title(block)}: a model in "
                    f"stages goes through all of them, once for each loss"
                )
        finally:
            self._pass = None

    def _cut(self, block: int) -> str:
        return self.stages.cuts[self.places.firsts[block] - 1]

    def _end(self, number: int) -> int:
        """The number after that of the last module inside a module."""
        name, names = self.stages.names[number], self.stages.names
        inside = (other for other in range(number + 1, len(names)) if not name or names[other].startswith(f"{name}."))
        return max(inside, default=number) + 1

    def _cover(self, model: nn.Module) -> None:
        """Replace the forward methods of modules that lie within one block, and of the modules at the cuts."""
        cuts = {self._cut(block): block for block in range(1, len(self.places.firsts))}
        covered = ""
        for number, (name, module) in enumerate(model.named_modules()):
            block, last = self.block(number), self.block(self._end(number) - 1)
            if covered and name.startswith(covered):
                continue
            is_called = type(module).forward is not nn.Module.forward
            if name and is_called and (block == last or name in cuts):
                within = block if block == last else None
                module.forward = _Cover(self, name, module.forward, within, cuts.get(name))
                covered = f"{name}." if within is not None else covered

    def enter(self, name: str, block: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Note that the forward pass has come to the module at a cut. Return its arguments and keyword arguments.

        Raises:
            Left: the block that is computed ends here.
        """
        current = self._require_pass(name)
        if current.reached != block - 1:
            self._refuse_order(name, block)
        current.reached = block
        if block == current.block + 1:
            raise Left(*encode((resolved(args), resolved(kwargs)), lambda: self.skipped(name)))
        if block != current.block or current.received is None:
            return args, kwargs
        if current.drawn is not None and not torch.equal(current.drawn, torch.get_rng_state()):
            raise ModelError(
                f"the forward pass draws random numbers before {name!r}, outside of the modules of the stages: draw "
                f"them in a module, in the stage that it belongs to"
            )
        for value in all_elsewhere((args, kwargs)):
            value.draw = current.received.draw
        try:
            args, kwargs = decode(current.received.numbers, current.received.tensors, (args, kwargs))
        except ModelError as error:
            raise ModelError(
                f"what {name!r} is called with {error}: the forward pass depends on values of earlier stages, and a "
                f"model in stages is a chain. Hand on tensors and numbers, or lists, tuples and dicts of them"
            ) from error
        if not torch.is_grad_enabled() and any(tensor.requires_grad for tensor in current.received.tensors):
            raise ModelError(
                f"{name!r} is called without gradients, as torch.utils.checkpoint does with use_reentrant=True, and a "
                f"cut is there: the layers of its stage would not be trained. Say use_reentrant=False"
            )
        current.received.draw()
        return args, kwargs

    def again(self, name: str, args: Any, kwargs: Any) -> None:
        """Set the random generators for the module at a cut that is computed once more, in a backward pass."""
        if self.places.device(self.block(self._names[name])) != self.places.rank:
            return
        draw = next((value.draw for value in all_elsewhere((args, kwargs)) if value.draw is not None), None)
        if draw is None:
            raise ModelError(
                f"{name!r}, where a stage begins, is computed again in a backward pass, and is called with nothing of "
                f"the stage before: call torch.utils.checkpoint inside of the module"
            )
        draw()

    def within(self, name: str, block: int) -> bool:
        """Whether a module within a block is to be computed now; else its block comes before the computed one."""
        if (current := self._pass) is None:
            if self.places.device(block) == self.places.rank:
                return True  # computed again in a backward pass
            self._require_pass(name)
        assert current is not None
        if current.reached != block:
            self._refuse_order(name, block)
        if block != current.block and current.drawn is None:
            current.drawn = torch.get_rng_state()
        return block == current.block

    def skipped(self, name: str) -> str:
        """The error message for a module that gets a value which has not been received."""
        return (
            f"{name!r} gets a value that an earlier stage has computed, and that was no argument of the module at the "
            f"cut: a model in stages is a chain. Hand it on as an argument, or cut elsewhere"
        )

    def _require_pass(self, name: str) -> _Pass:
        if self._pass is None:
            raise ModelError(
                f"{name!r} is called outside of a loss function, run.evaluate and run.predict, or in a "
                f"torch.utils.checkpoint across a cut, and other devices hold a part of the model: call the model "
                f"there alone, and checkpoint single layers"
            )
        return self._pass

    def _refuse_order(self, name: str, block: int) -> None:
        assert self._pass is not None
        reached = self._pass.reached
        place = f"behind {self._cut(reached)!r}" if reached else f"before {self._cut(1)!r}"
        raise ModelError(
            f"{name!r} belongs to {self.title(block)}, since modules are cut in the order in which the model registers "
            f"them, and the forward pass calls it {place}, or once more: register modules in the order of their calls, "
            f"and call the model once for each loss"
        )


class _Cover:
    """A replacement for the forward method of a module."""

    def __init__(self, staging: Staging, name: str, forward: Any, within: int | None, begins: int | None) -> None:
        self._staging, self._name, self._forward = staging, name, forward
        self._within, self._begins = within, begins

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._begins is not None and self._staging._pass is not None:
            if getattr(getattr(self._forward, "__self__", None), "_backward_hooks", None):
                raise ModelError(
                    f"{self._name!r}, where a stage begins, has a backward hook (register_full_backward_hook), which "
                    f"would not see the gradient of what another device has sent: register it for a module inside of it"
                )
            args, kwargs = self._staging.enter(self._name, self._begins, args, kwargs)
        elif self._begins is not None:
            self._staging.again(self._name, args, kwargs)
        if self._within is not None:
            if not self._staging.within(self._name, self._within):
                return Elsewhere()
            if all_elsewhere((args, kwargs)):
                args, kwargs = resolved(args), resolved(kwargs)
                if holds_elsewhere((args, kwargs)):
                    raise ModelError(self._staging.skipped(self._name))
        return self._forward(*args, **kwargs)


def _renamed(model: nn.Module) -> dict[str, int]:
    """The numbers of modules by the names that their tensors have in checkpoints, where these differ.

    Wrappers such as torch's ``checkpoint_wrapper`` leave themselves out of these names.
    """
    numbers = {id(tensor): number for number, module in enumerate(model.modules()) for tensor in _own(module)}
    names = {name for name, _ in model.named_modules()}
    kept = {name.rpartition(".")[0]: tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    return {name: numbers[id(tensor)] for name, tensor in kept.items() if name not in names and id(tensor) in numbers}


def _own(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _let_go(module: nn.Module, *, keep_buffers: bool) -> None:
    """Replace a module's own parameters and buffers by tensors on the meta device."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            empty = torch.empty_like(parameter, device="meta")
            module._parameters[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for name, buffer in {} if keep_buffers else module._buffers.items():
        if buffer is not None:
            module._buffers[name] = torch.empty_like(buffer, device="meta")


# Functions for models that may lie in stages.


@dataclass(frozen=True, slots=True)
class _Part:
    staging: Staging
    name: str


_staged: weakref.WeakKeyDictionary[nn.Module, _Part] = weakref.WeakKeyDictionary()


def staging_of(modules: Sequence[nn.Module]) -> Staging | None:
    """The staging of models that lie in stages; None if they do not."""
    return next((_staged[module].staging for module in modules if module in _staged), None)


def mark_owners(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Note in the tensors of a module which device holds them, if it lies in stages."""
    if (part := _staged.get(module)) is not None:
        for name, tensor in tensors.items():
            full = f"{part.name}.{name}".lstrip(".")
            tensor._owner = (part.staging, part.staging.owner(full))  # type: ignore[attr-defined]


def whole_of_owner(tensor: Tensor) -> Tensor | None:
    """A tensor that :func:`mark_owners` has marked, whole; None for others. Collective among a worker's devices."""
    owner: tuple[Staging, int] | None = getattr(tensor, "_owner", None)
    return None if owner is None else owner[0].whole(tensor, owner[1])


def require_memory(tensor: Tensor, name: str) -> None:
    """Refuse a tensor on the meta device.

    Raises:
        ModelError: it is there; names it, and says what to do.
    """
    if tensor.is_meta:
        raise ModelError(
            f"{name} is on the meta device, without memory and values: materialise it first (module.to_empty(device="
            f"run.device) and its first values, or make it on the CPU)"
        )


def move(module: nn.Module, device: torch.device) -> None:
    """Move a module to a device, except for the tensors that other devices hold.

    Raises:
        ModelError: a tensor is on the meta device, and no other device holds it; says what to do.
    """
    if staging_of([module]) is None:
        for name, tensor in chain(module.named_parameters(), module.named_buffers()):
            require_memory(tensor, name)
        module.to(device)
    else:
        module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


_groups: weakref.WeakKeyDictionary[Optimizer, list[list[str]]] = weakref.WeakKeyDictionary()


def groups_of(optimizer: Optimizer) -> list[list[str]]:
    """The names of the parameters of all stages that an optimizer was given, by its groups."""
    return _groups[optimizer]


def update_own(modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Remove the parameters of other devices from optimizers, if models lie in stages.

    Raises:
        ModelError: a parameter to train belongs to no stage.
    """
    if staging_of(modules) is None:
        return
    if len(modules) > 1:
        raise ModelError(
            "run.prepare was given a model in stages and others besides: put all of them into one module, in the order "
            "of their calls, and give that to run.pipeline"
        )
    names = {id(tensor): name for name, tensor in modules[0].named_parameters()}
    for optimizer in optimizers:
        held = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        if any(id(tensor) not in names for tensor in held):
            raise ModelError(
                "the optimizer holds a parameter that belongs to no stage: make it a part of the model before "
                "run.pipeline, and the optimizer after it"
            )
        if optimizer not in _groups or any(tensor.is_meta for tensor in held):
            _groups[optimizer] = [[names[id(tensor)] for tensor in group["params"]] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [tensor for tensor in group["params"] if not tensor.is_meta]
        for tensor in [tensor for tensor in optimizer.state if tensor.is_meta]:
            del optimizer.state[tensor]
