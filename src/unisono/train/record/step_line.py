"""The line of ``metrics.jsonl`` about the step that is under way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unisono.train.step.step import Step

BY_WORKER = ("samples", "updates", "staleness", "exchanges", "sent")
"""What each worker says of its round, as far as its strategy has such a thing."""


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
            step: that begins.
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
            loss: of its batch.
            rate: of learning; that of the first call is kept.
            seconds: by part; those of several calls add up.
            about: what else there is to say of it.
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
        told: by each worker, in which some sample was computed.
        strategy: its text.

    Returns:
        the mean loss of a sample, and what else a line says of a round.
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
