"""The record of a run, read from its run folder."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from unisono.adapt.view import Decision, Figure, Verb
from unisono.checkpoint.folder import RunFolder
from unisono.errors import JobError
from unisono.job import Job
from unisono.jsonl import damaged_lines, read_lines
from unisono_lab.journal_events import moment_of, title_of


@dataclass(frozen=True, slots=True)
class Record:
    """A run, finished or not, as its run folder records it.

    Attributes:
        journal: the events, in the order in which they were written.
        metrics: lines of steps, and what the script logged beside them.
        damaged: sentences about lines that could not be read, and are left out.
    """

    path: Path
    job: Job
    journal: Sequence[Mapping[str, Any]]
    metrics: Sequence[Mapping[str, Any]]
    damaged: Sequence[str] = ()

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read a run folder.

        Raises:
            JobError: the folder is no run folder, holds no records, or cannot be read.
        """
        folder = RunFolder(path)
        job = _job(folder)
        files = [folder.path / "journal.jsonl", folder.path / "metrics.jsonl"]
        try:
            journal, metrics = map(read_lines, files)
            damaged = [_damage(file, numbers) for file in files if (numbers := damaged_lines(file))]
        except OSError as error:
            raise JobError(f"{folder.path} cannot be read: {error}") from error
        if not journal and not metrics:
            raise JobError(f"{folder.path} holds no records: journal.jsonl and metrics.jsonl are missing or empty")
        return cls(folder.path, job, journal, metrics, damaged)

    @property
    def batch_size(self) -> int:
        """The samples in the first global batch; 0 if it is not known."""
        return self.job.batch_size or next((line["batch_size"] for line in self.steps), 0)

    @property
    def steps(self) -> list[Mapping[str, Any]]:
        """The lines of steps, without what the script logged beside them."""
        return [line for line in self.metrics if "loss" in line and "step" in line]


def _job(folder: RunFolder) -> Job:
    if not folder.path.is_dir():
        raise JobError(f"there is no run folder {folder.path}: unisono run prints its path when it starts")
    fields = folder.read_job()
    if fields is None:
        inside = sorted(path.parent.name for path in folder.path.glob("*/job.json"))
        hint = f"; did you mean {folder.path / inside[-1]}?" if inside else ""
        raise JobError(f"{folder.path} is no run folder: it has no job.json{hint}")
    try:
        return Job(**fields)
    except (JobError, TypeError) as error:
        raise JobError(f"{folder.path / 'job.json'} is no job of this version: {error}") from error


def first_problem(error: ValidationError) -> str:
    """The first error in values from a file, with its place."""
    problem = error.errors()[0]
    return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"


def problems(error: ValidationError) -> str:
    """The first ten errors in a file, each with its place."""
    texts = [f"{'.'.join(map(str, problem['loc'])) or 'all'}: {problem['msg']}" for problem in error.errors()]
    return "; ".join(texts[:10]) + (f"; and {len(texts) - 10} more" if len(texts) > 10 else "")


def _damage(file: Path, numbers: Sequence[int]) -> str:
    listing = ", ".join(map(str, numbers[:10])) + (" …" if len(numbers) > 10 else "")
    noun = "line" if len(numbers) == 1 else "lines"
    return f"{file}: {noun} {listing} cannot be read and {'is' if len(numbers) == 1 else 'are'} left out"


# The decisions of a run beside those of a replay.

Likeness = Literal["alike", "different", "in the run alone", "in the replay alone"]


@dataclass(frozen=True, slots=True)
class Pair:
    """A decision of the run beside the replay's, by the same policy after the same step; or one of them alone."""

    step: int
    run: Decision | None
    replay: Decision | None

    @property
    def policy(self) -> str:
        """The policy that decided."""
        return self._either.policy

    @property
    def verb(self) -> Verb:
        """The verb of the decision."""
        return self._either.verb

    @property
    def likeness(self) -> Likeness:
        """Whether the two decisions, and their figures, are alike."""
        if self.run is None:
            return "in the replay alone"
        if self.replay is None:
            return "in the run alone"
        return "alike" if self.run == self.replay else "different"

    @property
    def _either(self) -> Decision:
        decision = self.run or self.replay
        assert decision is not None, "at least one of the two decided"
        return decision


