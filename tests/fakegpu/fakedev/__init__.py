"""A simulated accelerator, ``fakegpu``, in host memory: see ``_C.cpp``. Torch loads it by an entry point."""

import atexit
import json
import os
import sys
import traceback
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

NAME = "fakegpu"


def load() -> None:
    """Have torch know the kind of device."""
    import torch

    if hasattr(torch, NAME):
        return
    from fakedev import _C  # type: ignore[import-not-found]

    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module(torch, _C))
    torch.utils.generate_methods_for_privateuse1_backend(unsupported_dtype=None)
    sys.modules[f"torch.{NAME}"] = getattr(torch, NAME)
    if os.environ.get("FAKEGPU_NCCL") == "1":
        from fakedev import nccl

        nccl.install()
    if where := os.environ.get("FAKEGPU_LOG"):
        _log_to(Path(where), _C)


def _module(torch: Any, core: Any) -> Any:
    """What ``torch.cuda`` has, as far as torch's device-neutral parts ask for it."""
    module: Any = ModuleType(f"torch.{NAME}")
    generators = tuple(core.default_generator(number) for number in range(core.device_count()))

    def index(device: Any) -> int:
        own = device if device is None or isinstance(device, int) else torch.device(device).index
        return int(core.current_device() if own is None else own)

    def manual_seed(seed: int) -> None:
        generators[core.current_device()].manual_seed(seed)

    def manual_seed_all(seed: int) -> None:
        for each in generators:
            each.manual_seed(seed)

    module.is_available = lambda: core.device_count() > 0
    module.is_initialized, module._is_in_bad_fork = core.is_initialized, core.is_in_bad_fork
    module._lazy_init = module.init = core.init
    module.device_count, module.current_device = core.device_count, core.current_device
    module.set_device = lambda device: core.set_device(index(device))
    module.synchronize = lambda device=None: core.synchronize(index(device))
    module.manual_seed, module.manual_seed_all = manual_seed, manual_seed_all
    module.get_rng_state = lambda device=None: generators[index(device)].get_state()
    module.set_rng_state = lambda state, device=None: generators[index(device)].set_state(state)
    module.initial_seed = generators[0].initial_seed
    module.default_generators = generators
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.get_device_name = lambda device=None: "Simulated accelerator"
    module.memory_allocated = lambda device=None: core.memory()[0]
    module.max_memory_reserved = lambda device=None: core.memory()[1]
    return module


# What was seen by a process, as a file of JSON when it ends: counts, memory, and what is wrong by place.

_waits: Counter[str] = Counter()
_reports: Counter[str] = Counter()


def _place() -> str:
    frames = [each for each in traceback.extract_stack() if "/fakedev/" not in each.filename]
    inner = [each for each in frames if "/unisono/" in each.filename][-2:] or frames[-2:]
    return " < ".join(f"{Path(each.filename).name}:{each.lineno}:{each.name}" for each in reversed(inner))


def _heard(kind: str, what: str) -> None:
    if kind == "sync":
        # By its place it costs more than all that is computed.
        _waits[f"{what} | {_place()}" if "FAKEGPU_PLACES" in os.environ else what] += 1
    else:
        _reports[f"{kind}: {what} | {_place()}"] += 1


def _log_to(folder: Path, core: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    core.set_hook(_heard)

    def write() -> None:
        if counts := core.counts():
            seen = {"counts": counts, "memory": core.memory(), "waits": _waits.most_common(60), "reports": [*_reports]}
            (folder / f"{os.getpid()}.json").write_text(json.dumps(seen, indent=1))

    atexit.register(write)
    os.register_at_fork(after_in_child=_waits.clear)
    os.register_at_fork(after_in_child=_reports.clear)
