"""Policies: what watches training from inside and changes it while it runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from numbers import Real
from typing import Any, ClassVar

from unisono.adapt.view import Decision, Figure, Verb, View
from unisono.errors import Unreadable
from unisono.received import short, value_of

ReadStrategy = Callable[[object], str]
"""The canonical text of a strategy, or of its text. Raises ``JobError`` where there is none that the run can use."""


@cache
def _in_small_letters(name: str) -> str:
    return "-".join(re.findall(r"[A-Z][a-z0-9]*", name.removesuffix("Policy"))).lower()


class Policy:
    """Base of all policies. Override the hooks that matter, and call the verbs in them.

    Every worker has its own copy of each policy and asks it at the same steps; all have to decide alike, which is
    checked. What a hook asks for takes effect before the next step, on every worker, and is journalled with the figures
    that the verb was given. A policy's public attributes (numbers, text, lists and dicts of them) are part of every
    checkpoint.

    Attributes:
        needs_monitor: whether it reads ``view.noise``, which then is measured in every step.
        curvature_every: steps from one before whose update the critical sharpness is measured to the next, where the
            script asks for no other measurement of curvature; 0 for none.
        observe_every: steps from one call of :meth:`observe` to the next; 0 for never.
    """

    needs_monitor: ClassVar[bool] = False
    curvature_every: ClassVar[int] = 0
    observe_every: int = 0
    _forms: ClassVar[Mapping[str, Any]] = {}
    """Types of public attributes of which the first value says too little."""

    @property
    def name(self) -> str:
        """In the journal, and on the command line: ``NoiseScalePolicy`` is ``noise-scale``."""
        return _in_small_letters(type(self).__name__)

    def read_strategies(self, read: ReadStrategy) -> None:
        """Have all strategies read that this policy may ever choose, so that a wrong one is refused as the run begins.

        Args:
            read: a function to call with each of them; what it returns is what ``view.strategy`` will be.
        """

    # -- hooks

    def before_train(self, view: View) -> None:
        """The first step is about to be computed."""

    def after_step(self, view: View) -> None:
        """A step is committed, and the loop's body is done."""

    def after_epoch(self, view: View) -> None:
        """It was the last one of an epoch; comes after :meth:`after_step`."""

    def after_train(self, view: View) -> None:
        """The script finishes the run. Verbs do nothing any more."""

    def observe(self, view: View) -> Mapping[str, Figure]:
        """Look at the world outside: clocks, prices, notices. Called on the main worker alone, before the other hooks.

        Returns:
            figures, which all workers find in ``view.observed[self.name]`` until the next call.
        """
        return {}

    # -- verbs

    def resize(self, workers: int, **why: Figure) -> None:
        """Ask for another number of workers; only elastic jobs have one."""
        self._decide("resize", workers, why)

    def set_batch_size(self, samples: int, shards: int | None = None, **why: Figure) -> None:
        """Change the global batch.

        Args:
            samples: the number of samples in it.
            shards: the number of shards, a multiple of the job's (``view.base_shards``). A worker computes its shards
                one after the other, so its memory is that of the largest. By default the number that there is stays,
                and shards become larger or smaller.
            why: the figures behind the decision, by name.
        """
        self._decide("set_batch_size", samples, why, shards)

    def set_learning_rate(self, rate: float, **why: Figure) -> None:
        """Change the learning rate of the first parameter group; all others change by the same factor.

        What the script does to the rates itself (a scheduler) goes on: the factor is applied on top.
        """
        self._decide("set_learning_rate", rate, why)

    def set_topology(self, name: str, **why: Figure) -> None:
        """Change the way of the partial sums: one of ``direct``, ``ring``, ``tree``, ``star``; ``auto`` measures anew.

        Where there is no process group (workers share memory, or there is one) it makes no difference.
        """
        self._decide("set_topology", name, why)

    def set_strategy(self, strategy: object, **why: Figure) -> None:
        """Change how workers synchronise: a strategy, or its text, such as ``local-sgd:every=16``."""
        self._decide("set_strategy", str(strategy), why)

    def set_balance(self, balance: str, **why: Figure) -> None:
        """Split shards evenly (``even``), or by the workers' speed (``speed``); only elastic jobs do the latter."""
        self._decide("set_balance", balance, why)

    def replace(self, rank: int, **why: Figure) -> None:
        """Have a worker leave, and another one started instead of it; only in elastic jobs."""
        self._decide("replace", rank, why)

    def measure_links(self, **why: Figure) -> None:
        """Measure latency and bandwidth between each two workers after the next step: ``view.links`` has them."""
        self._decide("measure_links", None, why)

    def checkpoint(self, **why: Figure) -> None:
        """Write one."""
        self._decide("checkpoint", None, why)

    def stop(self, **why: Figure) -> None:
        """End the loop."""
        self._decide("stop", None, why)

    # -- what carries it

    def state_dict(self) -> dict[str, Any]:
        """The public attributes."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`: sets what that has, and nothing else.

        Raises:
            Unreadable: there is another name in it, or a value of another kind. Then nothing has changed.
        """
        own = self.state_dict()
        for name, value in state.items():
            if name not in own:
                raise Unreadable(
                    f"the policy {self.name} keeps no {short(name)}, but {', '.join(own) or 'nothing'}: set what it "
                    f"keeps in its __init__"
                )
            value_of(self._forms.get(name, Any), value, name)
            _require_alike(own[name], value, f"{name} of the policy {self.name}")
        vars(self).update(state)

    def decided(self) -> list[Decision]:
        """What was asked for since the last time; forgets it."""
        found = vars(self).pop("_decisions", [])
        return list(found)

    def _decide(
        self, verb: Verb, value: float | int | str | None, why: Mapping[str, Figure], shards: int | None = None
    ) -> None:
        vars(self).setdefault("_decisions", []).append(Decision(self.name, verb, value, dict(why), shards))


def _require_alike(own: Any, found: Any, what: str) -> None:
    """Refuse a value of another kind than there is. All numbers are of one kind; what is None may become anything."""
    if own is None or found is None or type(own) is type(found) or (isinstance(own, Real) and isinstance(found, Real)):
        return
    raise Unreadable(f"{what} is {short(found)}, and no {type(own).__name__}")
