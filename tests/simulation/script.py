"""What all workers run: calls that all make together, with loops of steps between them."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Act:
    """One collective call of the script.

    Attributes:
        loop: that it is in, or before.
        kind: a call outside of loops, a step, or an evaluation at the end of a loop.
        number: of a call, from 0 in front of each loop.
    """

    loop: int
    kind: Literal["call", "step", "evaluation"]
    number: int = 0


@dataclass(frozen=True)
class Script:
    """Calls, and loops of steps that end with an evaluation.

    Attributes:
        calls: in front of each loop, and after the last.
        steps: of each loop.
    """

    calls: tuple[int, ...]
    steps: tuple[int, ...]

    @property
    def length(self) -> int:
        """Steps of the whole job."""
        return sum(self.steps)

    def acts(self, done: int) -> tuple[Act, ...]:
        """All that is left when so many steps are done: a job that starts over makes its calls again."""
        acts: list[Act] = []
        for loop, steps in enumerate(self.steps):
            acts += [Act(loop, "call", number) for number in range(self.calls[loop])]
            first = min(steps, done - sum(self.steps[:loop])) if done > sum(self.steps[:loop]) else 0
            acts += [Act(loop, "step", number) for number in range(first, steps)]
            acts.append(Act(loop, "evaluation"))
        last = len(self.steps)
        return (*acts, *(Act(last, "call", number) for number in range(self.calls[last])))


@dataclass
class Life:
    """The job from its start, or from starting over, to its end.

    Attributes:
        number: of how many there were before.
        acts: of the script, from the checkpoint on.
        steps: that the checkpoint holds.
        committed: the most acts that anybody has.
        published: when the results of calls were there for the first time, by name.
    """

    number: int
    acts: tuple[Act, ...]
    steps: int
    committed: int = 0
    published: dict[str, float] = field(default_factory=dict)

    def steps_after(self, acts: int) -> int:
        """How many steps the weights have seen after so many acts of this life."""
        return self.steps + sum(act.kind == "step" for act in self.acts[:acts])

    def value(self, name: str) -> str:
        """What is published under this name."""
        return f"{name} of life {self.number}"