def compared(run: Sequence[tuple[int, Decision]], replayed: Sequence[tuple[int, Decision]]) -> list[Pair]:
    """Decisions side by side, in the order of steps."""
    unpaired: dict[tuple[int, str, Verb], deque[Decision]] = defaultdict(deque)
    for step, decision in replayed:
        unpaired[step, decision.policy, decision.verb].append(decision)
    pairs = []
    for step, decision in run:
        others = unpaired[step, decision.policy, decision.verb]
        pairs.append(Pair(step, decision, others.popleft() if others else None))
    alone = [Pair(step, None, decision) for (step, _, _), others in unpaired.items() for decision in others]
    return sorted([*pairs, *alone], key=lambda pair: pair.step)


# The events of a run, in their order.

T = TypeVar("T")

TITLED_EVENTS = frozenset({"started", "resumed", "minted", "lost", "left", "resized", "over"})
"""Events that are shown by their titles, since their figures alone would be hard to read."""

HIDDEN_EVENTS = frozenset({"agent joined", "asked for", "formed"})
"""Events that are hidden by default: they follow from others, or change nothing for the workers."""


@dataclass(frozen=True, slots=True)
class JournalEvent:
    """A line of the journal.

    Attributes:
        seconds: the seconds since the first line; None if the line has no time.
    """

    seconds: float | None
    line: Mapping[str, Any]

    @property
    def event(self) -> str:
        """The name of the event."""
        return str(self.line.get("event", ""))

    @property
    def step(self) -> int | None:
        """The number of committed steps, if the line has it."""
        step = self.line.get("step")
        return step if isinstance(step, int) else None

    @property
    def text(self) -> str:
        """The line as text: its title, or all of its figures."""
        about = {name: value for name, value in self.line.items() if name not in ("event", "time", "step")}
        return (self.event in TITLED_EVENTS and title_of(self.line)) or figures(about)


def timeline(journal: Sequence[Mapping[str, Any]]) -> list[JournalEvent]:
    """The lines of a journal, each with its time since the first one."""
    times = [moment_of(line) for line in journal]
    start = next((time for time in times if time is not None), 0.0)
    since = [None if time is None else time - start for time in times]
    return [JournalEvent(seconds, line) for seconds, line in zip(since, journal, strict=True)]


def decision_of(line: Mapping[str, Any]) -> Decision:
    """The decision in a line ``decided``."""
    why = line.get("why")
    figures = why if isinstance(why, Mapping) else {}
    return Decision(str(line.get("policy")), line.get("verb", ""), line.get("value"), figures, line.get("shards"))


def valid_decisions(journal: Iterable[Mapping[str, Any]]) -> list[tuple[int, Decision]]:
    """The decisions that led to the present weights, each with the number of committed steps."""
    return [(line["step"], decision_of(line)) for line in valid_lines(journal, "decided")]


def valid_lines(journal: Iterable[Mapping[str, Any]], event: str) -> list[Mapping[str, Any]]:
    """The lines of an event that led to the present weights: each once, and each with a step.

    A run that goes on from a checkpoint repeats the steps after it, and a run that starts over repeats all. A new main
    worker may write the lines of the earlier one again.
    """
    valid: dict[str, Mapping[str, Any]] = {}
    earlier: dict[str, Mapping[str, Any]] = {}  # the lines of starts before the newest one
    for line in journal:
        name, step = line.get("event"), line.get("step")
        if name == "started":
            valid, earlier = {}, earlier | valid
        elif name == "resumed" and isinstance(step, int):
            valid, earlier = (
                {key: valid_line for key, valid_line in (earlier | valid).items() if valid_line["step"] <= step},
                {},
            )
        elif name == event and isinstance(step, int):
            valid[json.dumps({**line, "time": None})] = line
    return list(valid.values())


def folded(items: Iterable[T], kind: Callable[[T], Hashable], step: Callable[[T], int | None]) -> list[list[T]]:
    """Group items of one kind at consecutive steps; groups are in the order of their first items."""
    groups: list[list[T]] = []
    newest: dict[Hashable, list[T]] = {}
    for item in items:
        group, current_step = newest.get(kind(item)), step(item)
        last_step = None if group is None else step(group[-1])
        if group is not None and last_step is not None and current_step == last_step + 1:
            group.append(item)
        else:
            newest[kind(item)] = [item]
            groups.append(newest[kind(item)])
    return groups


def figure(value: Any) -> str:
    """A value as text; a float has at most 6 digits."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(figure, value)) or "none"
    if isinstance(value, Mapping):
        return figures(value)
    return "none" if value is None else str(value)


def figures(about: Mapping[str, Figure] | Mapping[str, Any]) -> str:
    """Names and values as text: ``noise_scale 145.792, before 64``."""
    return ", ".join(f"{name} {figure(value)}" for name, value in about.items())
