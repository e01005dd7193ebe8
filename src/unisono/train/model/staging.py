"""A model whose stages lie on the devices of a worker: who holds what, and how one stage is computed by itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.errors import ModelError
from unisono.train.model.elsewhere import Elsewhere, all_elsewhere, holds_elsewhere, resolved
from unisono.train.model.slices import materialise_layer
from unisono.train.model.stage_values import heard, told
from unisono.train.model.stages import Placement, Stages
from unisono.train.model.ties import Ties


@dataclass(slots=True)
class Received:
    """What a block gets from the one before.

    Attributes:
        numbers: the form of what the module at the cut is called with, as :func:`stage_values.told` has it.
        tensors: the tensors.
        draw: a function that sets the random generators as they were behind the block before.
    """

    numbers: Sequence[int]
    tensors: Sequence[Tensor]
    draw: Callable[[], None]


class Left(BaseException):
    """The forward pass has come to the end of the block that is computed. No error: whoever computes it catches it.

    Attributes:
        numbers: see :class:`Received`.
        tensors: what goes on to the next block, each tensor once.
    """

    def __init__(self, numbers: Sequence[int], tensors: Sequence[Tensor]) -> None:
        super().__init__()  # without arguments: whoever asks an exception for its text would have tensors printed
        self.numbers, self.tensors = numbers, tensors


@dataclass(slots=True)
class _Pass:
    block: int
    received: Received | None
    reached: int = 0
    drawn: Tensor | None = None  # the generator's state when something of another device was passed by


class Staging:
    """A model whose stages lie on the devices of a worker.

    Each device runs the model's own forward pass. What belongs to an earlier stage gives :class:`Elsewhere`; the module
    at the cut gets what was received; at the next cut the pass is left. What this device does not hold is on the meta
    device: it keeps name, shape and dtype, and takes no memory.

    Args:
        model: the model, all of which is there still, or on the meta device.
        stages: its stages.
        placement: the placement of their blocks.
        broadcast: a function that gives all devices what one of them has, between two collective calls.
        device: the device to compute on.

    Attributes:
        times: a file for the times of this device's passes, a line for each attempt; None for none.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Stages,
        placement: Placement,
        broadcast: Callable[[Any, int], Any],
        device: torch.device,
    ) -> None:
        self.stages, self.placement, self._broadcast = stages, placement, broadcast
        self._pass: _Pass | None = None
        self.times: Path | None = None
        self._names = {name: number for number, name in enumerate(stages.names)} | _renamed(model)
        ties = Ties([model])
        for number, (name, module) in enumerate(model.named_modules()):
            materialise_layer(name, module, device)
            block = self.block(number)
            is_apart = block != self.block(self._end(number) - 1)  # its own buffers are used in several stages
            _staged[module] = _Part(self, name)
            if placement.device(block) != placement.rank:
                _let_go(module, keep_buffers=is_apart)
        ties.restore()
        self._cover(model)
        held = [one for one in model.parameters() if one.requires_grad and not one.is_meta]
        if not held:
            raise ModelError(
                f"run.pipeline: {self.title(placement.own[0])} has no parameter to train, so its device has nothing to "
                f"do: cut elsewhere, or use fewer devices"
            )

    def block(self, number: int) -> int:
        """The block of a module, by its number."""
        stage = self.stages.stage(number)
        return sum(first <= stage for first in self.placement.firsts) - 1

    def owner(self, name: str) -> int:
        """The device that holds a parameter or buffer, by its name."""
        return self.placement.device(self.block_of(name))

    def knows(self, name: str) -> bool:
        """Whether a name is one of a parameter or buffer of the model."""
        return name.rpartition(".")[0] in self._names

    def block_of(self, name: str) -> int:
        """The block of a parameter, by its name."""
        return self.block(self._names[name.rpartition(".")[0]])

    def title(self, block: int) -> str:
        """A block for people: its stages."""
        firsts = (*self.placement.firsts, self.stages.count)
        return self.stages.title(firsts[block], firsts[block + 1] - 1)

    def whole(self, tensor: Tensor, owner: int) -> Tensor:
        """A tensor that one device holds, on all of them. Collective."""
        found: Tensor = self._broadcast(tensor.detach() if owner == self.placement.rank else None, owner)
        return found

    def told(self, value: Any) -> Iterator[Any]:
        """What each device has to say, in their order. Collective."""
        return (self._broadcast(value, device) for device in range(self.placement.devices))

    @contextmanager
    def computing(self, block: int, received: Received | None) -> Iterator[None]:
        """Within, the model's forward pass computes a block, and raises :class:`Left` at its end."""
        self._pass = _Pass(block, received)
        try:
            yield
            if self._pass.reached != block:
                raise ModelError(
                    f"the forward pass has not come to {self._cut(self._pass.reached + 1)!r}: a model in stages goes "
                    f"through all of them, once for each loss"
                )
            if block + 1 < len(self.placement.firsts):
                raise ModelError(
                    f"the forward pass has not come to {self._cut(block + 1)!r} behind {self.title(block)}: a model in "
                    f"stages goes through all of them, once for each loss"
                )
        finally:
            self._pass = None

    def _cut(self, block: int) -> str:
        return self.stages.cuts[self.placement.firsts[block] - 1]

    def _end(self, number: int) -> int:
        """Behind the last module inside of one."""
        name, names = self.stages.names[number], self.stages.names
        inside = (each for each in range(number + 1, len(names)) if not name or names[each].startswith(f"{name}."))
        return max(inside, default=number) + 1

    def _cover(self, model: nn.Module) -> None:
        """Take the place of the forward methods of all that lies within a block, and of the modules at the cuts."""
        cuts = {self._cut(block): block for block in range(1, len(self.placement.firsts))}
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
        """The forward pass comes to the module at a cut; returns what that is called with.

        Raises:
            Left: the block that is computed ends here.
        """
        now = self._require_pass(name)
        if now.reached != block - 1:
            self._refuse_order(name, block)
        now.reached = block
        if block == now.block + 1:
            raise Left(*told((resolved(args), resolved(kwargs)), lambda: self.skipped(name)))
        if block != now.block or now.received is None:
            return args, kwargs
        if now.drawn is not None and not torch.equal(now.drawn, torch.get_rng_state()):
            raise ModelError(
                f"the forward pass draws random numbers before {name!r}, outside of the modules of the stages: draw "
                f"them in a module, in the stage that it belongs to"
            )
        for each in all_elsewhere((args, kwargs)):
            each.draw = now.received.draw
        try:
            args, kwargs = heard(now.received.numbers, now.received.tensors, (args, kwargs))
        except ModelError as error:
            raise ModelError(
                f"what {name!r} is called with {error}: the forward pass depends on values of earlier stages, and a "
                f"model in stages is a chain. Hand on tensors and numbers, or lists, tuples and dicts of them"
            ) from error
        if not torch.is_grad_enabled() and any(each.requires_grad for each in now.received.tensors):
            raise ModelError(
                f"{name!r} is called without gradients, as torch.utils.checkpoint does with use_reentrant=True, and a "
                f"cut is there: the layers of its stage would not be trained. Say use_reentrant=False"
            )
        now.received.draw()
        return args, kwargs

    def again(self, name: str, args: Any, kwargs: Any) -> None:
        """The module at a cut is computed once more, in a backward pass: it is to draw what it drew before."""
        if self.placement.device(self.block(self._names[name])) != self.placement.rank:
            return
        draw = next((each.draw for each in all_elsewhere((args, kwargs)) if each.draw is not None), None)
        if draw is None:
            raise ModelError(
                f"{name!r}, where a stage begins, is computed again in a backward pass, and is called with nothing of "
                f"the stage before: call torch.utils.checkpoint inside of the module"
            )
        draw()

    def within(self, name: str, block: int) -> bool:
        """Whether a module within a block is to be computed now; else the block comes before."""
        if (now := self._pass) is None:
            if self.placement.device(block) == self.placement.rank:
                return True  # computed again in a backward pass
            self._require_pass(name)
        assert now is not None
        if now.reached != block:
            self._refuse_order(name, block)
        if block != now.block and now.drawn is None:
            now.drawn = torch.get_rng_state()
        return block == now.block

    def skipped(self, name: str) -> str:
        """Why a module cannot be computed that gets what has not been received."""
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
        where = f"behind {self._cut(reached)!r}" if reached else f"before {self._cut(1)!r}"
        raise ModelError(
            f"{name!r} belongs to {self.title(block)}, since modules are cut in the order in which the model registers "
            f"them, and the forward pass calls it {where}, or once more: register modules in the order of their calls, "
            f"and call the model once for each loss"
        )


