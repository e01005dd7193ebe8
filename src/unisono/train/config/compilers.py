"""Torch's compilers as a job needs them: what they make of a program depends on nothing that a process met before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from unisono.errors import JobError

MOST_SHAPES = 64
"""How many shapes a function is compiled for, unless the script allows more. Torch allows 8."""


@dataclass(frozen=True, slots=True)
class Compilers:
    """The switches of torch's compilers.

    Attributes:
        dynamo: some of ``torch._dynamo.config``, by name.
        inductor: some of ``torch._inductor.config``, by name.
        profiles: whether TorchScript computes its first runs otherwise than those that follow. Of this thread.
        refuses: whether is refused what goes by what a process met before: kernels for several shapes, some stances.
    """

    dynamo: Mapping[str, Any]
    inductor: Mapping[str, Any]
    profiles: bool
    refuses: bool

    @classmethod
    def current(cls) -> Compilers:
        """The switches now."""
        dynamo, inductor = _configs()
        return cls(
            {name: getattr(dynamo, name) for name in _DYNAMO if hasattr(dynamo, name)},
            {name: getattr(inductor, name) for name in _INDUCTOR if hasattr(inductor, name)},
            torch._C._get_graph_executor_optimize(),
            _is_refused(),
        )

    def for_job(self, *, deterministic: bool) -> Compilers:
        """The switches that a job needs, in place of these."""
        most = max(MOST_SHAPES, self.dynamo["recompile_limit"])
        return Compilers(
            {name: {**_DYNAMO, "recompile_limit": most}[name] for name in self.dynamo},
            {name: deterministic or was for name, was in self.inductor.items()},
            profiles=False,
            refuses=True,
        )

    def apply(self) -> None:
        """Set torch's switches to these."""
        for config, values in zip(_configs(), (self.dynamo, self.inductor), strict=True):
            for name, value in values.items():
                setattr(config, name, value)
        torch._C._set_graph_executor_optimize(self.profiles)
        _refuse(self.refuses)


_DYNAMO: Mapping[str, Any] = {
    # Else the first shape that a process meets gets kernels of its own, and the second one makes kernels for all.
    "automatic_dynamic_shapes": False,
    "assume_static_by_default": True,
    # Else what is beyond the limit, or cannot be compiled on one host, is computed without compiler, without a word.
    "recompile_limit": MOST_SHAPES,
    "fail_on_recompile_limit_hit": True,
    "suppress_errors": False,
}
_INDUCTOR = ("deterministic",)  # it chooses kernels by no measurement


def _configs() -> tuple[Any, Any]:
    import torch._dynamo.config  # takes seconds to load, as every optimizer of torch does
    import torch._inductor.config

    return torch._dynamo.config, torch._inductor.config


# What the script asks of the compiler that would go by what a process met before.


@cache
def _refused_shape() -> type[Exception]:
    from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

    class DynamicShape(JobError, ConstraintViolationError):
        """A kernel for several shapes. The compiler hands on errors of its own kinds alone as they are."""

    return DynamicShape


def _shapes_apart(decide: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(decide)
    def refusing(tensor: Any, tx: Any, source: Any, *rest: Any, **named: Any) -> Any:
        decided = decide(tensor, tx, source, *rest, **named)
        kinds = getattr(decided, "dynamic_sizes", ())
        for size, kind in zip(tensor.size(), kinds, strict=False):
            # What an export says of shapes is for its user; and what is without a value has none that came first.
            if type(size) is int and kind.name in ("DYNAMIC", "DUCK") and not tx.output.export:
                raise _refused_shape()(
                    f"torch.compile: {source.name} is to be compiled for several shapes (dynamic=True, mark_dynamic). "
                    f"Such kernels are made for the shape that a process meets first, which depends on its shards and "
                    f"on where it resumed, so the same job could end in other bits: leave it out. In a run each shape "
                    f"is compiled for itself"
                )
        return decided

    return refusing


def _same_stance(choose: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(choose)
    def refusing(callback: Any) -> Any:
        from torch._dynamo import eval_frame

        stance = eval_frame._stance
        if stance.stance not in _STANCES or stance.skip_guard_eval_unsafe:
            what = f"set_stance({stance.stance!r}{', skip_guard_eval_unsafe=True' * stance.skip_guard_eval_unsafe})"
            raise JobError(
                f"torch.compiler.{what}: which kernel computes what would depend on the shapes that a process has "
                f"met before, that is on its shards and on where it resumed, so the same job could end in other bits: "
                f"leave it out, or use one of {', '.join(_STANCES)}"
            )
        return choose(callback)

    return refusing


_STANCES = ("default", "force_eager", "fail_on_recompile")
_DECISIONS: Mapping[tuple[str, str], Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    ("torch._dynamo.variables.builder", "_automatic_dynamic"): _shapes_apart,
    ("torch._dynamo.eval_frame", "_callback_from_stance"): _same_stance,
}


def _is_refused() -> bool:
    return any(hasattr(decide, "__wrapped__") for _, _, decide in _decisions())


def _refuse(wanted: bool) -> None:
    for module, name, decide in _decisions():
        is_refused = hasattr(decide, "__wrapped__")
        if wanted != is_refused:
            setattr(module, name, _DECISIONS[module.__name__, name](decide) if wanted else decide.__wrapped__)


def _decisions() -> Iterator[tuple[ModuleType, str, Any]]:
    for path, name in _DECISIONS:
        module = import_module(path)
        if (decide := getattr(module, name, None)) is not None:
            yield module, name, decide
