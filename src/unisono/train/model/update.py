"""The update of parameters by optimizers, and the hyperparameters that it uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from numbers import Integral, Real
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, optim
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from unisono.errors import JobError

# Hyperparameters, in the form in which workers send them to each other.

UNKNOWN = object()
"""Stands for a value that JSON does not have."""

PLAIN = {type(None), bool, int, float, str}
"""Types of values that are JSON as they are."""


def hyperparameters_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The hyperparameters of each group by name, as JSON values: numbers, switches, texts, and lists of them.

    Values of other types are left out.
    """
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        groups.append(values := {})
        for name, value in group.items():
            if name == "params":
                continue
            if (plain := value if type(value) in PLAIN else _plain(value)) is not UNKNOWN:
                values[name] = plain
    return groups


def settings_digest(optimizers: Sequence[Optimizer]) -> int:
    """A number of 32 bits that follows from the optimizers' hyperparameters."""
    return crc32(repr([*map(hyperparameters_of, optimizers)]).encode())


def set_hyperparameters(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Set hyperparameters that :func:`hyperparameters_of` has returned for an optimizer with the same groups."""
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        group.update({name: _like(group.get(name), value) for name, value in values.items()})


SCHEDULED = {"initial_lr": ("lr",), "base_momentum": ("momentum", "betas")}
"""The hyperparameters that a schedule changes from step to step, by the key that it then adds to the group."""


def replaced_hyperparameters(
    optimizer: Optimizer, before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Descriptions of the hyperparameters that have changed, without those that a schedule changes.

    ``before`` and ``after`` are the hyperparameters at two moments, group by group.
    """
    descriptions = []
    for number, (old, new) in enumerate(zip(before, after, strict=False)):
        scheduled = {name for mark, names in SCHEDULED.items() if mark in old for name in names}
        changed = [name for name in old if name in new and name not in scheduled and old[name] != new[name]]
        if changed:
            title = f"{type(optimizer).__name__}{f' group {number}' if len(before) > 1 else ''}"
            descriptions.append(f"{title} {', '.join(f'{name} {new[name]} (not {old[name]})' for name in changed)}")
    return descriptions


def _plain(value: Any) -> Any:
    match value:
        case None | bool() | str():
            return value
        case Tensor() if value.numel() == 1:
            return value.item()
        case Integral():
            return int(value)
        case Real():  # also NumPy's numbers
            return float(value)
        case list() | tuple():
            values = [_plain(element) for element in value]
            return UNKNOWN if UNKNOWN in values else values
    return UNKNOWN


def _like(old: Any, value: Any) -> Any:
    if isinstance(old, Tensor) and isinstance(value, int | float):
        return torch.full_like(old, value)
    return tuple(value) if isinstance(old, tuple) and isinstance(value, list) else value


READERS: tuple[type[Optimizer], ...] = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adagrad,
    optim.Adadelta,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
)
"""Optimizers that update each element by itself, and read gradients without changing them."""


class UpdateWatch:
    """A hook that reports each step of an optimizer, and leaves the gradients alone."""

    def __init__(self, report: Callable[[Optimizer], None]) -> None:
        self._report = report

    def __call__(self, optimizer: Optimizer, arguments: Any, options: Any) -> None:
        """Report the step that torch is about to make."""
        self._report(optimizer)


def has_own_step(optimizer: Optimizer) -> bool:
    """Whether the script has replaced this optimizer's ``step``. Wrappers of schedulers do not count."""
    step: Any = vars(optimizer).get("step", type(optimizer).step)
    while getattr(step, "__globals__", {}).get("__name__") == optim.lr_scheduler.__name__:
        step = step.__wrapped__
    return step is not type(optimizer).step


def is_hooked(optimizer: Optimizer) -> bool:
    """Whether a function of the script is called before or after each step of this optimizer."""
    hooks: tuple[dict[int, Any], ...] = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )
    return any(not isinstance(hook, UpdateWatch) for registered in filter(None, hooks) for hook in registered.values())


