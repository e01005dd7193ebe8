"""What a step asks of a device, counted on the simulated accelerator of the tests: waits, copies, memory. No times."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

import simulated_accelerator

SCRIPT = Path(__file__).parents[1] / "tests" / "procs" / "scripts" / "accelerated.py"
MODELS = ("cnn", "gpt")
WAYS = ((1, False), (2, False), (2, True))
"""The number of workers, and whether each has a device of its own, over NCCL's semantics."""


def main() -> None:
    """Print a row for each model and way: the figures of the worker that has most of each."""
    table = Table(
        "model", "workers", "over", "host waits", "bytes to host", "bytes to device", "peak bytes", "live bytes"
    )
    for model in MODELS:
        for workers, nccl in WAYS:
            told = _counted(model, workers, nccl=nccl)
            most = {name: max(each[name] for each in told) for name in told[0]}
            figures = (most["host waits"], most["d2h bytes"], most["h2d bytes"], most["peak"], most["live"])
            over = "NCCL" if nccl else "host" if workers > 1 else ""
            table.add_row(model, str(workers), over, *(f"{figure:.0f}" for figure in figures))
    Console(width=120).print(table)


def _counted(model: str, workers: int, *, nccl: bool) -> list[dict[str, float]]:
    environment = simulated_accelerator.environment(simulated_accelerator.built(), devices=workers, nccl=nccl)
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "unisono", "run", "-n", str(workers), "--run-dir", f"{folder}/run", str(SCRIPT)],
            env={**environment, "MODEL": model, "EPOCHS": "4"},
            capture_output=True,
            text=True,
            check=True,
        )
    return [json.loads(line) for line in re.findall(r"counted (\{.*\})", done.stdout)]


if __name__ == "__main__":
    main()
