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
        values: the digests or settings, by parameter, shard or setting.
        sha256: the digest of all weights, where the moment has them all.
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
                moments += _call_moments(line)
            case "update":
                moments += _update_moments(line)
    return tuple(moments)


def _weights(line: Line, last: int | None) -> Moment:
    # run.prepare records the weights without a step in between; all other such lines are the end of a step.
    if last is not None and line["step"] == last + 1:
        return Moment(Stage.WEIGHTS, last, None, line["tensors"], line.get("sha256", ""))
    return Moment(Stage.START, line["step"], None, line["tensors"], line.get("sha256", ""))


def _call_moments(line: Line) -> Iterator[Moment]:
    def moment(stage: Stage, values: Values) -> Moment:
        return Moment(stage, line["step"], line["call"], values)

    yield moment(Stage.BEFORE, line["before"])
    yield moment(Stage.SAMPLES, _numbered(line["samples"]))
    yield moment(Stage.INPUTS, line["inputs"])
    yield moment(Stage.LOSSES, _numbered(line["losses"]))
    yield moment(Stage.SHARES, _numbered(line["shares"]))
    yield moment(Stage.CLIP, _texts(line["clip"]))


def _update_moments(line: Line) -> Iterator[Moment]:
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
        """The moments of rank 0, with the batches and tensors of all ranks, as far as the shortest trace goes."""
        return tuple(map(_merged, zip(*self.ranks, strict=False)))

    @property
    def steps(self) -> int:
        """The number of steps that it took."""
        return sum(moment.stage is Stage.WEIGHTS for moment in self.whole)

    @property
    def tensors(self) -> int:
        """The number of parameters and buffers."""
        return max((len(moment.values) for moment in self.whole if moment.stage in WHOLE), default=0)

    @property
    def trained(self) -> frozenset[str]:
        """The parameters that the optimizers update."""
        return frozenset(name for moment in self.whole if moment.stage is Stage.UPDATED for name in moment.values)

    @property
    def has_trained(self) -> bool:
        """Whether any step has changed a parameter that an optimizer holds."""
        optimized = {name for moment in self.whole if moment.stage is Stage.BEFORE for name in moment.values}
        weights = [moment for moment in self.whole if moment.stage in WHOLE]
        return any(
            before.values.get(name) != after.values[name]
            for before, after in pairwise(weights)
            if after.stage is Stage.WEIGHTS
            for name in optimized & after.values.keys()
        )

    @property
    def sha256(self) -> str:
        """The digest of the last weights; empty if there are none."""
        return next((moment.sha256 for moment in reversed(self.whole) if moment.stage in WHOLE), "")

    def owners(self, difference: Difference) -> frozenset[int]:
        """The ranks that computed the shards that a difference names."""
        place = (Stage.INPUTS, difference.step, difference.call)
        shards_of = [{shard for m in moments if m.place == place for shard in m.values} for moments in self.ranks]
        return frozenset(rank for rank, shards in enumerate(shards_of) if shards.intersection(difference.names))

    def until(self, step: int) -> RunTrace:
        """The run up to the end of a step."""
        cut = tuple(tuple(takewhile(lambda moment: moment.step <= step, moments)) for moments in self.ranks)
        return replace(self, ranks=cut)


def _merged(moments: Sequence[Moment]) -> Moment:
    """One moment, as all ranks recorded it. A value that several ranks have is the first one's.

    Ranks may record different names, since each device may hold another stage of the model.
    """
    values = {name: value for moment in reversed(moments) for name, value in moment.values.items()}
    return replace(moments[0], values=values)


@dataclass(frozen=True, slots=True)
class Difference:
    """Two moments that should be equal and are not.

    Attributes:
        call: the number of the call in that step; None outside of calls.
        names: the names of the values that differ.
        ours: the value of the first name in the reference run.
        theirs: its value in the other run.
    """

    stage: Stage
    step: int
    call: int | None
    names: tuple[str, ...]
    ours: str
    theirs: str

    @property
    def absent(self) -> bool:
        """Whether only one of the runs has the first value."""
        return MISSING in (self.ours, self.theirs)


@dataclass(frozen=True, slots=True)
class Parting:
    """The first differences between two sequences of moments.

    Attributes:
        began: the first difference, which led to the one that counts.
        counts: the first difference that breaks the promise of equal bits.
        weights: the first moment whose weights differ; None if only losses or lengths do.
    """

    began: Difference
    counts: Difference
    weights: Difference | None


def find_parting(ours: Moments, theirs: Moments, *, whole: bool = True) -> Parting | None:
    """The first differences of two sequences; None if they are equal. If both are ``whole``, lengths must be equal."""
    differences = _differences(ours, theirs, whole=whole)
    before: list[Difference] = []
    for difference in differences:
        if difference.stage in COUNTS:
            began = _origin([*before, difference])
            return Parting(began, difference, _first_weights([difference, *differences]))
        before.append(difference)
    return None


