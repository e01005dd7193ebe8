"""The content of ``result.json``, written however the run ends, and the measurements in it."""

from __future__ import annotations

import atexit
import math
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any

import torch

from unisono.checkpoint.folder import RunFolder, warn_unwritten
from unisono.data.sample_order import Order
from unisono.device import peak_device_bytes, wait_for
from unisono.errors import PREEMPTED, Superseded, WorkerLost
from unisono.host.machine import MIB, own_peak_mib
from unisono.host.tracebacks import for_people
from unisono.membership.environment import device_name
from unisono.plan.batches import Batches
from unisono.reduce.buckets import ALIGNMENT, Bucket
from unisono.reduce.partial_sums import UNTALLIED
from unisono.reduce.transport import Transport
from unisono.train.config.run_config import RunConfig
from unisono.train.group.membership import Membership
from unisono.train.group.workers import Workers
from unisono.train.state.trained import Trained
from unisono.train.step.listeners import Listener


class ResultWriter(Listener):
    """Writes ``result.json``, however the run ends on this worker."""

    def __init__(self, folder: RunFolder, trained: Trained, membership: Membership, config: RunConfig) -> None:
        self._folder, self._trained, self._membership, self._config = folder, trained, membership, config
        self._batches: Batches | None = None  # of the newest loop
        self._started = perf_counter()
        self._unwritten: dict[str, Any] | None = None

    def loop_begins(self, number: int, batches: Batches, order: Order) -> None:
        """Note the data set of the newest loop for the file."""
        self._batches = batches

    def conclude(self, weights: str, save: Callable[[], None], workers: Workers) -> None:
        """Write the job's result. Collective; repeated if a worker is lost in it: the next main worker writes again."""
        if workers.is_main:
            self._folder.ready(self._config.settings.faults.timeout_s)
        save()
        about: dict[str, Any] = {"workers": workers.gather_json(peak_memory(self._config.device))}
        if self._config.settings.special.study and self._trained.prepared is not None:
            parameters = self._trained.prepared.parameters.values()
            about["gradient_bytes"] = sum(parameter.numel() * parameter.itemsize for parameter in parameters)
            about["reduction"] = reduction_probe(workers.transport, self._config.job.reduction, self._config.device)
        if workers.is_main:
            self._folder.journal("finished", step=self._trained.progress.position.step, weights_sha256=weights)
            self._write(weights_sha256=weights, **about)
        workers.barrier()

    def preempted(self) -> None:
        """Write that the workers were asked to leave, and that the job goes on when it is started again."""
        if not self._membership.workers.is_main:
            return
        self._folder.journal("preempted", step=self._trained.progress.position.step)
        error = {"rank": None, "type": "Preempted", "message": "asked to leave: start the job again to go on"}
        self._write(exit_code=PREEMPTED, error=error)

    def failed(self, error: Mapping[str, Any]) -> None:
        """Write that the script ends with an error, on whichever worker the error began."""
        rank = -1 if self._membership.joins else self._membership.workers.rank
        with suppress(Superseded):  # the job goes on elsewhere
            self._write(exit_code=1, error={"rank": rank, **error})

    def keep_traceback(self, text: str) -> Path | None:
        """Keep the whole traceback of an error, which the terminal shows in short; returns where it is."""
        path = self._folder.logs / f"{worker_name(self._config, self._membership)}.traceback.txt"
        try:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, "utf-8", "backslashreplace")
        except OSError:  # the short one has to do
            return None
        return path

    def _write(self, **fields: Any) -> None:
        result, before = self._fields(**fields), self._unwritten
        try:
            self._folder.write_result(result)
            self._unwritten = None
        except OSError as error:  # the weights are there, for the script's last lines
            warn_unwritten(self._folder.path / "result.json", error)
            self._unwritten = result
            if before is None:
                atexit.register(self._write_again)

    def _write_again(self) -> None:
        """Write again at the end of the script, when the disk may have room again."""
        with suppress(OSError, Superseded):
            if self._unwritten is not None:
                self._folder.write_result(self._unwritten)

    def _fields(self, **fields: Any) -> dict[str, Any]:
        position, batches, joins = self._trained.progress.position, self._batches, self._membership.joins
        return {
            "weights_sha256": None,
            "steps": position.step,
            "samples": position.samples,
            "epoch_samples": None if batches is None else batches.of(0).used or None,
            "dataset_samples": None if batches is None else batches.of(0).samples or None,
            "world_size": 0 if joins else self._membership.workers.world_size,
            "seconds": round(perf_counter() - self._started, 3),
            "exit_code": 0,
            "error": None,
            **self._folder.mended(),
            **fields,
        }


