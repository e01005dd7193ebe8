"""When to synchronise in another way."""

from __future__ import annotations

from collections.abc import Mapping

from unisono.adapt.policy import Policy, ReadStrategy
from unisono.adapt.view import View
from unisono.errors import JobError

MEASURED = 50
"""Steps of all-reduce after which averages of the noise are good enough to go by."""


class StrategyPolicy(Policy):
    """Follows the number of workers, or the noise of the gradients, with the strategy.

    By workers, as KungFu does (Mai et al., OSDI 2020): a few can wait for each other in every step, many had better
    not. By noise: where the noise scale is many times the batch, gradients are mostly noise, and replicas that drift
    apart for a while lose little. The noise is known from steps of all-reduce alone; so after ``look_every`` steps of
    anything else there are some of these again.

    Args:
        workers: the strategy from so many workers on: ``{1: "all-reduce", 8: "local-sgd:every=8"}``.
        noise: the strategy from so many times the batch on: ``{0: "all-reduce", 4: "local-sgd:every=8"}``.
        look_every: steps.

    Raises:
        JobError: neither or both were given, or there is none for the least number.
    """

    def __init__(
        self,
        workers: Mapping[int, object] | None = None,
        noise: Mapping[float, object] | None = None,
        look_every: int = 1000,
    ) -> None:
        if (workers is None) == (noise is None):
            raise JobError("StrategyPolicy: give workers={number: strategy} or noise={ratio: strategy}, one of them")
        given: dict[float, object] = {float(bound): strategy for bound, strategy in (workers or noise or {}).items()}
        least = 1 if workers is not None else 0
        if not given or min(given) > least or look_every < 1:
            raise JobError(
                f"StrategyPolicy({given}, look_every={look_every}): needs a strategy from {least} on, such as "
                f"{{{least}: 'all-reduce'}}, and at least 1 step"
            )
        self._given = sorted((bound, str(strategy)) for bound, strategy in given.items())
        self._by_workers, self._look_every = workers is not None, look_every
        self.since = 0
        self.chosen = ""

    @property
    def needs_monitor(self) -> bool:  # type: ignore[override]
        """If it follows the noise."""
        return not self._by_workers

    def read_strategies(self, read: ReadStrategy) -> None:
        """All that were given."""
        self._given = [(bound, read(strategy)) for bound, strategy in self._given]

    def before_train(self, view: View) -> None:
        """Begin with the right one."""
        if self._by_workers:
            self._choose(view, view.world_size)

    def after_step(self, view: View) -> None:
        """Choose again."""
        if self._by_workers:
            self._choose(view, view.world_size)
        elif view.strategy != "all-reduce":
            if view.step - self.since >= self._look_every:
                self.since, self.chosen = view.step, "all-reduce"
                self.set_strategy(self.chosen, steps_since=self._look_every)
        elif view.step - self.since >= MEASURED and view.noise is not None and view.noise.scale is not None:
            self._choose(view, view.noise.scale / view.batch_size)

    def _choose(self, view: View, value: float) -> None:
        fitting = [strategy for bound, strategy in self._given if bound <= value]
        wanted = fitting[-1] if fitting else self._given[0][1]
        if wanted != (self.chosen or view.strategy):
            self.since, self.chosen = view.step, wanted
            figure = {"workers": view.world_size} if self._by_workers else {"noise_to_batch": value}
            self.set_strategy(wanted, **figure)
