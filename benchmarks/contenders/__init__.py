"""Who is measured: Unisono, and what one would use without it."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from benchmarks.contenders.loop import Loop
from benchmarks.figures import counted
from benchmarks.task import Option, Task

PLAIN, UNISONO = "plain", "unisono"

Train = Callable[[Task, Path], Loop]


def train_of(module: str) -> Train:
    """How a contender trains. Imports only what that one needs."""
    train: Train = import_module(f"benchmarks.contenders.{module}").train
    return train


@dataclass(frozen=True, slots=True)
class Contender:
    """Somebody who trains.

    Attributes:
        key: a short name.
        name: for people.
        module: of this package.
        workers: how many processes.
        threads: of each of them.
        options: of the module.
        package: has to be installed; none if empty.
    """

    key: str
    name: str
    module: str
    workers: int
    threads: int
    options: Mapping[str, Option] = field(default_factory=dict)
    package: str = ""

    @property
    def is_installed(self) -> bool:
        """Whether it can be measured here."""
        return not self.package or find_spec(self.package) is not None

    @property
    def is_ddp(self) -> bool:
        """Whether it is torch's own."""
        return self.module == "ddp"

    def with_settings(self, settings: str) -> "Contender":
        """Another one with other settings.

        Args:
            settings: such as ``overlap=false bucket_mb=4``.

        Raises:
            ValueError: one of them is not ``name=value``.
        """
        options = dict(_setting(part) for part in settings.split())
        return replace(self, key=f"{self.key} {settings}", name=f"{self.name}, {settings}", options=options)


def _setting(text: str) -> tuple[str, Option]:
    name, equals, value = text.partition("=")
    if not name.isidentifier() or not equals:
        raise ValueError(f"{text!r}: write a setting as name=value")
    try:
        parsed: Option = json.loads(value)
    except json.JSONDecodeError:
        return name, value
    return name, parsed


def everybody(workers: int, threads: int) -> list[Contender]:
    """All contenders, with so many workers of so many threads; the plain loop also with all threads together."""
    crew, one, all_threads = counted(workers, "worker"), counted(threads, "thread"), workers * threads
    return [
        Contender(PLAIN, f"plain loop, {one}", "plain", 1, threads),
        Contender("plain-threads", f"plain loop, {counted(all_threads, 'thread')}", "plain", 1, all_threads),
        Contender(UNISONO, f"Unisono, {crew}", "unisono", workers, threads),
        *[
            Contender(f"ddp-{size}", f"DDP, {crew}, buckets of {size} MB", "ddp", workers, threads, {"bucket_mb": size})
            for size in (1, 25, 100)
        ],
        Contender("fabric", f"Lightning Fabric, {crew}", "fabric", workers, threads, package="lightning_fabric"),
        Contender("accelerate", f"Accelerate, {crew}", "accelerate", workers, threads, package="accelerate"),
    ]
