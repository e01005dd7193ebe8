"""What the person who starts a job asks of the launcher, as a value."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from unisono.errors import JobError
from unisono.launch.script import Script
from unisono.launch.tuning import Tuning
from unisono.received import LONGEST_S
from unisono.sync.named import strategy_of

MOST_WORKERS = 4096
"""That one host offers to a coordinator."""

GRACE_S = 30.0
"""How long workers that were asked to leave may take, unless told otherwise."""


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """How to start the workers of one job on this host.

    Attributes:
        script: what each worker runs.
        workers: how many.
        run_dir: the run folder; None makes a new one below ``runs``.
        shards: the job's shards, if the person sets them here.
        threads: torch threads of each worker, if the person sets them here.
        checkpoint_every: steps between checkpoints, if the person sets them here.
        policies: by name, besides the script's; whether there are such, the workers find out.
        strategy: by which the workers synchronise, if the person sets it here.
        audit: the share of the work that is computed twice, if the person sets it here.
        allow_job_change: a resumed job may differ from the one of the checkpoint.
        grace_s: seconds that workers may take to leave after the first Ctrl-C or SIGTERM.
        tuning: how the workers' memory allocator is set.
        warm_start: whether workers are forked from a process that has torch loaded already, where that can be, and
            where there are several or may be.
        extra_environment: further variables for every worker.
        memory_limit_mib: memory of the host that each worker may need, its loader processes with it; who needs more is
            ended. None does not look.
    """

    script: Script
    workers: int = 1
    run_dir: Path | None = None
    shards: int | None = None
    threads: int | None = None
    checkpoint_every: int | None = None
    policies: tuple[str, ...] = ()
    strategy: str | None = None
    audit: float | None = None
    allow_job_change: bool = False
    grace_s: float = GRACE_S
    tuning: Tuning = field(default_factory=Tuning)
    warm_start: bool = True
    extra_environment: dict[str, str] = field(default_factory=dict)
    memory_limit_mib: float | None = None

    def told(self, variables: Mapping[str, str]) -> "LaunchSettings":
        """The same, with further variables for every worker."""
        return replace(self, extra_environment={**self.extra_environment, **variables})

    def check(self) -> None:
        """Refuse what cannot work, before anything is started.

        Raises:
            JobError: a number is out of range, or the script cannot be run; names it.
        """
        for name in ("workers", "shards", "threads", "checkpoint_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise JobError(f"--{name.replace('_', '-')} {value}: at least 1 is needed")
        if self.workers > MOST_WORKERS:
            raise JobError(f"--workers {self.workers}: at most {MOST_WORKERS} on one host")
        if not 0 <= self.grace_s <= LONGEST_S:
            raise JobError(f"--grace-s {self.grace_s:g}: needs a number of seconds, 0 or more, at most {LONGEST_S:g}")
        if self.shards is not None and self.workers > self.shards:
            raise JobError(
                f"--workers {self.workers} with --shards {self.shards}: every worker needs at least one shard; "
                f"set --shards {self.workers}, or start at most {self.shards} workers"
            )
        if self.strategy is not None:
            strategy_of(self.strategy)
        self.script.require_readable()
