"""The comparison of two runs: finds the first difference in their workers' traces. Nothing here touches the system.

A worker's trace is a sequence of moments. Two runs of one job have equal sequences, whatever their numbers of
workers; where they do not, the first moment that differs says what began it: the data, the loss, the gradient …
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import pairwise, takewhile
from typing import Any

from unisono.launch.settings import Size

Line = Mapping[str, Any]
Values = Mapping[str, str]

MISSING = "missing"
"""The value of what only one of two moments has."""


class Stage(StrEnum):
    """The kind of a moment, in the order in which moments follow each other in a step."""

    START = "weights after prepare"
    BEFORE = "parameters before the call"
    SAMPLES = "samples of each shard"
    INPUTS = "batch of each shard"
    LOSSES = "loss of each shard"
    SHARES = "weight of each shard"
    CLIP = "clipping"
    GRADIENTS = "gradients"
    OPTIONS = "settings of the optimizer"
    UPDATED = "parameters after the update"
    WEIGHTS = "weights after the step"
    JOB = "job"
    FLOW = "calls of step.run"
    LENGTH = "number of steps"


COUNTS = frozenset({Stage.START, Stage.BEFORE, Stage.LOSSES, Stage.UPDATED, Stage.WEIGHTS, Stage.FLOW, Stage.LENGTH})
"""Differences that break the promise. Others are how it came about; without one of these they do not matter."""

WHOLE = frozenset({Stage.START, Stage.WEIGHTS})
"""Moments that show all parameters and buffers, in the model's order."""

HARMLESS = frozenset({"bucket_mb"})
"""Settings of a job that do not decide bits."""

PER_SHARD = frozenset({Stage.SAMPLES, Stage.INPUTS, Stage.LOSSES, Stage.SHARES})


@dataclass(frozen=True, slots=True)
class Moment:
    """One observation of a worker, in its trace.

    Attributes:
        step: the number of its step, from 0.
        call: the number of its call within the step; None outside of calls.
        values: digests or settings, by parameter, shard or setting.
        sha256: the digest of all weights, where the moment shows them all.
    """

    stage: Stage
    step: int
    call: int | None
    values: Values
    sha256: str = ""

    @property
    def place(self) -> tuple[Stage, int, int | None]:
        """What must be equal before values can be compared."""
        return self.stage, self.step, self.call


Moments = tuple[Moment, ...]


def read_moments(lines: Iterable[Line]) -> Moments:
    """The moments of one worker's trace, given its lines."""
    moments: list[Moment] = []
    last: int | None = None
    for line in lines:
        match line["kind"]:
            case "weights":
                moments.append(_weights(line, last))
                last = line["step"]
            case "call":
                moments += _call(line)
            case "update":
                moments += _update(line)
    return tuple(moments)


def _weights(line: Line, last: int | None) -> Moment:
    # prepare shows the weights without a step in between; anything else is the end of a step.
    if last is not None and line["step"] == last + 1:
        return Moment(Stage.WEIGHTS, last, None, line["tensors"], line.get("sha256", ""))
    return Moment(Stage.START, line["step"], None, line["tensors"], line.get("sha256", ""))


def _call(line: Line) -> Iterator[Moment]:
    def moment(stage: Stage, values: Values) -> Moment:
        return Moment(stage, line["step"], line["call"], values)

    yield moment(Stage.BEFORE, line["before"])
    yield moment(Stage.SAMPLES, _numbered(line["samples"]))
    yield moment(Stage.INPUTS, line["inputs"])
    yield moment(Stage.LOSSES, _numbered(line["losses"]))
    yield moment(Stage.SHARES, _numbered(line["shares"]))
    yield moment(Stage.CLIP, _texts(line["clip"]))


def _update(line: Line) -> Iterator[Moment]:
    yield Moment(Stage.GRADIENTS, line["step"], line["call"], line["gradients"])
    yield Moment(Stage.OPTIONS, line["step"], line["call"], _texts(line["options"]))
    yield Moment(Stage.UPDATED, line["step"], line["call"], line["after"])


def _numbered(values: Sequence[Any]) -> Values:
    return {str(number): str(value) for number, value in enumerate(values)}


def _texts(values: Mapping[str, Any]) -> Values:
    return {name: str(value) for name, value in values.items()}


