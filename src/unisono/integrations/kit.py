"""The common parts of guests (other people's training loops): their requirements, run, rank, scaler and loaders."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from itertools import islice
from math import ceil
from operator import eq, ge, gt, index, le, lt, ne
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Sampler

from unisono.data.generators import generators_kept
from unisono.data.refusals import Refusals
from unisono.errors import JobError, UnisonoError
from unisono.received import value_of
from unisono.settings.reading import require_current_names, with_defaults
from unisono.train.run import Run
from unisono.train.start import HOST_PROCESS, init
from unisono.train.state.registry import kept_value
from unisono.train.state.trained import GROWTH_STEPS, LossScale

refused = Refusals(Path(__file__).with_name("refusals.toml"))
"""The messages about parts of a guest that cannot be kept, with what to do instead."""

_BEHIND = {
    "accelerate": "behind optimizer.step(), where accelerator.sync_gradients is true",
    "keras": "in a callback's on_train_batch_end",
    "lightning": "in on_train_batch_end",
    "transformers": "in a callback's on_step_end",
}


@contextmanager
def in_words_of(guest: str) -> Iterator[None]:
    """Have errors of the core that come out of the context say what to do in a guest's words."""
    try:
        yield
    except UnisonoError as error:
        text = str(error).replace("in the loop's body, after step.run", _BEHIND[guest])
        text = text.replace("changed after run.prepare", "changed after the training began")
        text = re.sub(r"or call run\.prepare again( after it)?", "or train again behind it", text)
        if text != str(error):
            error.args = (text,)
        raise


# Losses of a script's own.


def each_twice(batch: Any) -> Any:
    """A batch in which every sample comes twice; its tensors have one row for each sample."""
    return tree_map_only(Tensor, lambda rows: torch.cat([rows, rows]) if rows.dim() else rows, batch)


def is_sum(once: float, twice: float) -> bool:
    """Whether a loss is a sum over samples, and not a mean: its values for a batch, and with each sample twice."""
    return abs(twice - 2 * once) < abs(twice - once)


# Packages of other frameworks.


OLDEST: Mapping[str, str] = {
    "accelerate": "1.10",
    "keras": "3.15",
    "lightning": "2.6",
    "pytorch-lightning": "2.6",
    "transformers": "5.6",
}
"""The oldest versions that are supported; ``make oldest-frameworks`` tests them."""


def installed(name: str) -> str | None:
    """A package's version; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def require(guest: str, packages: Sequence[str], version_of: Callable[[str], str | None] = installed) -> None:
    """Raise an error that names missing packages, before anything loads them.

    ``guest`` is the adapter below ``unisono``, and the extra with all that it needs. ``version_of`` returns None for a
    package that is not installed.

    Raises:
        JobError: a package is not installed, or too old; says how to install it.
    """
    lacks = []
    for name in packages:
        there = version_of(name)
        if there is None:
            lacks.append((name, "which is not installed"))
        elif _numbers(there) < _numbers(OLDEST[name]):
            lacks.append((name, f"and {there} is installed"))
    if lacks:
        needs = ", and ".join(f"{name} {OLDEST[name]} or newer, {why}" for name, why in lacks)
        words = " ".join(f"'{name}>={OLDEST[name]}'" for name, _ in lacks)
        raise JobError(
            f"unisono.{guest} needs {needs}: pip install {words} (in a clone of Unisono: pip install -c "
            f"constraints.txt '.[{guest}]')"
        )


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)[:2]]


# The run that a guest trains on: one that it was given, the one that is open, or one that ends with the script.


def run_for(guest: str, run: Run | None, settings: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> Run:
    """The run that a guest trains on. The script's random generators are as before.

    Args:
        guest: the call of the script, for messages.
        run: the run that the script gives; None for the one that is open, or for a new one, which is finished when the
            script ends well.
        settings: arguments of :func:`unisono.init` for a new one, as the script says them.
        defaults: defaults for a new one by path (``arithmetic.precision``); one that is given or open has its own.

    Raises:
        JobError: there are settings, and a run already; or a setting is unknown or out of range.
    """
    require_current_names(settings)
    process = HOST_PROCESS.get()
    newest = process.newest if run is None else run
    if newest is not None and not newest.inside.ending.is_closed:
        if settings:
            raise JobError(f"{guest}({', '.join(settings)}=…) beside a run that is open: say it where that begins")
        return newest
    if unknown := settings.keys() - signature(init).parameters.keys():
        raise JobError(refused("run.unknown-settings", guest=guest, names=", ".join(sorted(unknown))))
    if run is not None:
        return run
    with generators_kept():  # the script's own seed holds: one line makes no other first weights
        new = init(**with_defaults(settings, defaults or {}, process.variables.all()))
    new.inside.ending.also(process.script_end.then(partial(_finish, new)))
    return new


def _finish(run: Run) -> None:
    if run.inside.ending.is_closed:
        return
    if run.inside.trained.prepared is None:  # nothing was trained or evaluated
        run.close()
    else:
        run.finish()


# This worker's rank, as other frameworks keep it in a variable of theirs: it may change while a job trains.

_RUN: ContextVar[Run | None] = ContextVar("_RUN", default=None)
_newest: list[Run] = []


def follow_rank(run: Run) -> LiveRank:
    """A rank that is this run's from now on, whatever it becomes."""
    _RUN.set(run)
    _newest[:] = [run]
    return LiveRank()


