"""The decision whether a job ended because memory ran out. Nothing here touches the system."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from unisono.launch.ending.failure import Failure
from unisono.launch.ending.outcome import Outcome, WorkerExit, describe
from unisono.launch.terminal.terminal import WorkerName

KINDS = ("torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError", "MemoryError")
"""Types of exceptions that say nothing else."""

SAID = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|not enough memory|insufficient memory|bad_alloc"
    r"|unable to allocate|ALLOC_FAILED|cudaErrorMemoryAllocation",
    re.IGNORECASE,
)
"""What torch, CUDA's libraries, numpy, the C++ library and Linux say."""

TAKEN = ("SIGKILL", "SIGBUS")
"""How the kernel ends processes for which there is no memory, or no shared memory, left."""


def ran_out_of_memory(outcome: Outcome, said: Mapping[WorkerName, Sequence[str]]) -> str:
    """A sentence that says whose memory did not suffice; empty if that is not why the job ended.

    What other workers say of the loss of that one, each in its own way, is no reason to look further.

    Args:
        outcome: the outcome of the job.
        said: the last lines of each worker that printed no exception, by rank.
    """
    if outcome.exit_code == 0:
        return ""
    found = [each for each in outcome.exits if _ran_out(each, said.get(each.rank, ()))]
    first = min(found, key=lambda each: each.began, default=None)
    return "" if first is None else _words(first, outcome.host)


def _ran_out(worker: WorkerExit, said: Sequence[str]) -> bool:
    if worker.code == 0:
        return False
    if worker.over_mib is not None:
        return True
    if worker.failure is not None:
        return _is_about_memory(worker.failure)
    if worker.told_at is not None:
        return False
    if worker.fault:
        return False
    return worker.signal_name in TAKEN or any(SAID.search(line) for line in said)


def _is_about_memory(failure: Failure) -> bool:
    return failure.type in KINDS or SAID.search(failure.message) is not None


def _words(worker: WorkerExit, host: str) -> str:
    if worker.failure is None:
        return describe(worker, host).partition(":" if worker.over_mib is None else "\n")[0]
    first_line = (worker.failure.message.strip().splitlines() or [""])[0]
    return f"rank {worker.rank} on host {host}: {worker.failure.type}: {first_line}"
