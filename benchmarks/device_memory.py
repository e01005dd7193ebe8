"""The most memory that tensors take on a device: where it has the whole model, and where several hold it together."""

import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.crew import cleaned
from benchmarks.elastic_job import ROOT
from benchmarks.noise import NoiseMeter
from benchmarks.report import Grid, Report

MIB = 2**20

AIM = 0.35
"""What a device of four may take, as a share of what one takes that has the whole model."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How the benchmark is run.

    Attributes:
        devices: the numbers of devices that hold the model together.
        layers: of the model; its width is 512.
        steps: that are trained.
    """

    devices: tuple[int, ...] = (2, 4)
    layers: int = 16
    steps: int = 3


def run(choice: Choice) -> Report:
    """Measure one device, and then all numbers of them, with slices and with stages."""
    meter = NoiseMeter()
    alone = peak(choice, 1, "slices")
    found = {(cut, count): peak(choice, count, cut) for cut in ("slices", "stages") for count in choice.devices}
    meter.calibrate()
    rows = [(cut, str(count), f"{most / MIB:.0f}", f"{most / alone:.2f}") for (cut, count), most in found.items()]
    title = f"the most that tensors take on a device, a GPT of {choice.layers} layers"
    notes = (
        f"Of four devices at most {AIM} is aimed at. Memory that the allocator keeps, and Python's, are left out.",
    )
    return Report(
        name="device-memory",
        settings=asdict(choice),
        noise=meter.read(),
        grids=[
            Grid(
                title, ("cut", "devices", "MiB", "of one"), [("whole", "1", f"{alone / MIB:.0f}", "1.00"), *rows], notes
            )
        ],
        figures={"alone": alone, **{f"{cut} {count}": most for (cut, count), most in found.items()}},
    )


def peak(choice: Choice, devices: int, cut: str) -> int:
    """Bytes, of the device of a worker that takes most."""
    options = ("--layers", str(choice.layers), "--steps", str(choice.steps), "--cut", cut)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "unisono", "run", "-n", "1", "--threads", "1", "--devices-per-worker"]
        program = ["--run-dir", f"{folder}/run", "-m", "benchmarks.programs.device_memory", folder]
        subprocess.run(
            [*command, str(devices), *program, *options],
            env={**cleaned(os.environ), "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        return max(int(path.read_text()) for path in Path(folder).glob("*.txt"))
