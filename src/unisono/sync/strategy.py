"""The common part of all synchronisation strategies."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from unisono.errors import JobError
from unisono.received import short


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
        """Steps from one moment at which all workers hold the same weights to the next."""
        return 1

    @property
    def central_servers(self) -> int | None:
        """Of an exact strategy with central sums: how many workers only serve; 0 if each finishes a share of them."""
        return None

    def require(self, workers: int | None) -> None:
        """Refuse what cannot be before anything is trained.

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
"""Steps of a round, unless something else is wanted."""


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
        """As given."""
        return self.round_every


# All workers add their gradients up, and make the same update.


@dataclass(frozen=True)
class AllReduce(Strategy):
    """The default, and exact: w ← update(w, Σ gᵢ / n), the sum along the job's summation tree.

    Every worker has the same weights after each step, and the final ones are those of the serial run, bit for bit.
    """

    name: ClassVar[str] = "all-reduce"
    is_exact: ClassVar[bool] = True
