"""A script's own training loop: its body runs once for each shard of this worker, and its last turn updates."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.data.generators import Generators, generators_kept, newest_seed, seed_generators
from unisono.data.refusals import Refusals
from unisono.errors import JobError, LossError
from unisono.host.tracebacks import warn
from unisono.train.assembly import Inside
from unisono.train.body_watch import BodyWatch
from unisono.train.loop.prefetch import to_device
from unisono.train.script_state import HeldGradients, SettingsWatch, SpareTurn, StepBuffers, StepWeights
from unisono.train.step.loss import Weighted
from unisono.train.step.step import Step
from unisono.train.turns import Done, Turns

REFUSED = Refusals(Path(__file__).with_suffix(".toml"))
UNKNOWN = 0


class Phase(Enum):
    """The part of a step that the script is in."""

    OUTSIDE = auto()  # it is in no training loop's body
    FORWARD = auto()  # a shard's loss is awaited
    REST = auto()  # it is there, and what the body does from here to its end counts in another turn
    UPDATE = auto()  # the mean gradient is there: optimizers step
    BEHIND = auto()  # the update is over, and the body is not; or there was no update


@dataclass(frozen=True, slots=True)
class _Shard:
    """The engine wants a shard's loss. ``seed`` is that of its random numbers."""

    batch: Any
    seed: int


@dataclass(frozen=True, slots=True)
class _Update:
    """The engine wants the update."""


