"""What loggers have, read back from their files by the readers of those who made the formats."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path

Points = dict[tuple[int, str], float]
"""Values by step and name."""

OF_THIS_RUN = ("time", "generation", "world_size", "samples_per_s")


def once(found: Iterable[tuple[int, str, float]]) -> Points:
    """Points, none of which is there twice; but for what depends on the workers."""
    points: Points = {}
    for step, name, value in found:
        if name.startswith("seconds/") or name in OF_THIS_RUN:
            continue
        assert (step, name) not in points, f"{name} of step {step} is there twice"
        points[step, name] = value
    return points


def expected(folder: Path) -> Points:
    """What loggers are to have, by ``metrics.jsonl``."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        (line["step"], name): float(value)
        for line in lines
        for name, value in line.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name not in ("step", *OF_THIS_RUN)
    }


def in_csv(folder: Path) -> Points:
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return once(
        (int(row["step"]), name, float(value))
        for row in rows
        for name, value in row.items()
        if value and name != "step"
    )


def in_tensorboard(folder: Path) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder / "tensorboard"), {"scalars": 0})
    board.Reload()
    tags = board.Tags()["scalars"]
    return once((event.step, tag, event.value) for tag in tags for event in board.Scalars(tag))


def in_mlflow(folder: Path) -> Points:
    import sqlite3

    database = sqlite3.connect(folder / "mlflow.db")
    try:
        assert len(database.execute("select run_uuid from runs").fetchall()) == 1
        return once(
            (step, name, value) for step, name, value in database.execute("select step, key, value from metrics")
        )
    finally:
        database.close()


def in_wandb(folder: Path) -> Points:
    from unisono.loggers.by_name import history

    paths = sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len({path.name for path in paths}) == 1
    return once((step, name, value) for path in paths for step, own in history(path) for name, value in own.items())


READERS: dict[str, Callable[[Path], Points]] = {
    "csv": in_csv,
    "tensorboard": in_tensorboard,
    "mlflow": in_mlflow,
    "wandb": in_wandb,
}


def plain(name: str, logger: str) -> str:
    """A figure's name, as a logger shows it."""
    return name.replace(",", "_") if logger == "mlflow" else name


def require_same(folder: Path, logger: str) -> None:
    """Fail unless a logger has each figure of ``metrics.jsonl`` once, and nothing else."""
    found = READERS[logger](folder)
    wanted = {(step, plain(name, logger)): value for (step, name), value in expected(folder).items()}
    assert found.keys() == wanted.keys(), sorted(found.keys() ^ wanted.keys())
    for key, value in wanted.items():
        assert math.isclose(found[key], value, rel_tol=1e-6 if logger == "tensorboard" else 1e-15), key