def rank_of(run: Run) -> int:
    """The worker's rank; 1 as long as it has yet to join the others, since it is not the main one."""
    return 1 if run.rank < 0 else run.rank


class LiveRank(int):
    """A number that is compared as the worker's present rank. Threads of a framework's own go by the newest run."""

    @property
    def _now(self) -> int:
        run = _RUN.get()
        return rank_of(_newest[0] if run is None else run)


def _by_present_rank(act: Callable[..., Any]) -> Callable[..., Any]:
    return lambda rank, *values: act(rank._now, *values)


for _act in (*(eq, ne, lt, le, gt, ge, index), *(bool, int, repr, str, format, hash)):
    setattr(LiveRank, f"__{_act.__name__}__", _by_present_rank(_act))


# Float16: the run scales losses, and the scaler that a guest has of its own changes nothing.


class RunScaler(GradScaler):
    """A scaler that changes nothing, and knows the scale of the run: so a guest's own checkpoints hold it."""

    def __init__(self, run: Run) -> None:
        super().__init__(run.device.type, enabled=False)
        self._trained = run.inside.trained

    def get_scale(self) -> float:
        """The factor of losses."""
        return self._trained.loss_scale.value

    def state_dict(self) -> dict[str, Any]:
        """The scale, as torch's own scaler has it in files."""
        scale = self._trained.loss_scale
        factors = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": GROWTH_STEPS}
        return {"scale": scale.value, **factors, "_growth_tracker": scale.steps}

    def load_state_dict(self, state_dict: Any) -> None:
        """Have the run go on with a scale. A run that resumes has a newer one, and keeps it.

        Raises:
            Unreadable: it is none that a run can have: a power of two, from 2**-20 to 2**32.
        """
        if state_dict and self._trained.restored is None:
            plain = dict(state_dict) if isinstance(state_dict, Mapping) else state_dict
            state = value_of(dict[str, Any], plain, "state of a GradScaler")
            known = {"value": state.get("scale"), "steps": state.get("_growth_tracker")}
            self._trained.loss_scale = kept_value(LossScale, known, "loss scale")


def scale_of(run: Run) -> float:
    """The factor of losses that go backward in a loss function; 1 where the run scales none."""
    return run.inside.trained.loss_scale.value if run.job.precision == "fp16" else 1.0


def require_scaling(run: Run, setting: str) -> None:
    """Refuse a guest that computes in float16 on a run that scales no losses.

    Raises:
        JobError: it scales none.
    """
    if run.job.precision != "fp16":
        raise JobError(refused("run.no-scaling", setting=setting, precision=run.job.precision))


def take_scaling(accelerator: Any, run: Run, setting: str) -> None:
    """Have one of accelerate's accelerators leave losses to the run, if it computes in float16.

    The accelerator has prepared nothing yet.

    Raises:
        JobError: the run scales no losses.
    """
    if accelerator.mixed_precision == "fp16":
        require_scaling(run, setting)
        accelerator.scaler = RunScaler(run)
        accelerator.native_amp = True  # accelerate leaves float32 as it is, without a word, on CPUs


# Loaders like those of a script, whose epochs have other batches: some of them, or several in one.

KEPT = ("num_workers", "collate_fn", "timeout", "worker_init_fn", "prefetch_factor", "multiprocessing_context")
"""Settings of a loader that do not say which samples its batches have."""


def like(loader: Any, **others: Any) -> DataLoader[Any]:
    """A plain loader of the same data set with the same settings, but for those that are given."""
    return DataLoader(loader.dataset, **{**{name: getattr(loader, name) for name in KEPT}, **others})


class Cut(Sampler[Any]):
    """Some of the items of each epoch of a sampler, which lie side by side.

    ``stop`` is the number of the item behind the last one; None for all.
    """

    def __init__(self, sampler: Any, first: int = 0, stop: int | None = None) -> None:
        self.sampler, self._part = sampler, slice(first, stop)
        self.batch_size = getattr(sampler, "batch_size", None)

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.sampler), self._part.start, self._part.stop)

    def __len__(self) -> int:
        return len(range(len(self.sampler))[self._part])

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: this sampler remembers nothing of an epoch; the sampler that it reads may."""


class Grouped(Sampler[list[int]]):
    """Global batches: each is several of a loader's batches. The last one of an epoch may have fewer."""

    def __init__(self, batches: Any, count: int) -> None:
        self._batches, self._count = batches, count

    def __iter__(self) -> Iterator[list[int]]:
        """The samples of each."""
        batches = iter(self._batches)
        while group := list(islice(batches, self._count)):
            yield [sample for batch in group for sample in batch]

    def __len__(self) -> int:
        """The number of global batches in an epoch."""
        return ceil(len(self._batches) / self._count)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: nothing of this sampler depends on the epoch."""