class _Cover:
    """What stands in the place of the forward method of a module."""

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
    """The numbers of modules by the names that their tensors have in checkpoints, where these are others.

    Wrappers leave themselves out of them, such as torch's ``checkpoint_wrapper``.
    """
    numbers = {id(each): number for number, module in enumerate(model.modules()) for each in _own(module)}
    names = {name for name, _ in model.named_modules()}
    kept = {name.rpartition(".")[0]: tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    return {name: numbers[id(each)] for name, each in kept.items() if name not in names and id(each) in numbers}


def _own(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _let_go(module: nn.Module, *, keep_buffers: bool) -> None:
    """Have a module's own parameters and buffers on the meta device."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            hollow = torch.empty_like(parameter, device="meta")
            module._parameters[name] = nn.Parameter(hollow, requires_grad=parameter.requires_grad)
    for name, buffer in {} if keep_buffers else module._buffers.items():
        if buffer is not None:
            module._buffers[name] = torch.empty_like(buffer, device="meta")


# What others ask of a model that may lie in stages.


@dataclass(frozen=True, slots=True)
class _Part:
    staging: Staging
    name: str


_staged: weakref.WeakKeyDictionary[nn.Module, _Part] = weakref.WeakKeyDictionary()


def staging_of(modules: Sequence[nn.Module]) -> Staging | None:
    """How models lie in stages; None if they do not."""
    return next((_staged[module].staging for module in modules if module in _staged), None)


def mark_owners(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Let tensors of a module know which device holds them, if it lies in stages."""
    if (part := _staged.get(module)) is not None:
        for name, tensor in tensors.items():
            full = f"{part.name}.{name}".lstrip(".")
            tensor._owner = (part.staging, part.staging.owner(full))  # type: ignore[attr-defined]


def whole_of_owner(tensor: Tensor) -> Tensor | None:
    """A tensor of :func:`mark_owners`, on all devices; None for others. Collective among the devices of a worker."""
    owner: tuple[Staging, int] | None = getattr(tensor, "_owner", None)
    return None if owner is None else owner[0].whole(tensor, owner[1])


def move(module: nn.Module, device: torch.device) -> None:
    """Have all of a module on a device, without what other devices hold."""
    if staging_of([module]) is None:
        module.to(device)
    else:
        module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


_groups: weakref.WeakKeyDictionary[Optimizer, list[list[str]]] = weakref.WeakKeyDictionary()


def groups_of(optimizer: Optimizer) -> list[list[str]]:
    """The names of the parameters of all stages that an optimizer was given, by its groups."""
    return _groups[optimizer]


def update_own(modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Have optimizers update what this device holds, if models lie in stages.

    Raises:
        ModelError: something is to be trained that belongs to no stage.
    """
    if staging_of(modules) is None:
        return
    if len(modules) > 1:
        raise ModelError(
            "run.prepare was given a model in stages and others besides: put all of them into one module, in the order "
            "of their calls, and give that to run.pipeline"
        )
    names = {id(parameter): name for name, parameter in modules[0].named_parameters()}
    for optimizer in optimizers:
        held = [each for group in optimizer.param_groups for each in group["params"]]
        if any(id(each) not in names for each in held):
            raise ModelError(
                "the optimizer holds a parameter that belongs to no stage: make it a part of the model before "
                "run.pipeline, and the optimizer after it"
            )
        if optimizer not in _groups or any(each.is_meta for each in held):
            _groups[optimizer] = [[names[id(each)] for each in group["params"]] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [each for each in group["params"] if not each.is_meta]
        for each in [each for each in optimizer.state if each.is_meta]:
            del optimizer.state[each]