def worker_name(config: RunConfig, membership: Membership) -> str:
    """The name of this worker in the names of its files: its id where ranks change, else its rank."""
    workers, coordinator = membership.workers, config.connection.coordinator
    if coordinator is not None:
        return device_name(coordinator.worker, workers.devices.rank)
    return f"rank-{-1 if membership.joins else workers.process}"


# A run that ends with an error says so in its run folder.


class FailureNote:
    """Writes ``result.json`` when the script ends with an error that began on this worker."""

    def __init__(self, results: ResultWriter) -> None:
        self._results = results
        self._before = sys.excepthook
        # Kept, because every look at a method makes a new object, and close compares.
        self._hook = self._note
        sys.excepthook = self._hook

    def close(self) -> None:
        """Give the hook back, unless somebody else has taken it meanwhile."""
        if sys.excepthook is self._hook:
            sys.excepthook = self._before

    def _note(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        whole = "".join(traceback.format_exception(kind, error, trace))
        if not isinstance(error, WorkerLost | KeyboardInterrupt):
            self._results.failed({"type": kind.__name__, "message": str(error), "traceback": whole})
        short = for_people(error)
        if self._before is not sys.__excepthook__ or len(short) >= len(whole):
            self._before(kind, error, trace)
            return
        sys.stderr.write(short)
        if (path := self._results.keep_traceback(whole)) is not None:
            sys.stderr.write(f"unisono: the whole traceback is in {path}\n")


# The most memory that a worker has needed.


def peak_memory(device: torch.device) -> dict[str, Any]:
    """The most memory that this process has needed so far, in MiB: of the host, and of its device if it has one."""
    on_device = peak_device_bytes(device)
    return {
        "device": str(device),
        "peak_memory_mib": round(own_peak_mib(os.getpid()), 1),
        "peak_device_memory_mib": None if on_device is None else round(on_device / MIB, 1),
    }


# How fast this run's workers add up gradients, apart from any model: latency and bandwidth of the reduction itself.

LARGE = 2**20
"""Elements of a bucket of 4 MiB."""

ROUNDS = 10


def reduction_probe(transport: Transport, reduction: str, device: torch.device) -> dict[str, float] | None:
    """Reduce a small and a large bucket of zeros some times, and take the shortest of each. Collective.

    By the model of an all-reduce by halves: 2 ⌈log2 W⌉ latency + 2 (W - 1)/W · bytes / bandwidth (Thakur, Rabenseifner
    and Gropp, IJHPCA 2005). Nothing is in flight on ``transport``.

    Returns:
        ``latency_s`` in seconds and ``bandwidth_bytes_per_s``; None with one worker.
    """
    count = transport.world_size
    if count == 1:
        return None
    small, large = (_seconds(transport, reduction, device, numel) for numel in (ALIGNMENT, LARGE))
    size = (LARGE - ALIGNMENT) * torch.float32.itemsize
    return {
        "latency_s": small / (2 * math.ceil(math.log2(count))),
        "bandwidth_bytes_per_s": 2 * (count - 1) / count * size / max(large - small, 1e-9),
    }


def _seconds(transport: Transport, reduction: str, device: torch.device, numel: int) -> float:
    mine = transport.split.of(transport.rank)
    rows = len(transport.tree.cover(mine.start, mine.stop)) or 1  # who serves gives one that nobody reads
    partials = [row[0] for row in transport.allocate([Bucket((), numel, torch.float32, device)], rows)]
    seconds, reduce = [], transport.reduction(reduction)
    for _ in range(ROUNDS):
        transport.all_gather(torch.zeros(1, dtype=torch.uint8))  # all are here
        begun = perf_counter()
        reduce(("probe", numel), partials, None, UNTALLIED)
        wait_for(device)
        seconds.append(perf_counter() - begun)
    return min(seconds)
