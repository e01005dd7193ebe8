"""Policies for slow workers and connections: fewer shards, another topology, another strategy."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any, ClassVar

from unisono.adapt.view import Figure, Policy, ReadStrategy, View
from unisono.arguments import require_types
from unisono.errors import JobError

# Workers that are slower than the others.

UNEVEN_S = 20.0
"""Seconds of training after which shards are split by speed, if that is possible at all."""


class StragglerPolicy(Policy):
    """Gives a slow worker fewer shards, and has it replaced if it is so slow that even this does not help.

    Every step waits for the slowest worker. Shards that are split by speed make up for one that is somewhat slower;
    one shard is the least that a worker can have, though, so a worker that takes several times as long for it as the
    others holds them up anyway. Both take an elastic job. No bit of the weights depends on either.

    Args:
        factor: a worker is slow if its shard takes so many times as long as the others'.
        replace_at: a slow worker is replaced if its shard takes so many times as long, once shards are split by speed.
        patience: steps in a row that a worker has to be slow.

    Raises:
        JobError: a number is out of range.
    """

    _forms: ClassVar[Mapping[str, Any]] = {"generation": int, "slow": dict[str, list[float]], "balanced": list[float]}

    def __init__(self, factor: float = 1.5, replace_at: float = 3.0, patience: int = 10) -> None:
        require_types(StragglerPolicy.__init__, locals())
        if not 1 < factor <= replace_at or patience < 1:
            raise JobError(
                f"StragglerPolicy(factor={factor}, replace_at={replace_at}, patience={patience}): the factors need to "
                f"be above 1, the second not below the first, and the patience above 0"
            )
        self._factor, self._replace_at, self._patience = factor, replace_at, patience
        self.generation = 0
        self.slow: dict[str, list[float]] = {}
        self.balanced: list[float] = []  # the generation, and the seconds of training, of the request to split by speed

    def after_step(self, view: View) -> None:
        """Compare the workers' times for a shard."""
        if view.generation != self.generation:
            self.generation, self.slow = view.generation, {}
        if view.world_size < 2:
            return
        for rank, ratio in enumerate(_ratios([worker.shard_s for worker in view.workers])):
            name = str(rank)
            self.slow[name] = [*self.slow.get(name, []), ratio] if ratio > self._factor else []
        slowest = max(self.slow, key=lambda name: self.slow[name][-1:])
        ratios = self.slow[slowest][-self._patience :]
        if len(ratios) < self._patience:
            return
        rank, ratio = int(slowest), median(ratios)
        if not self.balanced:
            self.balanced = [view.generation, view.seconds]
            self.set_balance("speed", rank=rank, times_slower=ratio, shard_s=view.workers[rank].shard_s)
        elif ratio > self._replace_at and self._is_split_anew(view):
            self.replace(rank, times_slower=ratio, shard_s=view.workers[rank].shard_s)
        else:
            return
        self.slow = {}

    def _is_split_anew(self, view: View) -> bool:
        generation, seconds = self.balanced
        return view.generation > generation or view.seconds > seconds + UNEVEN_S


def _ratios(seconds: list[float]) -> list[float]:
    """The ratio of each worker's time to the median of the others; workers without shards do not count."""
    others = ([other for other in seconds[:rank] + seconds[rank + 1 :] if other > 0] for rank in range(len(seconds)))
    return [own / median(other) if other else 1.0 for own, other in zip(seconds, others, strict=True)]


# Another topology when the one in use has become slow.

SETTLED = 3
"""The number of steps in one setting after which times are steady."""


class TopologyPolicy(Policy):
    """Measures again when communication takes longer than it used to, and takes the topology that is fastest then.

    The policy compares the exposed communication of the worker that waits least: a slow worker makes all others wait, a
    slow connection makes all of them wait. The usual time of a setting is that of its first steps. When the time stays
    far above that, the connections are measured, so that the journal says which one is slow, and then all topologies.

    Args:
        factor: a step is too long if it takes so many times the usual time.
        patience: steps in a row that have to be too long; as many, at least, tell what is usual.
        share: the least share of a step's time that communication must take.

    Raises:
        JobError: a number is out of range.
    """

    _forms: ClassVar[Mapping[str, Any]] = {"generation": int, "first": list[float], "above": list[float]}

    def __init__(self, factor: float = 1.5, patience: int = 5, share: float = 0.05) -> None:
        require_types(TopologyPolicy.__init__, locals())
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
        """Compare the newest step with the first ones of its setting."""
        if view.generation != self.generation:
            self._begin(view.generation)
        if not view.topology or view.steady < SETTLED:
            return
        if self.measures:
            self.set_topology("auto", before=view.topology, **self._figures(view))
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

    def _figures(self, view: View) -> dict[str, Figure]:
        figures: dict[str, Figure] = {"exposed_s": median(self.above), "usual_s": median(self.first)}
        if view.links is None:
            return figures
        a, b = view.links.slowest
        return figures | {"slowest_link": f"{a}-{b}", "bytes_per_s": view.links.bytes_per_s[a][b]}


# Another strategy when the number of workers or the noise changes.

MEASURED = 50
"""The number of steps of all-reduce after which averages of the noise are good enough."""


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
        require_types(StrategyPolicy.__init__, locals())
        if (workers is None) == (noise is None):
            raise JobError("StrategyPolicy: give workers={number: strategy} or noise={ratio: strategy}, one of them")
        strategies: dict[float, object] = {float(bound): name for bound, name in (workers or noise or {}).items()}
        least = 1 if workers is not None else 0
        if not strategies or min(strategies) > least or look_every < 1:
            raise JobError(
                f"StrategyPolicy({strategies}, look_every={look_every}): needs a strategy from {least} on, such as "
                f"{{{least}: 'all-reduce'}}, and at least 1 step"
            )
        self._bounds = sorted((bound, str(strategy)) for bound, strategy in strategies.items())
        self._by_workers, self._look_every = workers is not None, look_every
        self.since = 0
        self.chosen = ""

    @property
    def needs_monitor(self) -> bool:  # type: ignore[override]
        """Whether the policy follows the noise."""
        return not self._by_workers

    def read_strategies(self, read: ReadStrategy) -> None:
        """Read the strategies of the arguments."""
        self._bounds = [(bound, read(strategy)) for bound, strategy in self._bounds]

    def before_train(self, view: View) -> None:
        """Begin with the right strategy."""
        if self._by_workers:
            self._choose(view, view.world_size)

    def after_step(self, view: View) -> None:
        """Choose the strategy again."""
        if self._by_workers:
            self._choose(view, view.world_size)
        elif view.strategy != "all-reduce":
            if view.step - self.since >= self._look_every:
                self.since, self.chosen = view.step, "all-reduce"
                self.set_strategy(self.chosen, steps_since=self._look_every)
        elif view.step - self.since >= MEASURED and view.noise is not None and view.noise.scale is not None:
            self._choose(view, view.noise.scale / view.batch_size)

    def _choose(self, view: View, value: float) -> None:
        reached = [strategy for bound, strategy in self._bounds if bound <= value]
        strategy = reached[-1] if reached else self._bounds[0][1]
        if strategy != (self.chosen or view.strategy):
            self.since, self.chosen = view.step, strategy
            figure = {"workers": view.world_size} if self._by_workers else {"noise_to_batch": value}
            self.set_strategy(strategy, **figure)
