"""The timeline of a run: its events in their order."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from unisono.adapt.view import Decision, Figure, Verb
from unisono_lab.events import moment_of, title_of

# What a run decided beside what a replay did.

Likeness = Literal["alike", "different", "in the run alone", "in the replay alone"]


@dataclass(frozen=True, slots=True)
class Pair:
    """A decision of the run beside the replay's, by the same policy after the same step; or one of them alone."""

    step: int
    run: Decision | None
    replay: Decision | None

    @property
    def policy(self) -> str:
        """Whose decision it is."""
        return self._either.policy

    @property
    def verb(self) -> Verb:
        """Of the decision."""
        return self._either.verb

    @property
    def likeness(self) -> Likeness:
        """How the two compare, with their figures."""
        if self.run is None:
            return "in the replay alone"
        if self.replay is None:
            return "in the run alone"
        return "alike" if self.run == self.replay else "different"

    @property
    def _either(self) -> Decision:
        found = self.run or self.replay
        assert found is not None, "at least one of the two decided"
        return found


def compared(run: Sequence[tuple[int, Decision]], replayed: Sequence[tuple[int, Decision]]) -> list[Pair]:
    """Decisions side by side, in the order of steps."""
    left: dict[tuple[int, str, Verb], deque[Decision]] = defaultdict(deque)
    for step, decision in replayed:
        left[step, decision.policy, decision.verb].append(decision)
    pairs = []
    for step, decision in run:
        others = left[step, decision.policy, decision.verb]
        pairs.append(Pair(step, decision, others.popleft() if others else None))
    alone = [Pair(step, None, decision) for (step, _, _), others in left.items() for decision in others]
    return sorted([*pairs, *alone], key=lambda pair: pair.step)


# What happened in a run, in the order in which it happened.

T = TypeVar("T")

SAID = frozenset({"started", "resumed", "minted", "lost", "left", "resized", "over"})
"""Events whose figures alone would be hard to read."""

UNTOLD = frozenset({"agent joined", "asked for", "formed"})
"""Events that follow from others, or change nothing for those who train."""


@dataclass(frozen=True, slots=True)
class Happening:
    """A line of the journal.

    Attributes:
        seconds: the seconds since the first line; None if the line does not say when it was written.
        line: the line of the journal, by field.
    """

    seconds: float | None
    line: Mapping[str, Any]

    @property
    def event(self) -> str:
        """What kind it is."""
        return str(self.line.get("event", ""))

    @property
    def step(self) -> int | None:
        """Steps committed by then, if the line says so."""
        step = self.line.get("step")
        return step if isinstance(step, int) else None

    @property
    def words(self) -> str:
        """For people: what the line says, or all of its figures."""
        about = {name: value for name, value in self.line.items() if name not in ("event", "time", "step")}
        return (self.event in SAID and title_of(self.line)) or figures(about)


def timeline(journal: Sequence[Mapping[str, Any]]) -> list[Happening]:
    """All of a journal, each line with its time since the first one."""
    times = [moment_of(line) for line in journal]
    start = next((time for time in times if time is not None), 0.0)
    since = [None if time is None else time - start for time in times]
    return [Happening(seconds, line) for seconds, line in zip(since, journal, strict=True)]


def decision_of(line: Mapping[str, Any]) -> Decision:
    """What a line ``decided`` says."""
    why = line.get("why")
    figures = why if isinstance(why, Mapping) else {}
    return Decision(str(line.get("policy")), line.get("verb", ""), line.get("value"), figures, line.get("shards"))


def decisions_that_hold(journal: Iterable[Mapping[str, Any]]) -> list[tuple[int, Decision]]:
    """The decisions that made the run what it is, each with the steps committed by then."""
    return [(line["step"], decision_of(line)) for line in lines_that_hold(journal, "decided")]


def lines_that_hold(journal: Iterable[Mapping[str, Any]], event: str) -> list[Mapping[str, Any]]:
    """The lines of an event that belong to the run as it is now: each once, and each with a step.

    A run that goes on from a checkpoint does the steps behind it again, and one that starts over all of them. A main
    worker that takes over may write down again what the one before it had written.
    """
    found: dict[str, Mapping[str, Any]] = {}
    earlier: dict[str, Mapping[str, Any]] = {}  # of starts before the newest one
    for line in journal:
        what, step = line.get("event"), line.get("step")
        if what == "started":
            found, earlier = {}, earlier | found
        elif what == "resumed" and isinstance(step, int):
            found, earlier = {key: one for key, one in (earlier | found).items() if one["step"] <= step}, {}
        elif what == event and isinstance(step, int):
            found[json.dumps({**line, "time": None})] = line
    return list(found.values())


def folded(items: Iterable[T], kind: Callable[[T], Hashable], step: Callable[[T], int | None]) -> list[list[T]]:
    """Put items of one kind at steps in a row together, in the order of their first ones."""
    groups: list[list[T]] = []
    newest: dict[Hashable, list[T]] = {}
    for item in items:
        group, now = newest.get(kind(item)), step(item)
        last = None if group is None else step(group[-1])
        if group is not None and last is not None and now == last + 1:
            group.append(item)
        else:
            newest[kind(item)] = [item]
            groups.append(newest[kind(item)])
    return groups


def figure(value: Any) -> str:
    """A number in at most 6 digits, anything else as it is."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(figure, value)) or "none"
    if isinstance(value, Mapping):
        return figures(value)
    return "none" if value is None else str(value)


def figures(about: Mapping[str, Figure] | Mapping[str, Any]) -> str:
    """Names and their values: ``noise_scale 145.792, before 64``."""
    return ", ".join(f"{name} {figure(value)}" for name, value in about.items())
