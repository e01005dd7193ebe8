"""What a run decided beside what a replay did."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from unisono.adapt.decision import Decision, Verb

Likeness = Literal["alike", "different", "in the run alone", "in the replay alone"]


@dataclass(frozen=True, slots=True)
class Pair:
    """What the run decided after a step, and what the replay did: the same verb of the same policy, or one alone."""

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
