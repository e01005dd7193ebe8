"""accelerate's own test functions, which it ships, with accelerate alone and with ours put in its place.

``make test-peers`` ends with a table. Nothing is downloaded or copied: functions that need
more than this machine's accelerate alone can do (GPUs, several processes, models of a hub) do not count.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration, DistributedType
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, default_collate

import unisono
from unisono.errors import UnisonoError

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("always")]

SCRIPTS = "accelerate.test_utils.scripts"
MODULES = (
    "test_script",
    "test_sync",
    "test_ops",
    "test_distributed_data_loop",
    "test_ddp_comm_hook",
    "test_notebook",
    "external_deps.test_metrics",
)
"""The scripts that hold functions. Others train models of a hub, measure GPUs, or need FSDP or DeepSpeed."""

_DISPATCHES = "no worker loads for the others: each reads the samples of its shards"
_KNOWS = "a run's checkpoints know where a loader stands, so loaders keep no state of their own"
_SYNC = "the run goes backward once for each shard of a training loop: nothing is accumulated by hand, or out of one"

DIFFERS: Mapping[str, str] = {
    "training_check(use_seedable_sampler=False)": "the run's seed decides the order of samples, and no generator does",
    "training_check(use_seedable_sampler=True)": "after a training loop torch's generator goes by the run's seed, and "
    "the next sampler takes its own from there",
    "test_noop_sync()": _SYNC,
    "test_distributed_sync_multiple_fwd()": _SYNC,
    "test_gradient_accumulation(sync_each_batch=True)": _SYNC,
    "test_gradient_accumulation_with_opt_and_scheduler()": "the body of a training loop runs once for each shard of a "
    "worker, so it does not gather",
    "test_stateful_dataloader()": _KNOWS,
    "test_stateful_dataloader_save_state()": _KNOWS,
    "test_torch_metrics(num_samples=99, split_batches=False, dispatch_batches=True)": _DISPATCHES,
    "test_torch_metrics(num_samples=99, split_batches=True, dispatch_batches=True)": _DISPATCHES,
    "test_gather_for_metrics_with_iterable_dataset()": _DISPATCHES,
}
"""Calls that do not pass on a run, which is so on purpose; and why."""


def loader_of(module: ModuleType, kind: str) -> DataLoader[Any]:
    """A loader as the main function of the script about loaders makes it."""
    data, size = module.DummyDataset(), module.BATCH_SIZE
    batches = BatchSampler(RandomSampler(data), batch_size=size, drop_last=False)
    match kind:
        case "batch_sampler":
            return DataLoader(data, batch_sampler=batches)
        case "sampler of batches":
            return DataLoader(data, sampler=batches, batch_size=None, collate_fn=default_collate)
    return DataLoader(data, shuffle=kind == "shuffle", batch_size=size)


NOTHING = ("test_reduce_sum", "test_reduce_mean", "test_reduce_max", "test_op_checker", "test_copy_tensor_to_devices")
"""Functions that return at once in one process: they do not count."""

_BOTH = (False, True)

CALLS: Mapping[str, list[dict[str, Any]]] = {
    "training_check": [{"use_seedable_sampler": False}, {"use_seedable_sampler": True}],
    "test_gradient_accumulation": [{}, {"sync_each_batch": True}],
    "test_data_loader": [{"kind": kind} for kind in ("plain", "shuffle", "batch_sampler", "sampler of batches")],
    "test_torch_metrics": [
        *(
            {"num_samples": 99, "split_batches": split, "dispatch_batches": main}
            for split, main in product(_BOTH, _BOTH)
        ),
        {"num_samples": 512},
    ],
    "test_join_raises_warning_for_non_ddp_distributed": [{"distributed_type": "FSDP"}],
    "test_ddp_comm_hook": [{"comm_hook": "no", "comm_wrapper": "no", "comm_state_option": {}}],
}
"""The calls of a function, as its script's main function makes them, where there are several."""


