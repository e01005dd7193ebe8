"""What the launcher tells a worker through the environment, read once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unisono.adapt.ada_scale import LinearScaling
from unisono.adapt.policy import Policy
from unisono.errors import JobError
from unisono.job import default_shards

# Several times the batch a script asks for, without a change to the script: what weak scaling needs.

WARMUP_STEPS = 100
"""Steps, with the script's own batch, over whose samples the learning rate grows."""


@dataclass(frozen=True, slots=True)
class BatchScale:
    """Multiplies batch and shards, so that a shard has as many samples as before, and the learning rate.

    The rate grows from the script's to ``factor`` times that: Goyal et al., arXiv 1706.02677.

    Attributes:
        factor: by which all three are multiplied; 1 leaves everything as it is.
        warmup_steps: over whose samples the rate grows, counted with the script's own batch.
    """

    factor: int = 1
    warmup_steps: int = WARMUP_STEPS

    def scaled(self, batch_size: Any, shards: Any) -> dict[str, Any]:
        """``batch_size`` and ``shards`` of the job. What is no number stays, for the job to refuse.

        Args:
            batch_size: that the script asks for.
            shards: likewise; None for those that follow from its batch.
        """
        if self.factor > 1 and isinstance(batch_size, int) and batch_size >= 1:
            shards = default_shards(batch_size) if shards is None else shards
            batch_size, shards = batch_size * self.factor, shards * self.factor
        return {"batch_size": batch_size, "shards": shards}

    def policies(self, given: Sequence[Policy], batch_size: int) -> list[Policy]:
        """Those of a run, and the one that brings the learning rate to its multiple.

        Args:
            given: what the script and the environment name.
            batch_size: of the job, multiplied.

        Raises:
            JobError: one of them does the same already.
        """
        if self.factor == 1:
            return list(given)
        if any(isinstance(one, LinearScaling) for one in given):
            raise JobError(
                f"UNISONO_BATCH_SCALE={self.factor} multiplies the learning rate, and so does the LinearScaling among "
                f"this run's policies: leave one of the two out"
            )
        return [*given, LinearScaling(self.factor, self.warmup_steps * batch_size // self.factor)]


# What the launcher tells a worker through the environment, read once.


@dataclass(frozen=True, slots=True)
class Coordination:
    """Where a worker finds the coordinator of its job.

    Attributes:
        url: of the coordinator.
        token_file: holds the job's token.
        worker: this worker's id.
        certificate: to trust; None for what the system trusts, or without TLS.
    """

    url: str
    token_file: Path
    worker: str
    certificate: Path | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Coordination | None:
        """What the agent that started this worker says; None for a job whose workers stay the same.

        Raises:
            JobError: a part is missing; names it.
        """
        names = ("UNISONO_COORDINATOR", "UNISONO_TOKEN_FILE", "UNISONO_WORKER")
        found = [environ.get(name) for name in names]
        if not found[0]:
            return None
        for name, value in zip(names, found, strict=True):
            if not value:
                raise JobError(f"{names[0]} is set in the environment, and {name} is not: both come from the launcher")
        url, token_file, worker = map(str, found)
        return cls(url, Path(token_file), worker, _path(environ, "UNISONO_CERTIFICATE"))


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings from ``UNISONO_*`` variables; an argument in the script goes before each of them.

    Save ``batch_size`` and ``batch_scale``, which are there to change what every script says.
    """

    run_dir: Path | None = None
    shards: int | None = None
    threads: int | None = None
    allow_job_change: bool = False
    transport: str = "auto"
    topology: str = "auto"
    strategy: str | None = None
    overlap: bool | None = None
    shard_optimizer: bool | None = None
    checkpoint_every: int | None = None
    verify_every: int | None = None
    checks: str | None = None
    audit: float | None = None
    monitor_every: int | None = None
    stop_after: int | None = None
    stop_after_epochs: int | None = None
    trace: Path | None = None
    coordinator: Coordination | None = None
    plugins: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()
    samples: bool = False
    study: bool = False
    batch_size: int | None = None
    term: int | None = None
    failure_timeout_s: float | None = None
    batch_scale: BatchScale = field(default_factory=BatchScale)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        """The settings in ``environ``.

        Raises:
            JobError: a variable is no positive whole number, or no 0 or 1; names it and its value.
        """
        return cls(
            run_dir=_path(environ, "UNISONO_RUN_DIR"),
            shards=_count(environ, "UNISONO_SHARDS"),
            threads=_count(environ, "UNISONO_THREADS"),
            allow_job_change=environ.get("UNISONO_ALLOW_JOB_CHANGE") == "1",
            transport=environ.get("UNISONO_TRANSPORT") or "auto",
            topology=environ.get("UNISONO_TOPOLOGY") or "auto",
            strategy=environ.get("UNISONO_STRATEGY") or None,
            overlap=_switch(environ, "UNISONO_OVERLAP"),
            shard_optimizer=_switch(environ, "UNISONO_SHARD_OPTIMIZER"),
            checkpoint_every=_count(environ, "UNISONO_CHECKPOINT_EVERY"),
            verify_every=_count(environ, "UNISONO_VERIFY_EVERY", least=0),
            checks=environ.get("UNISONO_CHECKS") or None,
            audit=_share(environ, "UNISONO_AUDIT"),
            monitor_every=_count(environ, "UNISONO_MONITOR_EVERY"),
            stop_after=_count(environ, "UNISONO_STOP_AFTER"),
            stop_after_epochs=_count(environ, "UNISONO_STOP_AFTER_EPOCHS"),
            trace=_path(environ, "UNISONO_TRACE"),
            coordinator=Coordination.from_environ(environ),
            plugins=_names(environ, "UNISONO_PLUGINS"),
            policies=_names(environ, "UNISONO_POLICIES"),
            samples=_switch(environ, "UNISONO_SAMPLES") is True,
            study=_switch(environ, "UNISONO_STUDY") is True,
            batch_size=_count(environ, "UNISONO_BATCH_SIZE"),
            term=_count(environ, "UNISONO_TERM"),
            failure_timeout_s=_seconds(environ, "UNISONO_FAILURE_TIMEOUT_S"),
            batch_scale=_batch_scale(environ),
        )

    def allowing(self, job_change: bool) -> Settings:
        """The settings of a script that may say so as well."""
        return replace(self, allow_job_change=self.allow_job_change or job_change)


def _path(environ: Mapping[str, str], name: str) -> Path | None:
    return Path(environ[name]) if environ.get(name) else None


def _names(environ: Mapping[str, str], name: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in environ.get(name, "").split(",") if word.strip())


def _count(environ: Mapping[str, str], name: str, least: int = 1) -> int | None:
    text = environ.get(name)
    if not text:
        return None
    if not text.isdecimal() or len(text) > 18 or int(text) < least:
        raise JobError(f"{name}={text!r} in the environment: needs a whole number of at least {least}")
    return int(text)


def _share(environ: Mapping[str, str], name: str) -> float | None:
    text = environ.get(name)
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        raise JobError(f"{name}={text!r} in the environment: needs a share between 0 and 1") from None


def _seconds(environ: Mapping[str, str], name: str) -> float | None:
    if not (text := environ.get(name)):
        return None
    with suppress(ValueError):
        if 0 < (found := float(text)) < math.inf:
            return found
    raise JobError(f"{name}={text!r} in the environment: needs a number of seconds above 0")


def _batch_scale(environ: Mapping[str, str]) -> BatchScale:
    factor, warmup = _count(environ, "UNISONO_BATCH_SCALE"), _count(environ, "UNISONO_BATCH_SCALE_WARMUP")
    return BatchScale(factor or 1, warmup or WARMUP_STEPS)


def _switch(environ: Mapping[str, str], name: str) -> bool | None:
    text = environ.get(name)
    if not text:
        return None
    if text not in ("0", "1"):
        raise JobError(f"{name}={text!r} in the environment: use 0 or 1")
    return text == "1"
