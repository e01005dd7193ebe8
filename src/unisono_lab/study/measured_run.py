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
from unisono_lab.recorded.record import Record

LAST_SHARE = 0.1
"""The share of the samples up to a moment over which the loss at that moment is averaged."""

Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """The figures of one run.

    Attributes:
        samples: the number of samples of the measured time.
        seconds: the measured time.
        trained: the number of samples on which the run trained, warm-up included.
        epoch_s: seconds of a whole epoch.
        times: the median of each part of a step; None for a plain loop.
        peak_memory_mib: the peak memory of the worker that needed most, in MiB.
        batch_size: samples in a global batch.
        learning_rate: the learning rate of the last step.
        accuracy: the newest accuracy that the script logged.
        threads: the number of threads of each worker.
        epoch_samples: the number of samples of an epoch.
        gradient_bytes: the bytes of gradients that are reduced in a step.
        reduction: latency and bandwidth of the reduction itself, if there were several workers.
        devices: the workers' devices, by rank.
        losses: the losses, each of a step or an epoch, with the samples before and after it.
        epoch: the number of the epoch, 1, if a plain loop trained for only one.
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
        """The loss after so many samples: the mean over the last tenth of them; None if no step ended by then.

        If steps are so large that none ends in that tenth, it is the loss of the last step before.
        """
        begin = samples * (1 - LAST_SHARE)
        complete = [(after, after - before, loss) for before, after, loss in self.losses if after <= samples]
        last_tenth = [(size, loss) for after, size, loss in complete if after > begin or after == complete[-1][0]]
        count = sum(size for size, _ in last_tenth)
        return sum(size * loss for size, loss in last_tenth) / count if count else None

    def is_oversubscribed(self, cores: int) -> bool:
        """Whether workers had to share a core, or a GPU."""
        if any(device != "cpu" for device in self.devices):
            return len(set(self.devices)) < len(self.devices)
        return max(len(self.devices), 1) * self.threads > cores


def measured_run(folder: Path, warmup_steps: int) -> MeasuredRun:
    """The figures of the folder of a run that ended well, without its first steps.

    Raises:
        JobError: the run has no steps that could be timed; the message says what is missing.
    """
    record = Record.read(folder)
    lines = record.steps
    first, last = timed_part(lines, warmup_steps)
    timed = lines[first:last]
    if not timed:
        raise JobError(
            f"{len(lines)} steps were taken, and the first {warmup_steps} are left out (--warmup), so there is "
            f"nothing to time: take more steps, or leave out fewer"
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
        peak_memory_mib=max((peak_mib(worker) for worker in workers), default=0.0) or None,
        batch_size=record.batch_size,
        learning_rate=rate,
        accuracy=_accuracy(record.metrics),
        digest=result.get("weights_sha256"),
        threads=record.job.threads,
        epoch_samples=epoch_samples,
        shards=record.job.shards,
        gradient_bytes=_bytes(result, record),
        reduction=result.get("reduction"),
        devices=tuple(worker["device"] for worker in workers if "device" in worker)
        or ("cpu",) * lines[-1]["world_size"],
        losses=[(position := line["position"], position + line["batch_size"], _number(line["loss"])) for line in lines],
    )


def timed_part(lines: Sequence[Line], warmup_steps: int) -> tuple[int, int]:
    """The places of the first timed step and of the step after the last one.

    If at least two whole epochs were trained, whole epochs are timed, without the first; otherwise all steps. The
    warm-up steps are never timed.
    """
    ends = [number + 1 for number, line in enumerate(lines) if line.get("ends_epoch")]
    if len(ends) < 2 or warmup_steps >= ends[-1]:
        return warmup_steps, len(lines)
    return max(warmup_steps, ends[0]), ends[-1]


def plain_run(log: Path) -> MeasuredRun:
    """The figures that a plain loop printed: for each epoch a line of JSON with ``epoch``, ``seconds`` and ``samples``.

    A line may have ``loss`` and ``accuracy`` as well. The first epoch is left out if there are more.

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
            (*span, line["loss"])
            for span, line in zip(pairwise(ends), lines, strict=True)
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
    """The median seconds of whole epochs; if none was timed, computed from the throughput."""
    totals = [line["seconds"]["total"] for line in timed]
    ends = [number + 1 for number, line in enumerate(timed) if line.get("ends_epoch")]
    epochs = [sum(totals[begin:end]) for begin, end in pairwise(ends)]
    if ends and epoch_samples == sum(line["batch_size"] for line in timed[: ends[0]]):
        epochs.append(sum(totals[: ends[0]]))
    if epochs:
        return float(median(epochs))
    if not epoch_samples:
        return None
    return float(epoch_samples * sum(totals) / sum(line["batch_size"] for line in timed))


