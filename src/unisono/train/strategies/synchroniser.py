"""A worker's part in a strategy whose workers have weights of their own in between."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.membership.rendezvous import Generation
from unisono.plan.split import Split
from unisono.reduce.reducer import Averaging
from unisono.reduce.transport import Solo
from unisono.train.group.workers import Workers
from unisono.train.model.prepared import Prepared
from unisono.train.model.tensors import Values, set_all
from unisono.train.model.update import Update

# This worker's own weights, where workers have different ones, and how all of them become the same.

SCALARS = frozenset(("step", "mu_product"))
"""State that optimizers keep once per tensor, whatever its size."""


class Replica:
    """The replica of this worker: weights, buffers, and the state of its optimizers."""

    def __init__(self, prepared: Prepared, workers: Workers, averaging: Averaging) -> None:
        self.weights = [parameter.detach() for parameter in prepared.parameters.values()]
        self._prepared, self._workers, self._averaging = prepared, workers, averaging

    @torch.no_grad()
    def load(self, weights: Sequence[Tensor]) -> None:
        """Set these weights."""
        for own, new in zip(self.weights, weights, strict=True):
            own.copy_(new)

    def copies(self) -> list[Tensor]:
        """Return copies of the weights."""
        return [weight.clone() for weight in self.weights]

    def mean(self) -> list[Tensor]:
        """Return the mean of all replicas' weights, see :meth:`Averaging.mean`. Collective."""
        return self._averaging.mean(self.weights)

    @torch.no_grad()
    def average_buffers(self, weight: float = 1.0) -> Values:
        """Work out new values of buffers, without setting them. Collective.

        Buffers of floating-point numbers get the mean of all workers', others the value of the worker with the largest
        weight. If all weights are 0, all workers count equally.
        """
        weights = self._workers.gather_json(weight)
        weights = weights if any(weights) else [1.0] * len(weights)
        own_weight, total = weights[self._workers.rank], sum(weights)
        buffers = [place.tensor for place in self._prepared.buffers if place.tensor.numel()]
        floats = [buffer for buffer in buffers if buffer.is_floating_point()]
        # Not a product with 0: a buffer may hold infinities, and infinity times 0 is NaN.
        parts = [buffer * own_weight if own_weight else torch.zeros_like(buffer) for buffer in floats]
        means = [mean.clone() for mean in self._averaging.mean(parts, divisor=total)]
        whole = [(buffer, buffer.clone()) for buffer in buffers if not buffer.is_floating_point()]
        for _, value in whole:
            self._workers.transport.broadcast(value, weights.index(max(weights)))
        return [*zip(floats, means, strict=True), *whole]

    @torch.no_grad()
    def average_states(self) -> Callable[[], None]:
        """Work out the mean of all workers' optimizer state, which is possible since moments are linear. Collective.

        Counts, and other values without a mean, become those of the worker that has made the most updates. If a worker
        has made no update yet, all take the state of the worker with the most state. The returned function sets the
        state here.
        """
        states = [_State.of(optimizer) for optimizer in self._prepared.optimizers]
        reports = self._workers.gather_json([[state.layout for state in states], [state.updates for state in states]])
        if any(layout != reports[0][0] for layout, _ in reports):
            fullest = max(range(len(reports)), key=lambda rank: (sum(map(len, reports[rank][0])), -rank))
            return self._follow(fullest)
        moments = [moment for state in states for moment in state.moments]
        means = [mean.clone() for mean in self._averaging.mean(moments)]
        others: list[tuple[_State, Sequence[Any]]] = []
        for number, state in enumerate(states):
            if state.others:
                oldest = max(range(len(reports)), key=lambda rank: (reports[rank][1][number], -rank))
                own_values = state.values() if self._workers.rank == oldest else None
                others.append((state, self._workers.broadcast(own_values, oldest)))

        def make() -> None:
            set_all(list(zip(moments, means, strict=True)))
            for state, values in others:
                state.take(values)

        return make

    def _follow(self, source: int) -> Callable[[], None]:
        is_source = self._workers.rank == source
        own = [states_of(optimizer, _owned(optimizer)) for optimizer in self._prepared.optimizers]
        states_of_source = self._workers.broadcast(own if is_source else None, source)

        def make() -> None:
            for optimizer, states in zip(self._prepared.optimizers, states_of_source, strict=True):
                if not is_source:
                    set_states(optimizer, _owned(optimizer), states)

        return make


