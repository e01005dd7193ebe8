"""Torch's global settings, as values that can be compared and put back."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import ANY


@dataclass(frozen=True)
class Switch:
    """One of torch's global settings, and how to read and write it."""

    fresh: Any  # its value in a new interpreter; ANY, which equals everything, where the machine decides
    read: Callable[[Any], Any]
    write: Callable[[Any, Any], Any]


def _compilers() -> Any:
    from unisono.train.config.numerics import Compilers  # loads torch

    return Compilers


DETERMINISM = ("off", "warn", "on")  # torch counts them 0, 1, 2
ATTENTION = ("flash", "mem_efficient", "math", "cudnn")

TORCH_SWITCHES: Mapping[str, Switch] = {
    "number of threads": Switch(ANY, lambda t: t.get_num_threads(), lambda t, v: t.set_num_threads(v)),
    "deterministic algorithms": Switch(
        "off",
        lambda t: DETERMINISM[t.get_deterministic_debug_mode()],
        lambda t, v: t.set_deterministic_debug_mode(DETERMINISM.index(v)),
    ),
    "fill of uninitialized memory": Switch(
        True,
        lambda t: t.utils.deterministic.fill_uninitialized_memory,
        lambda t, v: setattr(t.utils.deterministic, "fill_uninitialized_memory", v),
    ),
    "default dtype": Switch(
        "torch.float32",
        lambda t: str(t.get_default_dtype()),
        lambda t, v: t.set_default_dtype(getattr(t, v.removeprefix("torch."))),
    ),
    "precision of float32 products": Switch(
        "highest",
        lambda t: t.get_float32_matmul_precision(),
        lambda t, v: t.set_float32_matmul_precision(v),
    ),
    "cudnn.deterministic": Switch(
        False,
        lambda t: t.backends.cudnn.deterministic,
        lambda t, v: setattr(t.backends.cudnn, "deterministic", v),
    ),
    "cudnn.benchmark": Switch(
        False,
        lambda t: t.backends.cudnn.benchmark,
        lambda t, v: setattr(t.backends.cudnn, "benchmark", v),
    ),
    "attention kernels": Switch(
        (True, True, True, True),
        lambda t: tuple(getattr(t.backends.cuda, f"{name}_sdp_enabled")() for name in ATTENTION),
        lambda t, v: [
            getattr(t.backends.cuda, f"enable_{name}_sdp")(on) for name, on in zip(ATTENTION, v, strict=True)
        ],
    ),
    "gradients": Switch(True, lambda t: t.is_grad_enabled(), lambda t, v: t.set_grad_enabled(v)),
    "compilers": Switch(
        ANY,  # they take seconds to load
        lambda _: _compilers().current() if "torch._dynamo" in sys.modules else ANY,
        lambda _, v: v.apply(),
    ),
    "process group": Switch(
        False,
        lambda t: t.distributed.is_available() and t.distributed.is_initialized(),
        lambda t, _: t.distributed.destroy_process_group(),
    ),
}


@dataclass(frozen=True)
class TorchSettings:
    """Torch's global settings. A test that never loads torch does not load it here either."""

    noun: str = "torch setting"

    def look(self) -> Mapping[str, Any]:
        torch = sys.modules.get("torch")
        if torch is None:
            return {name: switch.fresh for name, switch in TORCH_SWITCHES.items()}
        return {name: switch.read(torch) for name, switch in TORCH_SWITCHES.items()}

    def restore(self, before: Mapping[str, Any]) -> None:
        torch = sys.modules.get("torch")
        if torch is None:
            return
        for name, value in before.items():
            if TORCH_SWITCHES[name].read(torch) != value:
                TORCH_SWITCHES[name].write(torch, value)
