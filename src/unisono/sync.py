"""Synchronisation strategies as values: how the weights of several workers become those of one model."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, ClassVar

from unisono.errors import JobError
from unisono.named import extensions
from unisono.received import decimal_number, short, whole_number

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Strategy:
    """A synchronisation strategy, as a value: a run begins with one, and a policy may change it.

    ``str(strategy)`` is its text on the command line: the name, and what differs from the defaults.

    Attributes:
        name: the strategy's name.
        is_exact: whether all workers have the same weights after each step, and those of the serial run.
        part: the class that is a worker's part in it, as ``module:Class``, so that the value itself needs no torch: a
            :class:`~unisono.train.strategies.synchroniser.Synchroniser`, made of a ``SyncContext`` and this strategy.
            Exact strategies have none.
    """

    name: ClassVar[str]
    is_exact: ClassVar[bool] = False
    part: ClassVar[str] = ""

    @property
    def round_steps(self) -> int:
        """The number of steps from one moment at which all workers hold the same weights to the next."""
        return 1

    @property
    def central_servers(self) -> int | None:
        """The number of workers that only serve; 0 if each finishes a share of the sums; None without central sums."""
        return None

    def require(self, workers: int | None) -> None:
        """Refuse a number of workers with which the strategy cannot work, before training begins.

        Args:
            workers: the number of workers; None if it may change.

        Raises:
            JobError: says what to change.
        """
        if self.is_exact:
            return
        if workers == 1:
            raise JobError(
                f"strategy={str(self)!r} with one worker: there is nobody to synchronise with. Start several "
                f"(unisono run -n 2 …), or leave the strategy out"
            )

    def __str__(self) -> str:
        changed = [
            f"{field.name}={_word(getattr(self, field.name))}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        ]
        return self.name + (f":{','.join(changed)}" if changed else "")

    def _require_count(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if type(value) is not int or not least <= value < 2**63:
            raise JobError(f"{type(self).__name__}({name}={short(value)}): needs a whole number of at least {least}")

    def _require_rate(self, name: str, below: float = float("inf")) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < below:
            limit = "" if below == float("inf") else f" and below {below:g}"
            raise JobError(f"{type(self).__name__}({name}={short(value)}): needs a number of at least 0{limit}")

    def _require_switch(self, name: str) -> None:
        if not isinstance(getattr(self, name), bool):
            raise JobError(f"{type(self).__name__}({name}={short(getattr(self, name))}): use True or False")


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value}"


ROUND = 32
"""The default number of steps of a round."""


@dataclass(frozen=True, kw_only=True)
class Rounds(Strategy):
    """A strategy whose workers have weights of their own in between.

    Args:
        round_every: steps from one moment to the next at which all of them synchronise: the strategy's central model
            becomes everybody's, policies are asked, checkpoints written, workers taken in. An epoch's end is one, too.
    """

    round_every: int = ROUND

    def __post_init__(self) -> None:
        self._require_count("round_every", 1)

    @property
    def round_steps(self) -> int:
        """The value of ``round_every``."""
        return self.round_every


# All workers add their gradients up, and make the same update.


@dataclass(frozen=True)
class AllReduce(Strategy):
    """The default, and exact: w ← update(w, Σ gᵢ / n), the sum along the job's summation tree.

    Every worker has the same weights after each step, and the final ones are those of the serial run, bit for bit.
    """

    name: ClassVar[str] = "all-reduce"
    is_exact: ClassVar[bool] = True


@dataclass(frozen=True)
class LocalSGD(Rounds):
    """K local steps, then the mean of all replicas (Stich, ICLR 2019, arXiv 1805.09767).

    In each step a worker updates its replica on its own part of the batch. After every K steps w_j ← Σ w_i / n.

    Args:
        every: K, the number of steps from one averaging to the next.
        round_every: the number of steps in a round, as of :class:`Rounds`; rounded up to a multiple of ``every``.

    Raises:
        JobError: a value is out of range.
    """

    name: ClassVar[str] = "local-sgd"
    part: ClassVar[str] = "unisono.train.strategies.local_rounds:LocalUpdates"

    every: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_count("every", 1)

    @property
    def round_steps(self) -> int:
        """The value of ``round_every``, rounded up to a multiple of ``every``."""
        return -(-self.round_every // self.every) * self.every


@dataclass(frozen=True)
class DiLoCo(LocalSGD):
    """Local steps by an inner optimizer, and an outer one for what comes of them (Douillard et al., arXiv 2311.08105).

    The script's optimizer is the inner one; each worker keeps its state. After every K steps, with θ_prev where they
    began, Δ = θ_prev - Σ θ_i / n is a gradient for SGD with Nesterov momentum::

        v ← μ·v + Δ        θ ← θ_prev - η·(Δ + μ·v)

    The authors' μ = 0.9 lets one outer gradient move the weights seven times as far as it says, over the next dozens of
    outer updates. A run that has only a few overshoots with it, so the default is less.

    Args:
        every: K, the number of steps from one outer update to the next.
        outer_rate: η, the outer learning rate.
        outer_momentum: μ, the outer momentum; 0.9 for a run of hundreds of outer updates.
        round_every: the number of steps in a round, as of :class:`LocalSGD`.

    Raises:
        JobError: a value is out of range.
    """

    name: ClassVar[str] = "diloco"
    part: ClassVar[str] = "unisono.train.strategies.local_rounds:OuterUpdates"

    every: int = 32
    outer_rate: float = 0.7
    outer_momentum: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_rate("outer_rate")
        self._require_rate("outer_momentum", below=1.0)

    def update(self, start: Tensor, mean: Tensor, velocity: Tensor) -> Tensor:
        """The outer update.

        Args:
            start: θ_prev, of any shape.
            mean: the mean of the replicas, of the same shape.
            velocity: v, of the same shape, changed in place.

        Returns:
            θ, a new tensor.
        """
        delta = start - mean
        velocity.mul_(self.outer_momentum).add_(delta)
        return start - (delta.add_(velocity, alpha=self.outer_momentum)).mul_(self.outer_rate)


# Strategies by name, as the command line, the environment and policies give them.

STRATEGIES: dict[str, type[Strategy]] = {kind.name: kind for kind in (AllReduce, LocalSGD, DiLoCo)}
"""Our own strategies; extensions of other packages, and of the lab, add more."""


def strategy_of(strategy: Strategy | str) -> Strategy:
    """A strategy, from itself or from its text: ``local-sgd``, ``parameter-server:synchronous=false,max_staleness=8``.

    Raises:
        JobError: there is no such strategy or setting, or a value is out of range; says which there are.
    """
    if isinstance(strategy, Strategy):
        return strategy
    if not isinstance(strategy, str):
        raise JobError(f"strategy={short(strategy)}: give a unisono.Strategy, or the name of one: {_listed()}")
    name, _, settings = strategy.partition(":")
    kind = STRATEGIES.get(name) or _extension(strategy, name)
    return kind(**dict(_setting(kind, strategy, word) for word in settings.split(",") if word))


def _extension(text: str, name: str) -> type[Strategy]:
    others = extensions("strategy")
    if name not in others:
        raise JobError(f"strategy={short(text)}: there is no such strategy; choose of {_listed()}")
    kind = others[name].load()
    if not (isinstance(kind, type) and issubclass(kind, Strategy) and is_dataclass(kind)):
        packages = " and ".join(others[name].objects)
        raise JobError(f"strategy={short(text)}: what {packages} brings is no data class of the kind unisono.Strategy")
    if kind.name != name:
        raise JobError(
            f"strategy={short(text)}: its class calls itself {kind.name!r}: give the entry point the same name, "
            f"by which checkpoints and other workers know it"
        )
    return kind


def _listed() -> str:
    return ", ".join([*STRATEGIES, *(name for name in extensions("strategy") if name not in STRATEGIES)])


def _setting(kind: type[Strategy], text: str, word: str) -> tuple[str, object]:
    name, equals, value = word.partition("=")
    names = [field.name for field in fields(kind)]
    if not equals or name not in names:
        listed = f"its settings are {', '.join(names)}" if names else "it has no settings"
        raise JobError(
            f"strategy={short(text)}: {short(word)} is no setting of {kind.name}; {listed}, as in NAME=VALUE"
        )
    return name, _value(value)


def _value(text: str) -> object:
    if text in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}[text]
    whole = whole_number(text)
    number = decimal_number(text) if whole is None else whole
    return text if number is None else number  # the strategy itself refuses a text where it needs a number