def _bytes(result: Line, record: Record) -> int | None:
    gradient_bytes = result.get("gradient_bytes")
    return gradient_bytes // 2 if gradient_bytes and record.job.compression == "bf16" else gradient_bytes


def peak_mib(worker: Line) -> float:
    """The peak memory of a worker in ``result.json``, in MiB: of its GPU, or else of the host; 0 if unknown."""
    return float(worker.get("peak_device_memory_mib") or worker.get("peak_memory_mib") or 0.0)


def _accuracy(lines: Sequence[Line]) -> float | None:
    accuracies = [line["accuracy"] for line in lines if _is_number(line.get("accuracy"))]
    return float(accuracies[-1]) if accuracies and 0 <= accuracies[-1] <= 1 else None


def _number(value: Any) -> float:
    return float(value) if _is_number(value) else float("nan")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# The parts of a step's time, over all workers.


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
    """The median of each part over the steps; the parts' medians add up to about the step's."""
    return {name: median(step[name] for step in steps) for name in steps[0]}


def step_times(lines: Sequence[Mapping[str, Any]]) -> list[Parts]:
    """The times of steps.

    Args:
        lines: the lines of ``metrics.jsonl`` for consecutive steps. A step's line holds what the workers report about
            the end of the step before, so the last step is left out. If the workers report nothing, the main worker's
            own times are taken.
    """
    times = [_of_workers(line, after) or _of_main(line) for line, after in pairwise(lines)]
    return times or [_of_main(line) for line in lines]


def _of_main(line: Mapping[str, Any]) -> Parts:
    seconds = line["seconds"]
    parts = (seconds.get(name, 0.0) for name in ("data", "compute", "exposed_communication", "update"))
    names = ("data_s", "compute_s", "exposed_s", "update_s")
    return {"step_s": seconds["total"], "wait_s": 0.0, **dict(zip(names, parts, strict=True))}


def _of_workers(line: Mapping[str, Any], after: Mapping[str, Any]) -> Parts | None:
    reports, next_reports = line.get("workers") or (), after.get("workers") or ()
    if not reports or len(reports) != len(next_reports) or after["step"] != line["step"] + 1:
        return None
    data = [report["data_s"] for report in next_reports]
    compute = _computed(line, [report["shard_s"] for report in reports])
    arrived = [waited + computed for waited, computed in zip(data, compute, strict=True)]
    exposed = [report["exposed_s"] for report in next_reports]
    waits = [min(max(arrived) - arrival, limit) for arrival, limit in zip(arrived, exposed, strict=True)]
    return {
        "step_s": line["seconds"]["total"],
        "data_s": fmean(data),
        "compute_s": fmean(compute),
        "wait_s": fmean(waits),
        "exposed_s": fmean(exposed) - fmean(waits),
        "update_s": fmean(report["update_s"] for report in next_reports),
    }


def _computed(line: Mapping[str, Any], shard_s: Sequence[float]) -> list[float]:
    """The computing time of each worker in seconds, by rank."""
    shards = line.get("shards") or line["setting"]["shards"]
    serving = sum(not seconds for seconds in shard_s)  # a server computes no shard, and reports no time
    split = Split.even(shards, len(shard_s)).with_servers(serving)
    spent = [len(split.of(rank)) * seconds for rank, seconds in enumerate(shard_s)]
    # A shard's time is that of the first call of step.run alone; the main worker's whole time shows how much all
    # calls take.
    calls = line["seconds"]["compute"] / spent[0] if line.get("losses") and spent[0] > 0 else 1.0
    return [seconds * calls for seconds in spent]