class ScriptLoop:
    """Runs the body of a script's loop for each shard that the engine asks for, and holds the engine meanwhile.

    A backward pass is a call of ``step.run``, which needs the losses of all shards. So where a body goes backward
    several times it runs as often for each shard: in pass p its backward pass of number p counts, and what it does
    behind that. What it has done before that in other passes is not done again: weights are set to what they were.

    Args:
        inside: the objects of the run.
        run: the name of what the script trains with, for messages.
        context: the context in which losses are computed.

    Attributes:
        loss: the mean loss of the newest step over its global batch; NaN before the first one.
        steps: the number of steps of the whole job that are over, as far as this worker knows.
        step: the step that is under way, or the newest one; None before the first one.
        turn: the number of the body's turn in a pass of that step, from 0.
        has_told: whether the script was told how it counts turns.
    """

    step: Step | None = None
    turn, has_told = -1, False

    def __init__(
        self, inside: Inside, run: str, context: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        self.loss, self.steps = math.nan, 0
        self._inside, self._context, self._turns = inside, context, Turns()
        self.refused = partial(refused, run)
        self._phase, self._is_broken, self._is_settled = Phase.OUTSIDE, False, False
        self._news: Any = None
        self._spare: SpareTurn | None = None
        self._forward = ExitStack()  # the context of the loss, from the beginning of a turn to its backward pass
        self._pass, self._backwards, self._expected, self._has_more = 0, 0, UNKNOWN, False
        self._has_acted = False  # whether this turn is the one of its pass behind whose backward pass things count
        self._used = set[int]()  # the parameters that optimizers have updated since the backward pass
        self._written = list[int]()  # how often torch has counted writes to weights when the mean gradient came
        self._calls, self._first_calls, self._has_asked, self._has_stepped = 0, -1, False, False
        self._drawn: Generators | None = None  # with which the update of a step begins, alike on all workers
        self._settings, self._watch = (
            SettingsWatch(inside.trained, self.refused),
            BodyWatch(inside.states, lambda: self._known, self.refused),
        )
        self._held, self._weights, self._buffers = HeldGradients(), StepWeights(), StepBuffers()
        inside.ending.also(self._turns.close)
        inside.synchronisation.first(self._before_call)

    def of(self, steps: Generator[Step, None, None]) -> Generator[Any, None, None]:
        """The batches of this worker's shards, step by step.

        Raises:
            JobError: the script is in another training loop's body.
        """
        if not self.is_outside:
            raise JobError(self.refused("two-loops"))
        route_backward()
        is_empty = True
        with closing(steps):
            for step in steps:
                is_empty = False
                yield from self._passes_of(step)
        if not (is_empty or self._has_stepped):
            warn(self.refused("no-step"))

    def state_dict(self) -> dict[str, Any]:
        """Return the state behind the newest step."""
        held = self._held.state(self._trained) if self._inside.trained.prepared is not None else []
        return {"loss": self.loss, "steps": self.steps, "stepped": self._has_stepped, "held": held}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set that."""
        self.loss, self.steps = state["loss"], state["steps"]
        self._has_stepped = state.get("stepped", True)  # an earlier version had neither this nor gradients
        self._held.load(state.get("held", ()), self._trained)

    # -- what the script asks ----------------------------------------------------------------------------------

    @property
    def is_outside(self) -> bool:
        """Whether the script is in no training loop's body."""
        self._require_whole()
        return self._phase is Phase.OUTSIDE

    @property
    def updates(self) -> bool:
        """Whether an update is made now, from the mean gradient."""
        return self._phase is Phase.UPDATE

    @property
    def is_last(self) -> bool:
        """Whether what the body does now counts for the whole step; true outside of loops."""
        return self._phase in (Phase.UPDATE, Phase.BEHIND, Phase.OUTSIDE)

    @property
    def is_at_rest(self) -> bool:
        """Whether what the body does until its end counts in another turn."""
        return self._phase is Phase.REST

    def asked(self) -> bool:
        """The same, for a script that goes by it: its turns may differ."""
        self._has_asked = True
        return self.is_last

    @property
    def ends_epoch(self) -> bool:
        """Whether the present step, or the newest one, is the last of its epoch."""
        return self.step is not None and self.step.is_last_in_epoch

    @property
    def was_skipped(self) -> bool:
        """Whether the present step makes no update."""
        return self._phase is Phase.BEHIND and not self._used

    # -- what the script does ----------------------------------------------------------------------------------

    def backward(self, loss: Tensor, weight: Any = None) -> None:
        """Have the engine go backward from a shard's loss. After the last own shard the mean gradient is there.

        ``weight`` is the number of samples or tokens that the loss is the mean of; by default the shard's number of
        samples.

        Raises:
            JobError: no shard's loss is awaited; or what the body has done cannot be repeated.
        """
        self._require_whole()
        if self._phase is Phase.OUTSIDE:
            raise JobError(self.refused("backward-outside"))
        number, self._backwards = self._backwards, self._backwards + 1
        if number > self._pass:
            self._has_more = True
            self._end_part()
            return
        if number < self._pass:
            return
        self._forward.close()
        if not self._held.hide(self._trained):
            self._give_up()
            raise LossError(self.refused("gradients-before"))
        if self._pass:
            self._held.recall()  # it was shown nothing
        if isinstance(self._news, _Shard):
            self._news = self._turns.answer(loss if weight is None else Weighted(loss, weight))
        if self._spare is not None:
            self._spare.end()
            self._spare = None
        match self._news:
            case _Shard():
                self._phase = Phase.REST
                self._buffers.mark()
            case _Update():
                self._phase = Phase.UPDATE
                assert self._drawn is not None, "a step has begun"
                self._drawn.restore()
                self._held.add()
                self._written = [parameter._version for parameter in self._trained]
            case _:
                self._phase = Phase.BEHIND
        self._has_acted = self.is_last
        if self.is_last and self.step is not None:
            self._note(self.step)

    def take_step(self, optimizer: Optimizer, make: Callable[[], Any]) -> None:
        """An optimizer is to make its step, by ``make``; it does where the mean gradient is there.

        Raises:
            JobError: outside of a training loop, or where the update is over.
        """
        self._require_whole()
        if self._phase is Phase.OUTSIDE:
            raise JobError(self.refused("step-outside"))
        self._calls, self._has_stepped = self._calls + 1, True
        if self._phase is Phase.UPDATE:
            own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self._weights.change(make, self._pass, own, self._trained if self._repeats else ())
            self._used.update(map(id, own))
        elif self._phase is Phase.FORWARD and self._backwards:
            self._weights.repeat(self._backwards - 1)
        elif self._phase is Phase.BEHIND and self._is_settled:
            raise JobError(self.refused("step-behind"))

    def settle(self, action: str) -> None:
        """End the update, before an action that all workers take together.

        Raises:
            JobError: it is not there, as far as this turn of the body has come.
        """
        self._require_whole()
        if self._phase is Phase.UPDATE and self._used:
            self._end_update()
            self._is_settled = True
        if self._phase not in (Phase.OUTSIDE, Phase.BEHIND):
            raise JobError(self.refused("before-update", what=action))

    def _before_call(self) -> None:
        if _HERE.loop is self and self._phase is not Phase.OUTSIDE:
            self.settle("a call that all workers make together")

    # -- one step ----------------------------------------------------------------------------------------------

    def _passes_of(self, step: Step) -> Iterator[Any]:
        self._require_whole()
        outside, is_finalizing = Phase.OUTSIDE, sys.is_finalizing  # an iterator may be left as the process ends
        self._drawn, self.step = Generators.capture(), step
        self._pass, self._first_calls = 0, -1
        self._settings.step_begins()
        self._watch.step_begins()
        self._weights.begin()
        self._buffers.begin(self._inside.trained.require_prepared().buffers)
        try:
            while True:
                yield from self._turns_of(step)
                if step.is_skipped or not self._has_more:  # what is skipped, a worker without a shard does not see
                    break
                self._pass += 1
                self._buffers.restore()
        except GeneratorExit:
            if not is_finalizing():
                self._leave()
            raise
        finally:
            self._phase = outside
            self._forward.close()
        self._expected = max(self._expected, self._pass + 1)
        self._note(step)

    def _turns_of(self, step: Step) -> Iterator[Any]:
        self._has_more, self._is_settled, self.turn = False, False, -1
        self._used.clear()
        self._news = self._turns.begin(partial(step.run, self._ask_loss, update=self._ask_update))
        while not isinstance(self._news, Done):
            batch = self._turn_begins(step)
            yield batch
            self._turn_ends()

    def _turn_begins(self, step: Step) -> Any:
        if self._buffers.are_written:
            self._buffers.restore()
        if isinstance(self._news, _Update):  # this worker has no shard in the step
            self._spare = SpareTurn(self._inside.trained.require_prepared().buffers, self._trained)
            batch = self._spare_batch(step)
        else:
            batch = self._news.batch
            seed_generators(self._news.seed)  # the rest of the body before may have drawn
        if self._pass:
            self._weights.rewind()
            self._held.recall()
        else:
            self._held.show()
        self._phase, self._backwards, self._calls = Phase.FORWARD, 0, 0
        self._has_acted = False
        self.turn += 1
        self._forward.enter_context(self._context())
        self._settings.turn_begins()
        self._watch.turn_begins()
        _HERE.loop = self
        return batch

    def _turn_ends(self) -> None:
        """Note that the body has come to its end."""
        self._settings.turn_ends()
        self._watch.turn_ends(counts=self._has_acted)
        if self._phase is Phase.FORWARD:
            self._give_up()
            raise JobError(self.refused("no-backward"))
        if self._phase is not Phase.REST:
            self._end_part()
        if self._first_calls not in (-1, self._calls) and not self._has_asked:
            self._give_up()
            raise JobError(self.refused("turns-differ", first=self._first_calls, last=self._calls))
        self._first_calls = self._calls

    def _end_part(self) -> None:
        """End what counts of this turn: another backward pass follows, or the end of the body."""
        if self._phase is Phase.UPDATE:
            pairs = zip(self._trained, self._written, strict=True)
            if self._has_more and any(each._version != old and id(each) not in self._used for each, old in pairs):
                self._give_up()
                raise JobError(self.refused("weights-between"))
            self._end_update()
        elif self._phase is Phase.BEHIND and self._is_settled:  # the body may have cleared gradients since
            self._held.keep(self._trained, self._used)
        if self._has_more and self._phase is not Phase.REST:
            if not self._weights.is_kept:
                self._give_up()
                raise JobError(self.refused("other-backwards"))
            self._weights.settle(self._pass)
            self._phase = Phase.REST

    def _end_update(self) -> None:
        self._held.keep(self._trained, self._used)
        drawn = self._drawn = Generators.capture()
        self._news = self._turns.answer(None)
        drawn.restore()  # the rest of the body goes on with them
        self._phase = Phase.BEHIND

    def _leave(self) -> None:
        """Leave the loop in its body, after a break or an error."""
        if self._phase is Phase.UPDATE and not self._has_more:
            self._end_update()
        elif self._phase is not Phase.BEHIND:
            self._give_up()

    def _give_up(self) -> None:
        self._is_broken = True
        self._turns.give_up()

    def _require_whole(self) -> None:
        if self._is_broken:
            raise JobError(self.refused("left-in-a-step"))

    def _note(self, step: Step) -> None:
        self.loss, self.steps = step.loss, step.number + 1

    @property
    def _trained(self) -> list[Tensor]:
        return [*self._inside.trained.require_prepared().parameters.values()]

    @property
    def _known(self) -> set[int]:
        """The ids of the modules and parameters that the run has."""
        prepared = self._inside.trained.require_prepared()
        return {*map(id, prepared.modules), *map(id, prepared.parameters.values())}

    @property
    def _repeats(self) -> bool:
        """Whether the body may go backward again behind this update."""
        return self._expected != 1 or len(self._inside.trained.require_prepared().optimizers) > 1

    def _spare_batch(self, step: Step) -> Any:
        """A batch for a turn that makes the update, on a worker that has no shard in this step."""
        source = self._inside.loop.body.source
        assert source is not None, "a step comes from a loop"
        with_samples = (number for number in range(step.batch.shards) if len(step.batch.shard(number)))
        with generators_kept():
            (batch,) = source.of(step.batch, [next(with_samples)])
        return to_device(batch, self._inside.device)

    # -- on the engine's thread --------------------------------------------------------------------------------

    def _ask_loss(self, _: Any, batch: Any) -> Any:
        return self._turns.ask(_Shard(batch, newest_seed()))

    _ask_loss.runs_body = True  # type: ignore[attr-defined]  # what repeats shards asks for it

    def _ask_update(self) -> None:
        self._turns.ask(_Update())


def refused(run: str, reason: str, /, **words: Any) -> str:
    """A message about a loop, in the words of what the script trains with."""
    return REFUSED(f"loop.{reason}", run=run, **words)


class _Here(threading.local):
    """The loop in whose body this thread is, or was."""

    loop: ScriptLoop | None = None


_HERE = _Here()


def route_backward() -> None:
    """Have ``loss.backward()`` be a backward pass of the loop in whose body it is called, from now on."""
    usual: Any = Tensor.backward
    if hasattr(usual, "is_routed"):
        return

    @wraps(usual)
    def backward(
        self: Tensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
    ) -> None:
        if (loop := _HERE.loop) is None or loop._phase is Phase.OUTSIDE:
            usual(self, gradient, retain_graph, create_graph, inputs=inputs)
            return
        given = {"gradient": gradient is not None, "create_graph": create_graph, "inputs": inputs is not None}
        if any(given.values()):
            raise LossError(loop.refused("backward-options", names="=…, ".join(filter(given.get, given))))
        loop.backward(self)

    backward.is_routed = True  # type: ignore[attr-defined]
    torch.Tensor.backward = backward  # type: ignore[method-assign]