@dataclass(frozen=True)
class RunTrace:
    """The traces of all workers of one run.

    Attributes:
        job: the settings of its job; empty if they are not known.
        complete: whether the run ended well; of any other run only the beginning can be compared.
    """

    size: Size
    ranks: tuple[Moments, ...]
    job: Mapping[str, Any] = field(default_factory=dict)
    complete: bool = True

    @cached_property
    def whole(self) -> Moments:
        """The moments of the run: rank 0's, with everybody's batches and tensors. As far as the shortest trace goes."""
        return tuple(map(_joined, zip(*self.ranks, strict=False)))

    @property
    def steps(self) -> int:
        """How many steps it took."""
        return sum(moment.stage is Stage.WEIGHTS for moment in self.whole)

    @property
    def tensors(self) -> int:
        """How many parameters and buffers there are."""
        return max((len(moment.values) for moment in self.whole if moment.stage in WHOLE), default=0)

    @property
    def trained(self) -> frozenset[str]:
        """The parameters that the optimizers update."""
        return frozenset(name for moment in self.whole if moment.stage is Stage.UPDATED for name in moment.values)

    @property
    def has_trained(self) -> bool:
        """Whether any step has changed a parameter that an optimizer holds."""
        held = {name for moment in self.whole if moment.stage is Stage.BEFORE for name in moment.values}
        shown = [moment for moment in self.whole if moment.stage in WHOLE]
        return any(
            before.values.get(name) != after.values[name]
            for before, after in pairwise(shown)
            if after.stage is Stage.WEIGHTS
            for name in held & after.values.keys()
        )

    @property
    def sha256(self) -> str:
        """Of the last weights; empty if there are none."""
        return next((moment.sha256 for moment in reversed(self.whole) if moment.stage in WHOLE), "")

    def owners(self, difference: Difference) -> frozenset[int]:
        """The ranks that computed the shards that a difference names."""
        place = (Stage.INPUTS, difference.step, difference.call)
        shares = [{shard for m in moments if m.place == place for shard in m.values} for moments in self.ranks]
        return frozenset(rank for rank, shards in enumerate(shares) if shards.intersection(difference.names))

    def until(self, step: int) -> RunTrace:
        """The run up to the end of a step."""
        cut = tuple(tuple(takewhile(lambda moment: moment.step <= step, moments)) for moments in self.ranks)
        return replace(self, ranks=cut)


def _joined(same: Sequence[Moment]) -> Moment:
    """Of what several have seen the first one's values; some hold other stages of the model than others."""
    values = {name: value for moment in reversed(same) for name, value in moment.values.items()}
    return replace(same[0], values=values)


@dataclass(frozen=True, slots=True)
class Difference:
    """Two moments that should be equal and are not.

    Attributes:
        call: the number of the call in that step; None outside of calls.
        ours: the first one's value in the run that is compared with.
        theirs: its value in the other.
    """

    stage: Stage
    step: int
    call: int | None
    names: tuple[str, ...]
    ours: str
    theirs: str

    @property
    def absent(self) -> bool:
        """Whether the first one exists on one side only."""
        return MISSING in (self.ours, self.theirs)


@dataclass(frozen=True, slots=True)
class Parting:
    """The first differences between two sequences of moments.

    Attributes:
        began: the first difference that led there.
        counts: the first difference that breaks the promise.
        weights: the first moment whose weights differ; None if only losses or lengths do.
    """

    began: Difference
    counts: Difference
    weights: Difference | None


def find_parting(ours: Moments, theirs: Moments, *, whole: bool = True) -> Parting | None:
    """Where two sequences part; None if they do not. If both are ``whole``, they must be equally long."""
    differences = _differences(ours, theirs, whole=whole)
    before: list[Difference] = []
    for difference in differences:
        if difference.stage in COUNTS:
            began = _began([*before, difference])
            return Parting(began, difference, _first_weights([difference, *differences]))
        before.append(difference)
    return None


def _differences(ours: Moments, theirs: Moments, *, whole: bool) -> Iterator[Difference]:
    for first, second in zip(ours, theirs, strict=False):
        if first.place != second.place:
            yield Difference(Stage.FLOW, min(first.step, second.step), None, (), _said(first), _said(second))
            return
        if first.values != second.values:
            yield _difference(first, second)
    if whole and len(ours) != len(theirs):
        steps = [sum(moment.stage is Stage.WEIGHTS for moment in moments) for moments in (ours, theirs)]
        yield Difference(Stage.LENGTH, min(steps), None, (), str(steps[0]), str(steps[1]))


