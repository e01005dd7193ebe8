"""The settings of a scaling study's measurements, as a value."""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from unisono.errors import JobError
from unisono.host.cgroup import processor
from unisono_lab.analysis.results import FORMULA_WORDS, FORMULAS, Mode
from unisono_lab.analysis.study_folder import Kind, PlannedCell, kinds_of, planned

# The machine that a study is measured on, for those who read its figures.


def surroundings(cores: int) -> dict[str, Any]:
    """What figures depend on besides the script, by name.

    Args:
        cores: the number of cores that this process may use.
    """
    return {
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "processor": processor(),
        "cores": cores,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        "torch": version("torch"),
        "unisono": version("unisono"),
    }


# What a scaling study is to measure, as a value.

WARMUP_STEPS = 5
RATE_WARMUP_STEPS = 100
OWN = ("UNISONO_STOP_AFTER", "UNISONO_STOP_AFTER_EPOCHS", "UNISONO_BATCH_SCALE")
"""Variables that are a study's alone to set."""

RATE_WARMUP_SHARE = 5
"""The learning rate grows over a fifth of the steps at most."""

DECIDING = (
    "STRATEGY",
    "TRANSPORT",
    "TOPOLOGY",
    "OVERLAP",
    "VERIFY_EVERY",
    "CHECKS",
    "AUDIT",
    "MONITOR_EVERY",
    "CHECKPOINT_EVERY",
)
ADDING = ("POLICIES", "PLUGINS", "BATCH_SIZE", "BATCH_SCALE_WARMUP")
"""Variables that change how long a step takes, or what it computes, behind ``UNISONO_``."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """The settings of a study's measurements.

    Attributes:
        script: the user's script with its arguments, as Python takes them: ``train.py --lr 0.1`` or ``-m
            package.train``.
        workers: the numbers of workers to measure.
        modes: ``strong`` keeps the batch, ``weak`` multiplies it by the workers.
        repeats: the number of repeats of each cell.
        steps: the number of steps after which a run is cut short; None for no limit.
        epochs: the number of epochs after which a run is cut short; None for no limit.
        baseline: the plain loop with its arguments; empty without.
        baseline_workers: the numbers of workers whose threads the plain loop gets, one number after the other.
        shards: the job's number of shards, if set here.
        threads: the threads of each worker, if set here.
        warmup_steps: the number of steps that are left out of all figures.
        seed: the seed of the order of the runs.
        label: a name for what is measured, for comparisons.
        tuned: whether the launcher sets the workers' memory allocator.
    """

    script: tuple[str, ...]
    workers: tuple[int, ...]
    modes: tuple[Mode, ...] = ("strong",)
    repeats: int = 5
    steps: int | None = None
    epochs: int | None = None
    baseline: tuple[str, ...] = ()
    baseline_workers: tuple[int, ...] = (1,)
    shards: int | None = None
    threads: int | None = None
    warmup_steps: int = WARMUP_STEPS
    seed: int = 0
    label: str = ""
    tuned: bool = True

    def check(self) -> None:
        """Refuse what cannot work, before anything is started.

        Raises:
            JobError: a number is out of range; names it.
        """
        if self.label.startswith(FORMULAS):
            raise JobError(f"--label {self.label}: {FORMULA_WORDS}; give it another")
        listed = ",".join(map(str, self.workers))
        if not self.workers or min(self.workers) < 1 or len(set(self.workers)) < len(self.workers):
            raise JobError(f"--workers {listed}: each number once, from 1")
        for name in ("repeats", "steps", "epochs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise JobError(f"--{name} {value}: at least 1 is needed")
        if self.steps is not None and self.epochs is not None:
            raise JobError(f"--steps {self.steps} --epochs {self.epochs}: use one of the two")
        if self.warmup_steps < 0:
            raise JobError(f"--warmup {self.warmup_steps}: a number of steps, from 0")
        if self.steps is not None and self.steps <= self.warmup_steps:
            raise JobError(
                f"--steps {self.steps}: the first {self.warmup_steps} are left out (--warmup), so there is nothing to "
                f"time; let a run take more"
            )

    @property
    def kinds(self) -> list[Kind]:
        """What there is to measure."""
        return kinds_of(self.workers, self.modes, self.baseline_workers if self.baseline else ())

    @property
    def cells(self) -> list[PlannedCell]:
        """The runs, in order."""
        return planned(self.kinds, self.repeats, self.seed)

    def plain_threads(self, kind: Kind) -> int:
        """Those of the plain loop: of so many workers together."""
        return kind.workers * (self.threads or 1)

    def variables(self, kind: Kind, environ: Mapping[str, str]) -> dict[str, str]:
        """What the workers of a run are told besides what the launcher tells them.

        Args:
            kind: the kind of run.
            environ: this process's.
        """
        found: dict[str, Any] = {"UNISONO_STUDY": 1, "UNISONO_TIMELINE": 1}
        found |= {} if self.steps is None else {"UNISONO_STOP_AFTER": self.steps}
        found |= {} if self.epochs is None else {"UNISONO_STOP_AFTER_EPOCHS": self.epochs}
        if kind.factor > 1:
            found["UNISONO_BATCH_SCALE"] = kind.factor
            if not environ.get("UNISONO_BATCH_SCALE_WARMUP"):
                found["UNISONO_BATCH_SCALE_WARMUP"] = self.rate_warmup_steps
        found |= {name: "" for name in OWN if environ.get(name) and name not in found}
        return {name: str(value) for name, value in found.items()}

    @property
    def rate_warmup_steps(self) -> int:
        """Steps of the script's batch over whose samples the rate grows in weak scaling."""
        if self.steps is None:
            return RATE_WARMUP_STEPS
        return max(1, min(RATE_WARMUP_STEPS, self.steps // RATE_WARMUP_SHARE))

    def settings(self, environ: Mapping[str, str], cores: int) -> dict[str, Any]:
        """What figures of one study have in common: where it differs, they belong to another study.

        How many workers and repeats there are, in which order and what is left out decides none of them.

        Args:
            environ: this process's.
            cores: the number of cores that it may use.
        """
        names = [f"UNISONO_{name}" for name in (*DECIDING, *ADDING)]
        return {
            "script": list(self.script),
            "script's text": text_digest(self.script),
            "baseline": list(self.baseline),
            "baseline's text": text_digest(self.baseline),
            "steps": self.steps,
            "epochs": self.epochs,
            "shards": self.shards,
            "threads": self.threads,
            "tuning": self.tuned,
            "cores": cores,
            "python": ".".join(map(str, sys.version_info[:3])),
            "torch": version("torch"),
            "unisono": version("unisono"),
            **{name: environ[name] for name in names if environ.get(name)},
        }


def text_digest(script: Sequence[str]) -> str:
    """The sha256, in hex, of a script, or of all of the package that a module is in; nothing if there is none."""
    if not script:
        return ""
    files = [Path(script[0])] if script[0] != "-m" else _package(script[1].partition(".")[0])
    whole = hashlib.sha256()
    for file in files:
        if file.is_file():
            whole.update(hashlib.sha256(file.read_bytes()).digest())
    return whole.hexdigest()


def _package(name: str) -> list[Path]:
    # As for a launch: finding what is inside a package would import it here.
    found = PathFinder.find_spec(name, [str(Path.cwd()), *sys.path])
    folders = list(found.submodule_search_locations or ()) if found is not None else []
    if found is not None and not folders and found.origin is not None:
        return [Path(found.origin)]
    return sorted(file for folder in folders for file in Path(folder).rglob("*.py"))
