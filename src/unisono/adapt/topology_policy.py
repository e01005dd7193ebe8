"""Another way for the sums when the one in use has become slow."""

from collections.abc import Mapping
from statistics import median
from typing import Any, ClassVar

from unisono.adapt.decision import Figure
from unisono.adapt.policy import Policy
from unisono.adapt.view import View
from unisono.errors import JobError

SETTLED = 3
"""Steps in one setting after which its times are usual ones."""


class TopologyPolicy(Policy):
    """Measures again when communication takes longer than it used to, and takes the topology that is fastest then.

    Looked at is the exposed communication of the worker that waits least: a slow worker makes all others wait, a slow
    connection makes all of them. What it was at first, in a setting, is what is usual there. When it stays far above
    that, the connections are measured, so that the journal says which one has become slow, and then all topologies.

    Args:
        factor: how many times what is usual is too long.
        patience: steps in a row that have to be too long; as many, at least, tell what is usual.
        share: of the step's time that has to be at stake.

    Raises:
        JobError: a number is out of range.
    """

    _forms: ClassVar[Mapping[str, Any]] = {"generation": int, "first": list[float], "above": list[float]}

    def __init__(self, factor: float = 1.5, patience: int = 5, share: float = 0.05) -> None:
        if not factor > 1 or patience < 1 or not 0 <= share < 1:
            raise JobError(
                f"TopologyPolicy(factor={factor}, patience={patience}, share={share}): the factor needs to be above 1, "
                f"the patience above 0, the share below 1"
            )
        self._factor, self._patience, self._share = factor, patience, share
        self.generation = 0
        self.first: list[float] = []
        self.above: list[float] = []
        self.measures = False

    def after_step(self, view: View) -> None:
        """Compare."""
        if view.generation != self.generation:
            self._begin(view.generation)
        if not view.topology or view.steady < SETTLED:
            return
        if self.measures:
            self.set_topology("auto", before=view.topology, **self._why(view))
            self._begin(view.generation)
            return
        exposed_s = min(worker.exposed_s for worker in view.workers)
        if len(self.first) < self._patience:
            self.first.append(exposed_s)
            return
        is_long = exposed_s > self._factor * median(self.first) and exposed_s > self._share * view.step_s
        self.above = [*self.above, exposed_s] if is_long else []
        if len(self.above) >= self._patience:
            self.measures = True
            self.measure_links(exposed_s=median(self.above), usual_s=median(self.first))

    def _begin(self, generation: int) -> None:
        self.generation, self.first, self.above, self.measures = generation, [], [], False

    def _why(self, view: View) -> dict[str, Figure]:
        why: dict[str, Figure] = {"exposed_s": median(self.above), "usual_s": median(self.first)}
        if view.links is None:
            return why
        a, b = view.links.slowest
        return why | {"slowest_link": f"{a}-{b}", "bytes_per_s": view.links.bytes_per_s[a][b]}
