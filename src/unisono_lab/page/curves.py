"""The figures of a run over its steps, made of the lines of ``metrics.jsonl``."""

from collections.abc import Mapping, Sequence
from typing import Any

from unisono.adapt.curvature_question import CONFIDENCE, FIGURES
from unisono_lab.page.curve_table import LARGEST_STEP, CurveTable, Entry, number

OWN = frozenset(
    (
        *("step", "epoch", "position", "loss", "losses", "lr", "generation", "world_size", "seconds", "samples_per_s"),
        *("batch_size", "shards", "ends_epoch", "learning_rate", "lr_factor", "workers", "links", "setting", "norms"),
        *("strategy", "round", "time", "shard_s", "gradient_norm", "gradient_variance", "gradient_signal"),
        *("noise_scale", "ada_scale_gain", "loss_variance"),
        *FIGURES,
    )
)
"""Fields of a line that no script has logged."""

DRAWN = frozenset(("loss", "samples_per_s", "batch_size", "noise_scale", "gradient_norm", *FIGURES))
PARTS = ("data", "compute", "exposed_communication", "update", "total")
"""Of ``seconds``."""

MOST_RANKS = 8
"""Workers whose seconds per shard are drawn over time; the newest ones of all are told."""

LONGEST_NAME = 80


class Curves:
    """Figures by name. Names that a script has given begin with ``metric/``.

    Attributes:
        table: the figures.
        latest: the newest line of a step.
    """

    def __init__(self) -> None:
        self.table = CurveTable()
        self.latest: Mapping[str, Any] = {}

    def take(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Take the next lines; what is not as it should be in them is left out."""
        entries = list[Entry]()
        for line in lines:
            step, time = line.get("step"), number(line.get("time"))
            if type(step) is not int or not 0 <= step < LARGEST_STEP:
                continue
            others = [name for name in line if name not in OWN]
            layers = [name for name in others if name.startswith(CONFIDENCE)]  # drawn as one figure, with its range
            figures = {
                f"metric/{name[:LONGEST_NAME]}": line[name] for name in others if not name.startswith(CONFIDENCE)
            }
            if "loss" in line:
                self.latest = line
                figures |= _of_step(line)
            entries += [Entry(step, time, figures), *(Entry(step, time, {"confidence": line[name]}) for name in layers)]
        self.table.add(entries)


def _of_step(line: Mapping[str, Any]) -> dict[str, Any]:
    figures = {name: value for name, value in line.items() if name in DRAWN}
    figures["lr"] = line.get("learning_rate", line.get("lr"))
    if isinstance(seconds := line.get("seconds"), Mapping):
        figures |= {f"seconds/{name}": seconds.get(name) for name in PARTS}
    return figures | {f"shard_s/{rank}": value for rank, value in enumerate(shard_seconds(line)[:MOST_RANKS])}


def shard_seconds(line: Mapping[str, Any]) -> list[float | None]:
    """The seconds of one shard on each worker, by rank; empty if the line does not tell."""
    told, workers = line.get("shard_s"), line.get("workers")
    if isinstance(workers, list):
        told = [one.get("shard_s") if isinstance(one, Mapping) else None for one in workers]
    return [number(value) for value in told] if isinstance(told, list) else []
