"""The check that every sample was used exactly once, from what the workers wrote down while they trained."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from unisono.jsonl import read_lines
from unisono.train.record.sample_log import FOLDER

LISTED = 5
"""Samples that one line names."""


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A step, and a call of ``step.run`` in it: both by number, the call from 0."""

    step: int
    call: int

    def __str__(self) -> str:
        return f"step {self.step}" + (f", call {self.call}" if self.call else "")


@dataclass(frozen=True, slots=True)
class ComputedSamples:
    """The samples that one worker set out to compute in one call.

    Attributes:
        place: the step and the call.
        generation: the number of the generation.
        loop: the number of the loop.
        epoch: the number of the epoch in the loop.
        samples: the number of samples in the data set; 0 for a stream, of which it is not known.
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


@dataclass(frozen=True)
class Samples:
    """All that the workers of a run wrote down.

    Of a call that was committed more than once (on a worker that was lost with it, or before the job went on from an
    older checkpoint) the newest generation counts: numbers of generations are never used again.

    Attributes:
        computed: the computed samples, in any order.
        committed: the committed calls, each with its generation.
    """

    computed: tuple[ComputedSamples, ...]
    committed: frozenset[tuple[Place, int]]

    @classmethod
    def read(cls, run_dir: Path) -> Samples:
        """What lies in a run folder. The last line of a worker that was killed may be cut off."""
        return cls.of([line for path in sorted((run_dir / FOLDER).glob("*.jsonl")) for line in read_lines(path)])

    @classmethod
    def of(cls, lines: Sequence[Mapping[str, Any]]) -> Samples:
        """What lines say."""
        computed = tuple(_computed(line) for line in lines if "computed" in line)
        commits = (line for line in lines if "committed" in line)
        return cls(computed, frozenset((Place(one["committed"], one["call"]), one["generation"]) for one in commits))

    @property
    def lineage(self) -> dict[Place, int]:
        """The calls that made the weights, with the generation of each."""
        newest = dict(sorted(self.committed, key=lambda one: one[1]))
        return dict(sorted(newest.items()))

    @property
    def repeated(self) -> int:
        """How many times a step was begun again in another generation."""
        tries = {(one.place, one.generation) for one in self.computed if not one.place.call}
        return len(tries) - len({place for place, _ in tries})

    @property
    def tries(self) -> dict[tuple[Place, int], list[ComputedSamples]]:
        """What the workers of a generation computed for a call."""
        found = defaultdict(list)
        for one in self.computed:
            found[one.place, one.generation].append(one)
        return found


def problems(samples: Samples, steps: int, shards: int, serial: Samples | None = None) -> list[str]:
    """What is wrong with the samples that a run used; nothing if all is right.

    Args:
        samples: the samples of the run.
        steps: the number of steps of the job.
        shards: the number of shards of the job; a batch may be cut finer.
        serial: the samples of a run without faults, to compare with; without one every epoch has to be whole.
    """
    counted = _Counted.of(samples)
    found = [*_steps(counted, steps), *_shards(counted, shards)]
    found += _epochs(counted) if serial is None else _unlike(counted, _Counted.of(serial))
    return found + _doubled(counted)


@dataclass(frozen=True)
class _Counted:
    """The computations that count: for each call of the lineage, those of its newest generation."""

    lineage: Mapping[Place, int]
    tries: Mapping[Place, Sequence[ComputedSamples]]

    @classmethod
    def of(cls, samples: Samples) -> _Counted:
        lineage, tries = samples.lineage, samples.tries
        return cls(lineage, {place: tries.get((place, generation), []) for place, generation in lineage.items()})

    def shards(self, place: Place) -> list[int]:
        return sorted(shard for one in self.tries[place] for shard in one.shards)

    def samples(self, place: Place) -> dict[int, tuple[int, ...]]:
        return {shard: used for one in self.tries[place] for shard, used in one.shards.items()}

    def epochs(self) -> dict[tuple[int, int], list[ComputedSamples]]:
        """The first calls of each step, by loop and epoch."""
        found = defaultdict(list)
        for place, tries in self.tries.items():
            if place.call == 0:
                for one in tries:
                    found[one.loop, one.epoch].append(one)
        return found


def _steps(counted: _Counted, steps: int) -> list[str]:
    done = {place.step for place in counted.lineage}
    found = [f"step {step} was never committed" for step in range(steps) if step not in done]
    found += [f"step {step} was committed, but the job has {steps} steps" for step in sorted(done) if step >= steps]
    for (before, earlier), (after, later) in pairwise(counted.lineage.items()):
        if later < earlier:
            found.append(f"{before} was committed in generation {earlier}, and {after}, which follows, in {later}")
    return found


def _shards(counted: _Counted, base: int) -> list[str]:
    found = []
    for place, generation in counted.lineage.items():
        cuts = {one.cut for one in counted.tries[place]}
        shards, wanted = counted.shards(place), range(max(cuts, default=base))
        where = f"{place} in generation {generation}"
        if len(cuts) > 1 or len(wanted) % base:
            cut = " and ".join(map(str, sorted(cuts)))
            found.append(f"{where}: cut into {cut} shards, and the job has {base}")
        if shards != list(wanted):
            often = [shard for shard, times in Counter(shards).items() if times > 1]
            missing = sorted(set(wanted) - set(shards))
            wrong = {"more than once": often, "by nobody": missing, "that do not exist": sorted({*shards} - {*wanted})}
            found += [f"{where}: shards {_some(which)} computed {how}" for how, which in wrong.items() if which]
    return found


def _epochs(counted: _Counted) -> list[str]:
    found = []
    for (loop, epoch), tries in counted.epochs().items():
        used = {sample for one in tries for shard in one.shards.values() for sample in shard}
        where = f"epoch {epoch}" + (f" of loop {loop}" if loop else "")
        about = tries[0]
        if about.samples and (foreign := sorted(used - set(range(about.samples)))):
            found.append(f"{where}: samples {_some(foreign)} used, which the data set does not have")
        if len(used) < about.per_epoch:
            unused = sorted(set(range(about.samples)) - used)
            which = f", {_some(unused)} among them" if about.per_epoch == about.samples else ""
            found.append(f"{where}: {about.per_epoch - len(used)} samples not used{which}")
    return found


def _doubled(counted: _Counted) -> list[str]:
    found = []
    for (loop, epoch), tries in counted.epochs().items():
        steps = defaultdict(list)
        for one in tries:
            for shard in one.shards.values():
                for sample in shard:
                    steps[sample].append(one.place.step)
        where = f"epoch {epoch}" + (f" of loop {loop}" if loop else "")
        often = {sample: sorted(places) for sample, places in steps.items() if len(places) > 1}
        found += [
            f"{where}: sample {sample} used {len(places)} times, in steps {_some(places)}"
            for sample, places in sorted(often.items())[:LISTED]
        ]
        if len(often) > LISTED:
            found.append(f"{where}: {len(often) - LISTED} more samples used more than once")
    return found


def _unlike(counted: _Counted, serial: _Counted) -> list[str]:
    found = []
    for place in counted.lineage:
        ours, theirs = counted.samples(place), serial.samples(place) if place in serial.tries else {}
        used, wanted = ({sample for shard in each.values() for sample in shard} for each in (ours, theirs))
        if missing := sorted(wanted - used):
            found.append(f"{place}: samples {_some(missing)} not used")
        if foreign := sorted(used - wanted):
            found.append(f"{place}: samples {_some(foreign)} used, which the serial run used elsewhere or not at all")
        if used == wanted and ours != theirs:
            found.append(f"{place}: the samples are those of the serial run, but in other shards or another order")
    return found


def _some(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:LISTED]))
    return shown if len(numbers) <= LISTED else f"{shown} and {len(numbers) - LISTED} more"


def _computed(line: Mapping[str, Any]) -> ComputedSamples:
    return ComputedSamples(
        Place(line["computed"], line["call"]),
        line["generation"],
        line["loop"],
        line["epoch"],
        line["samples"],
        line["per_epoch"],
        line["cut"],
        {int(shard): tuple(used) for shard, used in line["shards"].items()},
    )
