"""The check that every sample was used exactly once, from the records of the workers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from unisono.jsonl import read_lines
from unisono.train.record.trace import SAMPLES

LISTED = 5
"""The most samples that a line lists."""


class Place(NamedTuple):
    """The numbers of a step and of a call of ``step.run`` in it, from 0."""

    step: int
    call: int

    def __str__(self) -> str:
        return f"step {self.step}" + (f", call {self.call}" if self.call else "")


@dataclass(frozen=True, slots=True)
class ComputedSamples:
    """The samples that one worker began to compute in one call.

    Attributes:
        samples: the number of samples in the data set; 0 for a stream, whose length is not known.
        per_epoch: the number of samples that an epoch uses.
        cut: the number of shards of the batch.
        shards: the samples of each shard, by its number.
    """

    place: Place
    generation: int
    loop: int
    epoch: int
    samples: int
    per_epoch: int
    cut: int
    shards: Mapping[int, tuple[int, ...]]


Calls = Sequence[ComputedSamples]


@dataclass(frozen=True)
class Samples:
    """The records of all workers of a run.

    If a call was committed more than once (by a worker that was lost with it, or before the job continued from an older
    checkpoint), the newest generation counts. Numbers of generations are never used again.

    Attributes:
        committed: the committed calls, each with its generation.
    """

    computed: tuple[ComputedSamples, ...]
    committed: frozenset[tuple[Place, int]]

    @classmethod
    def read(cls, run_dir: Path) -> Samples:
        """Read the records in a run folder. The last line of a killed worker may be incomplete, and is left out."""
        return cls.of([line for path in sorted((run_dir / SAMPLES).glob("*.jsonl")) for line in read_lines(path)])

    @classmethod
    def of(cls, lines: Sequence[Mapping[str, Any]]) -> Samples:
        """Make the records from lines."""
        computed = []
        for line in lines:
            if "computed" in line:
                place = Place(line["computed"], line["call"])
                about = {name: line[name] for name in ("generation", "loop", "epoch", "samples", "per_epoch", "cut")}
                shards = {int(shard): tuple(samples) for shard, samples in line["shards"].items()}
                computed.append(ComputedSamples(place, shards=shards, **about))
        commits = (line for line in lines if "committed" in line)
        committed = frozenset((Place(line["committed"], line["call"]), line["generation"]) for line in commits)
        return cls(tuple(computed), committed)

    @property
    def lineage(self) -> dict[Place, int]:
        """The calls that led to the weights, with the generation of each."""
        newest = dict(sorted(self.committed, key=lambda commit: commit[1]))
        return dict(sorted(newest.items()))

    @property
    def repeated(self) -> int:
        """The number of times that a step was begun again in another generation."""
        tries = {(call.place, call.generation) for call in self.computed if not call.place.call}
        return len(tries) - len({place for place, _ in tries})

    @property
    def counted(self) -> dict[Place, list[ComputedSamples]]:
        """The computations that count: for each call of the lineage, those of its newest generation."""
        lineage = self.lineage
        counted: dict[Place, list[ComputedSamples]] = {place: [] for place in lineage}
        for call in self.computed:
            if lineage.get(call.place) == call.generation:
                counted[call.place].append(call)
        return counted


def problems(samples: Samples, steps: int, shards: int, serial: Samples | None = None) -> list[str]:
    """Sentences about errors in the samples that a run used; empty if all are right.

    The serial samples are those of a run without faults to compare with; without them, every epoch must be complete. A
    batch may be cut into more shards than those of the job.
    """
    counted = samples.counted
    epochs = defaultdict(list)  # the first calls of each step, by loop and epoch
    for place, tries in counted.items():
        for call in tries if place.call == 0 else ():
            epochs[f"epoch {call.epoch}" + (f" of loop {call.loop}" if call.loop else "")].append(call)
    errors = [*_steps(samples.lineage, steps), *_shards(counted, samples.lineage, shards)]
    errors += _unused(epochs) if serial is None else _unlike(counted, serial.counted)
    return errors + _doubled(epochs)


def _steps(lineage: Mapping[Place, int], steps: int) -> list[str]:
    committed = {place.step for place in lineage}
    errors = [f"step {step} was never committed" for step in range(steps) if step not in committed]
    errors += [
        f"step {step} was committed, but the job has {steps} steps" for step in sorted(committed) if step >= steps
    ]
    for (before, earlier), (after, later) in pairwise(lineage.items()):
        if later < earlier:
            errors.append(f"{before} was committed in generation {earlier}, and {after}, which follows, in {later}")
    return errors


def _shards(counted: Mapping[Place, Calls], lineage: Mapping[Place, int], base: int) -> list[str]:
    errors = []
    for place, tries in counted.items():
        cuts = {call.cut for call in tries}
        shards, due = Counter(shard for call in tries for shard in call.shards), range(max(cuts, default=base))
        where = f"{place} in generation {lineage[place]}"
        if len(cuts) > 1 or len(due) % base:
            cut = " and ".join(map(str, sorted(cuts)))
            errors.append(f"{where}: cut into {cut} shards, and the job has {base}")
        kinds = {
            "more than once": sorted(shard for shard, times in shards.items() if times > 1),
            "by nobody": sorted({*due} - shards.keys()),
            "that do not exist": sorted(shards.keys() - {*due}),
        }
        errors += [f"{where}: shards {_some(which)} computed {how}" for how, which in kinds.items() if which]
    return errors


def _unused(epochs: Mapping[str, Calls]) -> list[str]:
    errors = []
    for where, calls in epochs.items():
        used = {sample for call in calls for samples in call.shards.values() for sample in samples}
        about = calls[0]
        if about.samples and (foreign := sorted(used - set(range(about.samples)))):
            errors.append(f"{where}: samples {_some(foreign)} used, which the data set does not have")
        if len(used) < about.per_epoch:
            unused = sorted(set(range(about.samples)) - used)
            which = f", {_some(unused)} among them" if about.per_epoch == about.samples else ""
            errors.append(f"{where}: {about.per_epoch - len(used)} samples not used{which}")
    return errors


def _doubled(epochs: Mapping[str, Calls]) -> list[str]:
    errors = []
    for where, calls in epochs.items():
        steps = defaultdict(list)
        for call in calls:
            for sample in chain.from_iterable(call.shards.values()):
                steps[sample].append(call.place.step)
        repeated = sorted((sample, sorted(places)) for sample, places in steps.items() if len(places) > 1)
        errors += [
            f"{where}: sample {sample} used {len(places)} times, in steps {_some(places)}"
            for sample, places in repeated[:LISTED]
        ]
        if len(repeated) > LISTED:
            errors.append(f"{where}: {len(repeated) - LISTED} more samples used more than once")
    return errors


def _unlike(counted: Mapping[Place, Calls], serial: Mapping[Place, Calls]) -> list[str]:
    errors = []
    for place, tries in counted.items():
        own, expected = map(_by_shard, (tries, serial.get(place, ())))
        used, expected_samples = set(chain.from_iterable(own.values())), set(chain.from_iterable(expected.values()))
        if missing := sorted(expected_samples - used):
            errors.append(f"{place}: samples {_some(missing)} not used")
        if foreign := sorted(used - expected_samples):
            errors.append(f"{place}: samples {_some(foreign)} used, which the serial run used elsewhere or not at all")
        if used == expected_samples and own != expected:
            errors.append(f"{place}: the samples are those of the serial run, but in other shards or another order")
    return errors


def _by_shard(calls: Calls) -> dict[int, tuple[int, ...]]:
    return {shard: samples for call in calls for shard, samples in call.shards.items()}


def _some(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:LISTED]))
    return shown if len(numbers) <= LISTED else f"{shown} and {len(numbers) - LISTED} more"