@dataclass(frozen=True)
class Call:
    """A call of a shipped function."""

    module: str
    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in self.settings.items())})"

    def __call__(self, kind: Callable[..., Any]) -> None:
        """Make it, with an accelerator of a kind in place of the name ``Accelerator`` of its module."""
        module, settings = script(self.module), dict(self.settings)
        function = getattr(module, self.name)
        wanted = inspect.signature(function).parameters
        for mark in getattr(function, "pytestmark", ()):
            if mark.name == "skipif" and mark.args[0]:
                pytest.skip(mark.kwargs["reason"])
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(vars(module), "Accelerator", kind)
            batches = {name: settings[name] for name in ("split_batches", "dispatch_batches") if name in settings}
            accelerator = kind(dataloader_config=DataLoaderConfiguration(**batches))
            if "distributed_type" in settings:
                accelerator.state.distributed_type = DistributedType(settings.pop("distributed_type"))
            if "kind" in settings:
                settings["data_loader"] = loader_of(module, settings.pop("kind"))
            if "datasets_Dataset" in wanted:
                settings["datasets_Dataset"] = import_module("datasets").Dataset
            made = {"accelerator": accelerator, "state": accelerator.state}
            function(**{name: made[name] for name in wanted if name in made}, **settings)


def script(name: str) -> ModuleType:
    """A module that accelerate ships."""
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("evaluate") is None:  # it is imported for functions that need downloads alone
            patch.setitem(sys.modules, "evaluate", ModuleType("evaluate"))
        return import_module(f"{SCRIPTS}.{name}")


def is_test(name: str) -> bool:
    """Whether a function's name is that of a test."""
    return name.startswith(("test_", "check_seedable")) or name.endswith("_check")


def calls() -> Iterator[Call]:
    """The calls of all functions that are shipped."""
    for module in MODULES:
        for name, value in vars(script(module)).items():
            if inspect.isfunction(value) and value.__module__.endswith(module) and is_test(name):
                for settings in CALLS.get(name, [{}]):
                    yield Call(module, name, settings)


@contextmanager
def reset() -> Iterator[None]:
    """accelerate keeps its state in the process; here a function finds none and leaves none."""
    drawn = torch.random.get_rng_state()
    try:
        yield
    finally:
        torch.random.set_rng_state(drawn)
        AcceleratorState._reset_state(True)
        PartialState._reset_state()
        GradientState._reset_state()


def reason(call: Call, kind: Callable[..., Any]) -> str:
    """Make a call. Return the first line of why it does not pass; empty if it does."""
    if call.name in NOTHING:
        return "returns at once in one process"
    try:
        with reset():
            call(kind)
    except (pytest.skip.Exception, Exception) as error:  # noqa: BLE001 (it is what the table says)
        return f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]
    return ""


def on_unisono(call: Call, folder: Path) -> str:
    """Make a call on a run of its own."""
    run = unisono.init(seed=0, run_dir=folder / "run")
    try:
        return reason(call, unisono.accelerate.Accelerator)
    finally:
        with suppress(UnisonoError):
            run.close()


MOST = 120
"""Letters of a reason in the table."""


@dataclass
class Table:
    """What was found, at the end of pytest's report."""

    rows: list[tuple[Call, str, str]] = field(default_factory=list)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Write it."""
        write = terminalreporter.write_line
        counted = [(call, ours) for call, alone, ours in self.rows if not alone]
        functions = {(call.module, call.name) for call, _ in counted}
        failed = {(call.module, call.name) for call, ours in counted if ours}
        version, passing = accelerate.__version__, len(functions - failed)
        write(f"{len(functions)} functions pass with accelerate {version} alone, and {passing} of them on Unisono;")
        write(f"of their {len(counted)} calls {sum(not why for _, why in counted)}")
        write("| call | alone | on Unisono |\n|---|---|---|")
        for call, alone, ours in self.rows:
            why = f"; on purpose: {DIFFERS[str(call)]}" if ours and str(call) in DIFFERS else ""
            found = "" if alone else ours[:MOST] + why if ours else "passes"
            write(f"| {call.module.removeprefix('external_deps.')}.{call} | {alone[:MOST] or 'passes'} | {found} |")


@pytest.fixture(scope="session")
def table(request: pytest.FixtureRequest) -> Table:
    found = Table()
    request.config.pluginmanager.register(found)
    return found


@pytest.mark.parametrize("call", list(calls()), ids=str)
@pytest.mark.usefixtures("torch_settings_restored")
def test_a_shipped_function_passes_on_a_run_if_it_does_alone(
    call: Call, table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    alone = reason(call, accelerate.Accelerator)
    ours = "" if alone else on_unisono(call, tmp_path)
    table.rows.append((call, alone, ours))
    if alone:
        pytest.skip(alone)
    assert bool(ours) == (str(call) in DIFFERS), ours