def may_change_gradients(optimizer: Optimizer) -> bool:
    """Whether a step of this optimizer, or a hook of it, might change gradients in place."""
    is_reader = type(optimizer) in READERS and not any(map(_adds_momentum_in_place, optimizer.param_groups))
    return not is_reader or is_hooked(optimizer)


def _adds_momentum_in_place(group: Mapping[str, Any]) -> bool:
    """Whether SGD writes Nesterov's step into the gradients, as torch does when it updates many tensors at once."""
    if not group.get("nesterov"):
        return False
    at_once = group.get("foreach")
    if at_once is None and not group.get("fused"):  # torch chooses, by the device
        at_once = any(parameter.device.type != "cpu" for parameter in group["params"])
    return bool(at_once)


def quiet_schedulers(optimizers: Sequence[Optimizer]) -> None:
    """Prevent learning-rate schedulers from warning that no update was made, when updates are made elsewhere."""
    for optimizer in optimizers:
        optimizer._opt_called = True  # type: ignore[attr-defined]


Scaled = Callable[[Any], AbstractContextManager[Any]]
"""A context manager that changes the learning rates of optimizers."""


class Update:
    """The update of a call: every worker updates all parameters."""

    def work_out(self, optimizers: Sequence[Optimizer]) -> None:
        """Compute what workers share before anything changes; here, nothing. Collective."""

    def scaled_by(self, scaled: Scaled, optimizers: Sequence[Optimizer]) -> AbstractContextManager[Any]:
        """The context in which the update is worked out and made: ``scaled`` changes learning rates in it."""
        return scaled(optimizers)

    def make(self, optimizers: Sequence[Optimizer], loss: float, scaled: Scaled) -> None:
        """Make the update, in the context of :meth:`scaled_by`. ``loss`` is the mean loss of the call."""
        self.apply(optimizers)

    def apply(self, optimizers: Sequence[Optimizer]) -> None:
        """Run the optimizers."""
        for optimizer in optimizers:
            optimizer.step()


@dataclass(slots=True)
class ScriptUpdate(Update):
    """An update that the script makes by itself. ``act`` makes it, after ``report_loss`` has got the mean loss.

    Raises:
        JobError: ``act`` is no function, or a coroutine or generator.
    """

    act: Callable[[], Any]
    report_loss: Callable[[float], None]
    returned: Any = None

    def __post_init__(self) -> None:
        if not callable(self.act):
            raise JobError(
                f"step.run(update=…) got a {type(self.act).__name__}: it needs a function without arguments that makes "
                f"the update, for instance update=optimizer.step"
            )
        if iscoroutinefunction(self.act) or isgeneratorfunction(self.act) or isasyncgenfunction(self.act):
            raise JobError(
                "step.run(update=…) got a coroutine or a generator, of which a call makes nothing yet: give a function "
                "that makes the update, without async and yield"
            )

    def scaled_by(self, scaled: Scaled, optimizers: Sequence[Optimizer]) -> AbstractContextManager[Any]:
        """The script sees its own learning rates: they are scaled while an optimizer makes its step."""
        return nullcontext()

    def make(self, optimizers: Sequence[Optimizer], loss: float, scaled: Scaled) -> None:
        """Call the script's function."""
        self.report_loss(loss)
        with _scaled_in_steps(optimizers, scaled):
            self.returned = self.act()


@contextmanager
def _scaled_in_steps(optimizers: Sequence[Optimizer], scaled: Scaled) -> Iterator[None]:
    # Not around the whole update: schedulers that the script steps in it have to see its own learning rates.
    with ExitStack() as hooks:
        for optimizer in optimizers:
            step = hooks.enter_context(ExitStack())
            hooks.callback(optimizer.register_step_pre_hook(_entering(step, scaled, optimizer)).remove)
            hooks.callback(optimizer.register_step_post_hook(_leaving(step)).remove)
        yield


def _entering(step: ExitStack, scaled: Scaled, optimizer: Optimizer) -> Callable[..., None]:
    def enter(*_: Any) -> None:
        step.enter_context(scaled([optimizer]))

    return enter


def _leaving(step: ExitStack) -> Callable[..., None]:
    def leave(*_: Any) -> None:
        step.close()

    return leave