def states_of(optimizer: Optimizer, parameters: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Return an optimizer's state of each of these parameters, with whether a value is on the CPU. Copies nothing."""
    states = [optimizer.state.get(parameter, {}) for parameter in parameters]
    return [{name: (value, _is_on_cpu(value)) for name, value in state.items()} for state in states]


def set_states(optimizer: Optimizer, parameters: Sequence[Tensor], states: Sequence[Mapping[str, Any]]) -> None:
    """Set an optimizer's state of each of these parameters. A parameter whose new state is empty keeps its state."""
    for parameter, state in zip(parameters, states, strict=True):
        if state:
            # What was sent arrives on the CPU. Counts stay there, moments go to the parameter's device.
            optimizer.state[parameter] = {
                name: value.to("cpu" if on_cpu else parameter.device, copy=True) if isinstance(value, Tensor) else value
                for name, (value, on_cpu) in state.items()
            }


def _is_on_cpu(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu"


def _owned(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@dataclass(frozen=True)
class _State:
    """The state of one optimizer, sorted by what happens to it when replicas are averaged.

    Attributes:
        others: the other entries, each as its dictionary and its key: counts, values that follow from them, codes.
        updates: the number of updates of all parameters together, as far as they are counted.
    """

    moments: list[Tensor]
    others: list[tuple[dict[str, Any], str]]
    layout: list[str]
    updates: float

    @classmethod
    def of(cls, optimizer: Optimizer) -> _State:
        owned = _owned(optimizer)
        states: list[dict[str, Any]] = [optimizer.state.get(parameter, {}) for parameter in owned]
        counts = SCALARS.union(*map(_counts, owned, states))
        moments: list[Tensor] = []
        others: list[tuple[dict[str, Any], str]] = []
        layout: list[str] = []
        for number, state in enumerate(states):
            has_codes = any(map(_is_code, state.values()))  # the scales of codes have no mean, either
            for name, value in sorted(state.items()):
                if value is None:
                    continue
                layout.append(f"{number} {name} {list(value.shape) if isinstance(value, Tensor) else ''}")
                if isinstance(value, Tensor) and value.is_floating_point() and name not in counts and not has_codes:
                    moments.append(value)
                else:
                    others.append((state, name))
        return cls(moments, others, layout, sum(float(state["step"]) for state in states if "step" in state))

    def values(self) -> list[Any]:
        """The values without a mean. Single elements become numbers, which travel together."""
        values = [state[name] for state, name in self.others]
        return [value.item() if isinstance(value, Tensor) and value.numel() == 1 else value for value in values]

    @torch.no_grad()
    def take(self, values: Sequence[Any]) -> None:
        """Set the values without a mean."""
        for (state, name), value in zip(self.others, values, strict=True):
            own = state[name]
            if not isinstance(own, Tensor):
                state[name] = value
            elif isinstance(value, Tensor):
                own.copy_(value)
            else:
                own.fill_(value)


def _counts(parameter: Tensor, state: Mapping[str, Any]) -> set[str]:
    """The names of values that are kept once for a parameter with more elements or dimensions."""
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return {
        name
        for name, tensor in tensors.items()
        if tensor.numel() == 1 and tensor.dim() < 2 and tensor.shape != parameter.shape
    }


def _is_code(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() > 1 and not value.is_floating_point()


# A worker that computes by itself.


class Alone(Workers):
    """A worker that works without the others of its generation for a while.

    It reports progress in those workers, too, for a process that watches them.

    Args:
        among: all workers of the generation.
        shards: the number of shards that it computes.
    """

    def __init__(self, among: Workers, shards: int) -> None:
        super().__init__(
            Generation(among.generation.number, 0, Split.even(shards, 1)), Solo(shards), device=among.device
        )
        self._among, self.named_rank = among, among.rank

    def tick(self) -> None:
        """Note progress here and among all workers."""
        super().tick()
        self._among.tick()


# The results of computed samples, added up.


@dataclass(slots=True)
class Sums:
    """The sums over the work that one worker computed, part after part.

    Attributes:
        samples: the number of samples.
        loss: the sum of their losses.
        metrics: the sums of what the loss functions logged, over the same samples.
        seconds: the seconds of each kind of work.
        skipped: the number of parts without an update, since their loss or gradient was NaN or infinite.
    """

    samples: int = 0
    loss: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    skipped: int = 0

    def add(self, samples: int, loss: float, metrics: Mapping[str, float], seconds: Mapping[str, float]) -> None:
        """Add one more part, with the mean loss and the mean metrics of its samples."""
        self.samples += samples
        self.loss += loss * samples
        for name, value in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value * samples
        for name, value in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + value

    def mean_loss(self, otherwise: float) -> float:
        """The mean loss of a sample; ``otherwise`` if no sample was computed."""
        return self.loss / self.samples if self.samples else otherwise

    @property
    def mean_metrics(self) -> dict[str, float]:
        """The mean metrics of a sample."""
        return {name: value / self.samples for name, value in self.metrics.items()}


@dataclass(frozen=True)
class SyncContext:
    """The workers of a synchroniser, what they train, and their limits.

    Attributes:
        timeout_s: the longest wait for another worker, in seconds.
    """

    workers: Workers
    prepared: Prepared
    timeout_s: float
    seed: int


class Synchroniser(Update):
    """Makes the updates of this worker, and synchronises its weights with the others'.

    It lives as long as the generation and the strategy. Making it is collective.

    Attributes:
        parts: the number of parts of a step's work that are distributed while it is done; 0 if every worker has its own
            part from the beginning.
        follows: whether it goes on from what this worker knew before a loss.

    Raises:
        WorkerLost: from every method, when another worker is gone.
    """

    parts = 0
    follows = False

    def __init__(self, context: SyncContext) -> None:
        self.workers = context.workers
        self.averaging = Averaging(context.workers.transport)
        self.replica = Replica(context.prepared, context.workers, self.averaging)

    def follow(self, before: Synchroniser) -> None:
        """Take over what this worker knows from before the loss of some workers."""
        self.follows = True

    def claim(self, step: int) -> int | None:
        """Return this worker's next part of a step's work; None if none is left. May wait for other workers."""
        raise NotImplementedError("every worker has its own part")

    def round_begins(self) -> None:
        """Prepare for the first step of a round. All workers have the same weights."""

    def step_begins(self) -> None:
        """Prepare for the first update of a step."""

    def step_ends(self, step: int, *, ends_round: bool) -> None:
        """End a step whose updates are all made. :meth:`synchronise` comes next if the round ends."""

    @abstractmethod
    def synchronise(self, *, after_loss: bool) -> Callable[[], None]:
        """Work out the strategy's central model, with buffers and optimizer states. Collective; sets nothing yet.

        If a worker is lost during it, it is done again with those that are left. Some of these may have completed it.

        Args:
            after_loss: whether workers may be at different steps, and one update or exchange apart.

        Returns:
            a function that sets the result here.
        """

    def resume(self) -> None:
        """Go on after a loss: wait until the central model, which is set here, is set everywhere. Collective."""

    def common(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the mean of the tensors of the workers that follow. Collective.

        Before a loss all of them had the same tensors, or were one exchange apart. A worker that does not follow was
        given another worker's state in the middle of a round, so its tensors do not count.
        """
        counted = sum(self.workers.gather_json(self.follows))
        own_tensors = tensors if self.follows else [torch.zeros_like(tensor) for tensor in tensors]
        return [mean.clone() for mean in self.averaging.mean(own_tensors, divisor=float(counted))]

    def figures(self) -> Mapping[str, Any]:
        """Return figures of the round, and forget them."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state that lasts from round to round, the same on all workers: tensors and numbers by name."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""

    def close(self) -> None:
        """Let go of connections."""
