"""The figures of one run of a study, from its run folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from unisono.checkpoint.folder import RunFolder
from unisono.errors import JobError
from unisono.plan.split import Split
from unisono.received import parse_json
from unisono_lab.replay.record import Record

LAST_SHARE = 0.1
"""Of the samples up to a moment: those over which the loss at that moment is averaged."""

Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """The figures of one run.

    Attributes:
        samples: the number of samples of the measured time.
        seconds: the measured time.
        trained: the number of samples that were trained on in all.
        epoch_s: seconds of a whole epoch.
        times: the median of each part of a step; None for a plain loop.
        peak_memory_mib: the peak memory of the worker that needed most.
        batch_size: samples in a global batch.
        learning_rate: the learning rate of the last step.
        accuracy: the newest accuracy that the script logged.
        digest: the weights' digest.
        threads: the number of threads of each worker.
        epoch_samples: the number of samples of an epoch.
        shards: the job's number of shards.
        gradient_bytes: the bytes of gradients that are reduced in a step.
        reduction: latency and bandwidth of the reduction itself, if there were several workers.
        devices: the workers' devices, by rank.
        losses: the losses, each of a step or an epoch, with the samples before and after it.
        epoch: the number of the epoch, from 1, of a plain loop that has trained but one.
    """

    samples: int
    seconds: float
    trained: int
    epoch_s: float | None = None
    times: Parts | None = None
    peak_memory_mib: float | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    accuracy: float | None = None
    digest: str | None = None
    threads: int = 1
    epoch_samples: int | None = None
    shards: int | None = None
    gradient_bytes: int | None = None
    reduction: Mapping[str, float] | None = None
    devices: tuple[str, ...] = ()
    losses: Sequence[tuple[int, int, float]] = field(default=(), repr=False)
    epoch: int | None = None

    def loss_at(self, samples: int) -> float | None:
        """The mean loss over the last tenth of the first so many samples; None if there is none.

        Where a step is so large that none ends there, it is the loss of the last one that ends before.
        """
        begin = samples * (1 - LAST_SHARE)
        whole = [(after, after - before, loss) for before, after, loss in self.losses if after <= samples]
        seen = [(size, loss) for after, size, loss in whole if after > begin or after == whole[-1][0]]
        count = sum(size for size, _ in seen)
        return sum(size * loss for size, loss in seen) / count if count else None

    def is_oversubscribed(self, cores: int) -> bool:
        """Whether workers had to share a core, or a GPU."""
        if any(device != "cpu" for device in self.devices):
            return len(set(self.devices)) < len(self.devices)
        return max(len(self.devices), 1) * self.threads > cores


def measured_run(folder: Path, warmup_steps: int) -> MeasuredRun:
    """What a run folder tells.

    Args:
        folder: the folder of a run that ended well.
        warmup_steps: the number of steps that are left out at its beginning.

    Raises:
        JobError: it holds nothing that could be timed; says what is missing.
    """
    record = Record.read(folder)
    lines = record.steps
    first, last = timed_part(lines, warmup_steps)
    timed = lines[first:last]
    if not timed:
        raise JobError(
            f"{len(lines)} steps were taken, and the first {warmup_steps} are left out (--warmup), so there is "
            f"nothing to time: let it take more, or leave out fewer"
        )
    samples, seconds = sum(line["batch_size"] for line in timed), sum(line["seconds"]["total"] for line in timed)
    result = RunFolder(folder).read_result() or {}
    workers = result.get("workers") or [{}]
    rate = lines[-1].get("learning_rate", lines[-1].get("lr"))
    epoch_samples = result.get("epoch_samples")
    return MeasuredRun(
        samples=samples,
        seconds=seconds,
        trained=lines[-1]["position"] + lines[-1]["batch_size"],
        epoch_s=_epoch_s(timed, epoch_samples),
        times=medians(step_times(timed)),
        peak_memory_mib=max((peak_mib(one) for one in workers), default=0.0) or None,
        batch_size=record.batch_size,
        learning_rate=rate,
        accuracy=_accuracy(record.metrics),
        digest=result.get("weights_sha256"),
        threads=record.job.threads,
        epoch_samples=epoch_samples,
        shards=record.job.shards,
        gradient_bytes=_bytes(result, record),
        reduction=result.get("reduction"),
        devices=tuple(one["device"] for one in workers if "device" in one) or ("cpu",) * lines[-1]["world_size"],
        losses=[(at := line["position"], at + line["batch_size"], _number(line["loss"])) for line in lines],
    )


def timed_part(lines: Sequence[Line], warmup_steps: int) -> tuple[int, int]:
    """The steps that are timed: from which one on, and up to which one.

    Where at least two whole epochs were trained, whole ones, without the first; else all. In any case without the
    first so many steps.
    """
    ends = [number + 1 for number, line in enumerate(lines) if line.get("ends_epoch")]
    if len(ends) < 2 or warmup_steps >= ends[-1]:
        return warmup_steps, len(lines)
    return max(warmup_steps, ends[0]), ends[-1]


def plain_run(log: Path) -> MeasuredRun:
    """What a plain loop printed: for each epoch a line of JSON with ``epoch``, ``seconds`` and ``samples``.

    A line may have ``loss`` and ``accuracy`` as well. The first epoch is left out if there are more.

    Args:
        log: the output of the script.

    Raises:
        JobError: there is no such line, or one has no figures.
    """
    lines = list(_epoch_lines(log))
    if not lines:
        raise JobError(
            f'{log} has no line such as {{"epoch": 0, "seconds": 1.2, "samples": 1437}}: a baseline prints one for '
            f"each epoch that it has trained, with print(json.dumps(...))"
        )
    timed = lines[1:] or lines
    ends = [0]
    for line in lines:
        ends.append(ends[-1] + line["samples"])
    accuracies = [line["accuracy"] for line in lines if _is_number(line.get("accuracy"))]
    return MeasuredRun(
        samples=sum(line["samples"] for line in timed),
        seconds=sum(line["seconds"] for line in timed),
        trained=ends[-1],
        epoch_s=median(line["seconds"] for line in timed),
        accuracy=accuracies[-1] if accuracies else None,
        epoch_samples=timed[-1]["samples"],
        epoch=1 if len(lines) == 1 else None,
        losses=[
            (*each, line["loss"])
            for each, line in zip(pairwise(ends), lines, strict=True)
            if _is_number(line.get("loss"))
        ],
    )


def _epoch_lines(log: Path) -> Iterator[dict[str, Any]]:
    for number, text in enumerate(log.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        try:
            line = parse_json(text[text.find("{") :])  # a progress bar may stand before it
        except ValueError:
            continue
        if not isinstance(line, dict) or not {"epoch", "seconds", "samples"} <= line.keys():
            continue
        is_whole = isinstance(line["samples"], int) and line["samples"] > 0
        if not is_whole or not _is_number(line["seconds"]) or not line["seconds"] > 0:
            raise JobError(f"{log}, line {number}: {text}: both seconds and samples have to be numbers above 0")
        yield line


def _epoch_s(timed: Sequence[Line], epoch_samples: int | None) -> float | None:
    """The median of whole epochs; where none was timed, what one takes at this throughput."""
    totals = [line["seconds"]["total"] for line in timed]
    ends = [number + 1 for number, line in enumerate(timed) if line.get("ends_epoch")]
    whole = [sum(totals[begin:end]) for begin, end in pairwise(ends)]
    if ends and epoch_samples == sum(line["batch_size"] for line in timed[: ends[0]]):
        whole.append(sum(totals[: ends[0]]))
    if whole:
        return float(median(whole))
    if not epoch_samples:
        return None
    return float(epoch_samples * sum(totals) / sum(line["batch_size"] for line in timed))


def _bytes(result: Line, record: Record) -> int | None:
    whole = result.get("gradient_bytes")
    return whole // 2 if whole and record.job.compression == "bf16" else whole


def peak_mib(worker: Line) -> float:
    """Memory that a worker needed at most, as ``result.json`` has it: of its GPU, or else of the host; 0 if unknown."""
    return float(worker.get("peak_device_memory_mib") or worker.get("peak_memory_mib") or 0.0)


def _accuracy(lines: Sequence[Line]) -> float | None:
    found = [line["accuracy"] for line in lines if _is_number(line.get("accuracy"))]
    return float(found[-1]) if found and 0 <= found[-1] <= 1 else None


def _number(value: Any) -> float:
    return float(value) if _is_number(value) else float("nan")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# The parts of a step's time, over all of its workers.


Parts = Mapping[str, float]
"""Seconds of a step, the mean over its workers, by the fields of a cell:

