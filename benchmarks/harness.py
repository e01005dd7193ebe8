"""Runs what is compared, again and again, in random order."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pydantic import BaseModel
from rich.console import Console
from rich.progress import track

from benchmarks.crew import Crew, CrewFailed
from benchmarks.noise import NoiseMeter

R = TypeVar("R", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Entry(Generic[R]):
    """One of the things that are compared.

    Attributes:
        name: for people.
        crew: the workers.
        program: what they run.
        task: what they are told.
        found: what each of them tells.
    """

    name: str
    crew: Crew
    program: str
    task: BaseModel
    found: type[R]


@dataclass(slots=True)
class Measured(Generic[R]):
    """What an entry's runs found.

    Attributes:
        runs: for each run, what each worker found.
        failure: the last words of a worker that failed; no run follows it.
    """

    runs: list[list[R]] = field(default_factory=list)
    failure: str = ""


def measure(entries: Sequence[Entry[R]], rounds: int, meter: NoiseMeter, order: random.Random) -> list[Measured[R]]:
    """Run every entry once in each round, in fresh processes.

    Args:
        entries: what is compared.
        rounds: how often.
        meter: is calibrated before each run.
        order: decides the order of the entries, anew in each round.

    Returns:
        what was found, for each entry.
    """
    measured: list[Measured[R]] = [Measured() for _ in entries]
    plan = list(interleaved(len(entries), rounds, order))
    screen = Console(stderr=True)
    for number in track(plan, "measuring", console=screen, transient=True, disable=not screen.is_terminal):
        entry, so_far = entries[number], measured[number]
        if so_far.failure:
            continue
        meter.calibrate()
        try:
            so_far.runs.append(entry.crew.run(entry.program, entry.task, entry.found))
        except CrewFailed as error:
            so_far.failure = str(error)
            screen.print(f"{entry.name} failed:\n{error}", markup=False, highlight=False)
    return measured


def interleaved(entries: int, rounds: int, order: random.Random) -> Iterator[int]:
    """The numbers of all entries, once in each round, each round in another order."""
    for _ in range(rounds):
        yield from order.sample(range(entries), entries)
