"""The recorder of each step's line, on the main worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter, time
from typing import Any

from unisono.checkpoint.folder import RunFolder
from unisono.train.step.step import Step

# The line of ``metrics.jsonl`` about the step that is under way.


class StepLine:
    """Grows as the step goes on.

    Attributes:
        values: JSON, by name; ``loss`` as soon as something was computed.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    @property
    def is_computed(self) -> bool:
        """Whether there is a loss."""
        return "loss" in self.values

    def begin(self, step: Step, *, adapts: bool) -> None:
        """A step's samples are here.

        Args:
            step: the step that begins.
            adapts: whether policies may change the number of shards.
        """
        self.values = {"step": step.number, "epoch": step.epoch, "position": step.position, "batch_size": step.size}
        if step.is_last_in_epoch:
            self.values["ends_epoch"] = True
        if adapts:
            self.values["shards"] = step.batch.shards

    def computed(self, loss: float, rate: float, seconds: Mapping[str, float], about: Mapping[str, Any]) -> None:
        """A call of ``step.run`` is done.

        Args:
            loss: the mean loss of the call's batch.
            rate: the learning rate; the first call's is kept.
            seconds: seconds by part of the step; those of several calls are added up.
            about: further fields of the line.
        """
        line = self.values
        if self.is_computed:
            line.setdefault("losses", [line["loss"]]).append(loss)
            seconds = {name: value + line["seconds"].get(name, 0.0) for name, value in seconds.items()}
        else:
            line |= {"loss": loss, "lr": rate}
        line |= {"seconds": dict(seconds), **about}


def round_figures(told: Sequence[Mapping[str, Any]], strategy: str) -> tuple[float, dict[str, Any]]:
    """What a round came to.

    Args:
        told: what each worker says that has computed a sample in the round.
        strategy: the strategy's text, such as ``local-sgd:every=16``.

    Returns:
        the mean loss of a sample, and the further fields of the round's line.
    """
    samples = sum(one["samples"] for one in told)
    seconds = max(one["seconds"] for one in told)
    names = dict.fromkeys(name for one in told for name in one["metrics"])
    means = {name: sum(one["metrics"].get(name, 0.0) for one in told) / samples for name in names}
    by_worker = {
        name: [one.get(name) for one in told] for name in ("samples", "updates", "staleness", "exchanges", "sent")
    }
    known = {name: values for name, values in by_worker.items() if any(value is not None for value in values)}
    about = {
        "strategy": strategy,
        "round": {"steps": max(one["steps"] for one in told), "seconds": seconds, **known},
        "samples_per_s": round(samples / seconds, 3),
    }
    return sum(one["loss"] for one in told) / samples, {**means, **about}


# What the main worker writes down about each step.

SEARCHED = 100
"""Lines at the end of the file among which a step's line is looked for; the script may have logged others behind it."""


class Recorder:
    """Writes ``metrics.jsonl``: a line per step.

    Attributes:
        latest: the newest line.
        writes: whether this is the worker that writes; the others only keep the newest line.
    """

    def __init__(self, folder: RunFolder, *, writes: bool) -> None:
        self.latest: dict[str, Any] = {}
        self.writes = writes
        self._folder = folder
        self._newest: dict[str, Any] | None = None
        self._started = self._loaded = self._ran = perf_counter()

    def take_over(self) -> None:
        """This is the main worker now: what the one before it has not written of this worker's steps is written."""
        if self.writes:
            return
        self.writes = True
        if self._newest is not None:
            step = self._newest["step"]
            lines = self._folder.metrics.truncate_after(step)
            if not any(line.get("step") == step and "loss" in line for line in lines[-SEARCHED:]):
                self.write(self._newest)

    def go_back(self) -> None:
        """Steps are computed again: their lines are not to be written by whoever takes over."""
        self._newest = None
        self.next_step()

    def step_loaded(self) -> None:
        """The step's samples are here. Its clock has run since the step before was over."""
        self._loaded = self._ran = perf_counter()

    def step_ran(self) -> None:
        """A call of ``step.run`` is done; what else the loop's body does is not the step's time."""
        self._ran = perf_counter()

    def step_ends(self, line: Mapping[str, Any], samples: int) -> None:
        """Write the line of a step, with its duration in seconds and, unless it has it, its samples per second."""
        total = self._ran - self._started
        seconds = {"data": self._loaded - self._started, **line["seconds"], "total": total}
        rate = samples / total if total > 0 else 0.0
        self.write({"samples_per_s": round(rate, 3), **line, "seconds": seconds})
        self._newest = self.latest
        self.next_step()

    def next_step(self) -> None:
        """Start the clock of the next step."""
        self._started = perf_counter()

    def write(self, line: Mapping[str, Any]) -> None:
        """Write a line, with the time of the first time that it is written."""
        self.latest = {"time": round(time(), 3), **line}
        if self.writes:
            self._folder.metrics.write(self.latest)