step_s     the whole step, on the main worker's clock
data_s     the wait for samples
compute_s  the forward and the backward pass
wait_s     the wait, from when a worker had computed its shards until the slowest one had
exposed_s  the rest of the wait for the reduction, after everything was computed
update_s   the optimizer's update
"""


def medians(steps: Sequence[Parts]) -> Parts:
    """The median of each part; they add up to about a whole."""
    return {name: median(step[name] for step in steps) for name in steps[0]}


def step_times(lines: Sequence[Mapping[str, Any]]) -> list[Parts]:
    """The times of steps.

    Args:
        lines: the lines of ``metrics.jsonl`` for consecutive steps. What workers say of a step's end stands in the next
            step's line, so nothing is told of the last step. Where they say nothing, the main worker's own times are
            taken.
    """
    found = [_of_workers(line, after) or _of_main(line) for line, after in pairwise(lines)]
    return found or [_of_main(line) for line in lines]


def _of_main(line: Mapping[str, Any]) -> Parts:
    seconds = line["seconds"]
    parts = (seconds.get(name, 0.0) for name in ("data", "compute", "exposed_communication", "update"))
    names = ("data_s", "compute_s", "exposed_s", "update_s")
    return {"step_s": seconds["total"], "wait_s": 0.0, **dict(zip(names, parts, strict=True))}


def _of_workers(line: Mapping[str, Any], after: Mapping[str, Any]) -> Parts | None:
    now, then = line.get("workers") or (), after.get("workers") or ()
    if not now or len(now) != len(then) or after["step"] != line["step"] + 1:
        return None
    data = [one["data_s"] for one in then]
    compute = _computed(line, [one["shard_s"] for one in now])
    arrived = [waited + took for waited, took in zip(data, compute, strict=True)]
    exposed = [one["exposed_s"] for one in then]
    waits = [min(max(arrived) - each, most) for each, most in zip(arrived, exposed, strict=True)]
    return {
        "step_s": line["seconds"]["total"],
        "data_s": fmean(data),
        "compute_s": fmean(compute),
        "wait_s": fmean(waits),
        "exposed_s": fmean(exposed) - fmean(waits),
        "update_s": fmean(one["update_s"] for one in then),
    }


def _computed(line: Mapping[str, Any], shard_s: Sequence[float]) -> list[float]:
    """Seconds that each worker computed, by rank."""
    shards = line.get("shards") or line["setting"]["shards"]
    serving = sum(not each for each in shard_s)  # who serves computes nothing, and tells no time for it
    split = Split.even(shards, len(shard_s)).with_servers(serving)
    spent = [len(split.of(rank)) * each for rank, each in enumerate(shard_s)]
    # A shard's time is of the first call of step.run; the main worker's whole time tells what all calls came to.
    calls = line["seconds"]["compute"] / spent[0] if line.get("losses") and spent[0] > 0 else 1.0
    return [each * calls for each in spent]