def _differences(ours: Moments, theirs: Moments, *, whole: bool) -> Iterator[Difference]:
    for first, second in zip(ours, theirs, strict=False):
        if first.place != second.place:
            yield Difference(Stage.FLOW, min(first.step, second.step), None, (), _describe(first), _describe(second))
            return
        if first.values != second.values:
            yield _difference(first, second)
    if whole and len(ours) != len(theirs):
        steps = [sum(moment.stage is Stage.WEIGHTS for moment in moments) for moments in (ours, theirs)]
        yield Difference(Stage.LENGTH, min(steps), None, (), str(steps[0]), str(steps[1]))


def _difference(ours: Moment, theirs: Moment) -> Difference:
    order = dict.fromkeys([*ours.values, *theirs.values])
    if ours.stage in PER_SHARD:
        order = dict.fromkeys(sorted(order, key=int))
    names = [name for name in order if ours.values.get(name) != theirs.values.get(name)]
    values = [moment.values.get(names[0], MISSING) for moment in (ours, theirs)]
    return Difference(ours.stage, ours.step, ours.call, tuple(names), *values)


def _describe(moment: Moment) -> str:
    if moment.stage in WHOLE:
        return f"the end of step {moment.step}" if moment.stage is Stage.WEIGHTS else "run.prepare"
    what = "step.run" if moment.stage is Stage.BEFORE else "an update"
    return f"{what} in step {moment.step}, call {moment.call}"


def _origin(differences: Sequence[Difference]) -> Difference:
    """The difference that led to the last one: the first of all, or that of the batches that went into it.

    A batch may hold values that no computation uses, such as a time: it is to blame only for its own call.
    """
    batches = list(takewhile(lambda difference: difference.stage is Stage.INPUTS, differences))
    first = differences[len(batches)]
    to_blame = (batch for batch in batches if batch.step == first.step and first.call in (None, batch.call))
    return next(to_blame, first)


def _first_weights(differences: Iterable[Difference]) -> Difference | None:
    return next((difference for difference in differences if difference.stage in WHOLE), None)


@dataclass(frozen=True, slots=True)
class Finding:
    """The first differences between two runs, or between the ranks of one run.

    Attributes:
        size: the size of the run.
        against: the size of the reference run; None if the run's own ranks differ.
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
        """The first difference."""
        return self.parting.began

    @property
    def stage(self) -> Stage:
        """The stage to blame: the settings of the job before all that follows from them."""
        return Stage.JOB if self.job_differences else self.began.stage

    @property
    def job_differences(self) -> dict[str, tuple[Any, Any]]:
        """The settings of the job that differ between the runs, with both values."""
        ours, theirs = self.jobs
        both = [name for name in ours if name in theirs and name not in HARMLESS]
        return {name: (ours[name], theirs[name]) for name in both if ours[name] != theirs[name]}

    @property
    def needs_repetition(self) -> bool:
        """Whether the cause depends on whether the reference run repeats itself."""
        explained = {Stage.JOB, Stage.CLIP, Stage.OPTIONS, Stage.FLOW, Stage.LENGTH}
        native = self.stage is Stage.GRADIENTS and self.jobs[1].get("reduction") == "native"
        return self.against is not None and self.against != self.size and self.stage not in explained and not native


def compare(reference: RunTrace, other: RunTrace) -> Finding | None:
    """The first differences of a run from the reference, or between its own ranks, whichever come first."""
    among_ranks, whole = compare_ranks(other), reference.complete and other.complete
    parting = find_parting(reference.whole, other.whole, whole=whole)
    if parting is None or (among_ranks is not None and among_ranks.began.step <= parting.began.step):
        return among_ranks
    return Finding(
        parting,
        size=other.size,
        against=reference.size,
        ranks=other.owners(parting.began) if parting.began.stage in PER_SHARD else frozenset(),
        trained=other.trained,
        jobs=(reference.job, other.job),
    )


def compare_ranks(run: RunTrace) -> Finding | None:
    """The first differences of the ranks of one run from rank 0.

    Batches are not compared, since each rank has its own; nor are tensors that only one of two devices holds.
    """
    first, *others = (tuple(m for m in moments if m.stage is not Stage.INPUTS) for moments in run.ranks)
    for rank, moments in enumerate(others, start=1):
        expected = first
        if run.size.devices > 1:
            expected = (*map(_common_to, first, moments), *first[len(moments) :])
        parting = find_parting(expected, moments, whole=run.complete)
        if parting is not None:
            return Finding(parting, run.size, rank=rank, trained=run.trained, jobs=(run.job, run.job))
    return None


def _common_to(moment: Moment, other: Moment) -> Moment:
    """A moment with the names of another one: a name that the first lacks gets the other's value, so it is equal."""
    return replace(moment, values={name: moment.values.get(name, value) for name, value in other.values.items()})