def _difference(one: Moment, other: Moment) -> Difference:
    order = dict.fromkeys([*one.values, *other.values])
    if one.stage in PER_SHARD:
        order = dict.fromkeys(sorted(order, key=int))
    names = [name for name in order if one.values.get(name) != other.values.get(name)]
    first = names[0]
    ours, theirs = one.values.get(first, MISSING), other.values.get(first, MISSING)
    return Difference(one.stage, one.step, one.call, tuple(names), ours, theirs)


def _said(moment: Moment) -> str:
    if moment.stage in WHOLE:
        return f"the end of step {moment.step}" if moment.stage is Stage.WEIGHTS else "run.prepare"
    what = "step.run" if moment.stage is Stage.BEFORE else "an update"
    return f"{what} in step {moment.step}, call {moment.call}"


def _began(differences: Sequence[Difference]) -> Difference:
    """What led to the last of these: the first of all, or the batches that went into it.

    Batches may hold what nobody computes with, such as a time: they are to blame only for their own call.
    """
    batches = list(takewhile(lambda each: each.stage is Stage.INPUTS, differences))
    first = differences[len(batches)]
    blamed = (
        difference for difference in batches if difference.step == first.step and first.call in (None, difference.call)
    )
    return next(blamed, first)


def _first_weights(differences: Iterable[Difference]) -> Difference | None:
    return next((difference for difference in differences if difference.stage in WHOLE), None)


@dataclass(frozen=True, slots=True)
class Finding:
    """The first differences between two runs, or between the ranks of one run.

    Attributes:
        against: the size of the run that it is compared with; None if its own ranks differ.
        rank: the first rank that differs from rank 0, if its own ranks differ.
        ranks: the ranks that computed the differing shards, if shards differ.
        trained: the parameters that the optimizers update.
        jobs: the settings of the job in the two runs.
    """

    parting: Parting
    size: Size
    against: Size | None = None
    rank: int | None = None
    ranks: frozenset[int] = frozenset()
    trained: frozenset[str] = frozenset()
    jobs: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {})

    @property
    def began(self) -> Difference:
        """The difference that began it."""
        return self.parting.began

    @property
    def stage(self) -> Stage:
        """What is to blame: the job before all that follows from it."""
        return Stage.JOB if self.job_differences else self.began.stage

    @property
    def job_differences(self) -> dict[str, tuple[Any, Any]]:
        """The settings of the job that differ between the runs, with both values."""
        ours, theirs = self.jobs
        both = [name for name in ours if name in theirs and name not in HARMLESS]
        return {name: (ours[name], theirs[name]) for name in both if ours[name] != theirs[name]}

    @property
    def needs_repetition(self) -> bool:
        """Whether it helps to know if the run that is compared with repeats itself."""
        known_anyway = {Stage.JOB, Stage.CLIP, Stage.OPTIONS, Stage.FLOW, Stage.LENGTH}
        native = self.stage is Stage.GRADIENTS and self.jobs[1].get("reduction") == "native"
        return self.against is not None and self.against != self.size and self.stage not in known_anyway and not native


def compare(reference: RunTrace, other: RunTrace) -> Finding | None:
    """Where a run parts from the one it is compared with, or its ranks from each other, whichever comes first."""
    inside, whole = compare_ranks(other), reference.complete and other.complete
    parting = find_parting(reference.whole, other.whole, whole=whole)
    if parting is None or (inside is not None and inside.began.step <= parting.began.step):
        return inside
    return Finding(
        parting,
        size=other.size,
        against=reference.size,
        ranks=other.owners(parting.began) if parting.began.stage in PER_SHARD else frozenset(),
        trained=other.trained,
        jobs=(reference.job, other.job),
    )


def compare_ranks(run: RunTrace) -> Finding | None:
    """Where the ranks of one run part from rank 0; each has batches of its own, devices may have tensors."""
    first, *others = (tuple(m for m in moments if m.stage is not Stage.INPUTS) for moments in run.ranks)
    for rank, moments in enumerate(others, start=1):
        seen = first
        if run.size.devices > 1:
            seen = (*map(_seen_there, first, moments), *first[len(moments) :])
        parting = find_parting(seen, moments, whole=run.complete)
        if parting is not None:
            return Finding(parting, run.size, rank=rank, trained=run.trained, jobs=(run.job, run.job))
    return None


def _seen_there(one: Moment, other: Moment) -> Moment:
    """A moment as a device sees it that has other tensors: what only one of both knows is not compared."""
    return replace(one, values={name: one.values.get(name, value) for name, value in other.values.items()})
