"""The body of a script's training loop, once for each shard of this worker; its last turn of a step updates."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from contextvars import copy_context
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from unisono.data.generators import Generators, generators_kept
from unisono.errors import JobError, LossError
from unisono.integrations.kit import refused
from unisono.train.loop.prefetch import to_device
from unisono.train.run import Run
from unisono.train.step.loss import Weighted
from unisono.train.step.step import Step


class GivenUp(BaseException):
    """The script answers no more: raised on the thread of the call, wherever that asks."""


@dataclass(frozen=True, slots=True)
class Done:
    """The call has returned."""

    value: Any


@dataclass(frozen=True, slots=True)
class _Failed:
    error: BaseException


_GIVEN_UP = object()


class Turns:
    """Carries calls out on a thread of its own, one at a time. Of the two threads one runs, and the other one waits.

    It is as a generator would be that yields questions, for functions that are deep below it.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._news: SimpleQueue[Any] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._has_question = False

    # -- on the script's thread --------------------------------------------------------------------------------

    def begin(self, call: Callable[[], Any]) -> Any:
        """Carry a call out, as far as its first question. Return that, or :class:`Done`."""
        if self._thread is None:
            name = f"{threading.current_thread().name} steps"
            run = copy_context().run
            threads = torch.get_num_threads()  # torch keeps it thread by thread
            self._thread = threading.Thread(target=lambda: run(self._carry_out, threads), name=name, daemon=True)
            self._thread.start()
        self._calls.put(call)
        return self._next_question()

    def answer(self, value: Any) -> Any:
        """Answer the newest question, and carry the call on to the next one. Return that, or :class:`Done`."""
        self._answers.put(value)
        return self._next_question()

    def give_up(self) -> None:
        """Have the call end at its question, with :class:`GivenUp`."""
        if self._has_question:
            self._answers.put(_GIVEN_UP)
            self._news.get()
            self._has_question = False

    def close(self) -> None:
        """End the thread."""
        self.give_up()
        if self._thread is not None:
            self._calls.put(None)
            if threading.current_thread() is not self._thread:
                self._thread.join()
            self._thread = None

    # -- on the call's thread ----------------------------------------------------------------------------------

    def ask(self, question: Any) -> Any:
        """Have the script run until it answers.

        Raises:
            GivenUp: it does not.
        """
        self._news.put(question)
        if (answer := self._answers.get()) is _GIVEN_UP:
            raise GivenUp
        return answer

    def _carry_out(self, threads: int) -> None:
        torch.set_num_threads(threads)
        while (call := self._calls.get()) is not None:
            try:
                news: Done | _Failed = Done(call())
            except BaseException as error:  # noqa: BLE001 (it is raised on the script's thread)
                news = _Failed(error)
            call = None  # it holds what it was made of
            self._news.put(news)
            news = Done(None)

    def _next_question(self) -> Any:
        self._has_question = False
        news = self._news.get()
        if isinstance(news, _Failed):
            raise news.error
        self._has_question = not isinstance(news, Done)
        return news


class SettingsWatch:
    """Finds settings that a body changes in several turns of a step: the number of turns depends on the workers."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._before: list[dict[str, Any]] = []
        self._has_changed = False

    def step_begins(self) -> None:
        """Begin a step: the body has made no turn of it."""
        self._has_changed = False

    def turn_begins(self) -> None:
        """Note that the body begins a turn."""
        self._before = self._present()

    def turn_ends(self) -> None:
        """The body has come to its end.

        Raises:
            JobError: it has changed settings, and has done so before in this step.
        """
        present = self._present()
        if present == self._before:
            return
        if self._has_changed:
            names = {
                name
                for group, other in zip(self._before, present, strict=False)
                for name in group
                if group[name] != other.get(name)
            }
            raise JobError(refused("accelerate.settings-twice", names=", ".join(sorted(names))))
        self._has_changed = True

    def _present(self) -> list[dict[str, Any]]:
        optimizers = self._run.inside.trained.require_prepared().optimizers
        return [
            {name: _plain(value) for name, value in group.items() if name != "params"}
            for optimizer in optimizers
            for group in optimizer.param_groups
        ]


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


class Phase(Enum):
    """The part of a step that the script is in."""

    OUTSIDE = auto()  # it is in no training loop's body
    FORWARD = auto()  # a shard's loss is awaited
    BACKWARD = auto()  # it is there, and another shard follows
    UPDATE = auto()  # the mean gradient is there: optimizers step
    BEHIND = auto()  # the step is over, and the body is not; or there was no update


@dataclass(frozen=True, slots=True)
class _Shard:
    """The engine wants a shard's loss. ``drawn`` are the generators' states as the shard begins."""

    batch: Any
    drawn: Generators


@dataclass(frozen=True, slots=True)
class _Update:
    """The engine wants the update."""


class Bodies:
    """Runs the loop's body for each shard that the engine asks for, and holds the engine meanwhile.

    Attributes:
        loss: the mean loss of the newest step over its global batch; NaN before the first one.
        steps: the number of steps of the whole job that are over, as far as this worker knows.
        has_trigger: whether the script has set accelerate's trigger.
    """

    def __init__(self, run: Run) -> None:
        self.loss = math.nan
        self.steps = 0
        self.has_trigger = False
        self._run, self._turns = run, Turns()
        self._phase, self._has_stepped, self._is_broken = Phase.OUTSIDE, False, False
        self._news: Any = None
        self._step: Step | None = None
        self._buffers: list[tuple[Tensor, Tensor]] | None = None  # of a turn that stands in for no shard
        self._drawn: Generators | None = None  # with which the update of a step begins, alike on all workers
        self._settings = SettingsWatch(run)
        run.inside.ending.also(self._turns.close)

    def of(self, steps: Generator[Step, None, None]) -> Generator[Any, None, None]:
        """The batches of this worker's shards, step by step.

        Raises:
            JobError: the script is in another training loop's body.
        """
        if not self.is_outside:
            raise JobError(refused("accelerate.two-loops"))
        with closing(steps):
            for step in steps:
                yield from self._turns_of(step)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the newest step."""
        return {"loss": self.loss, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set that."""
        self.loss, self.steps = state["loss"], state["steps"]

    # -- what the script asks ----------------------------------------------------------------------------------

    @property
    def is_outside(self) -> bool:
        """Whether the script is in no training loop's body."""
        self._require_whole()
        return self._phase is Phase.OUTSIDE

    @property
    def updates(self) -> bool:
        """Whether the update of a step is made now, from the mean gradient."""
        return self._phase is Phase.UPDATE

    @property
    def is_last(self) -> bool:
        """Whether this is the body's last turn of a step, and the backward pass is over; true outside of loops."""
        return self._phase in (Phase.UPDATE, Phase.BEHIND, Phase.OUTSIDE)

    @property
    def ends_epoch(self) -> bool:
        """Whether the present step, or the newest one, is the last of its epoch."""
        return self._step is not None and self._step.is_last_in_epoch

    @property
    def was_skipped(self) -> bool:
        """Whether the present step makes no update."""
        return self._phase is Phase.BEHIND and not self._has_stepped

    # -- what the script does ----------------------------------------------------------------------------------

    def backward(self, loss: Tensor, weight: Any = None) -> None:
        """Have the engine go backward from a shard's loss. After the last own shard the mean gradient is there.

        ``weight`` is the number of samples or tokens that the loss is the mean of; by default the shard's number of
        samples.

        Raises:
            JobError: no shard's loss is awaited.
        """
        self._require_whole()
        if self._phase is Phase.OUTSIDE:
            raise JobError(refused("accelerate.backward-outside"))
        if self._phase is not Phase.FORWARD:
            raise LossError(refused("accelerate.backward-twice"))
        if self._buffers is not None:
            _put_back(self._buffers)
            self._buffers = None
        else:
            self._news = self._turns.answer(loss if weight is None else Weighted(loss, weight))
        match self._news:
            case _Shard():
                self._phase = Phase.BACKWARD
            case _Update():
                self._phase = Phase.UPDATE
                assert self._drawn is not None, "a step has begun"
                self._drawn.restore()
            case _:
                self._phase = Phase.BEHIND
        if self.is_last and self._step is not None:
            self._note(self._step)

    def step(self) -> bool:
        """An optimizer is to make its step: whether it does."""
        self._require_whole()
        if self._phase is Phase.OUTSIDE:
            raise JobError(refused("accelerate.step-outside"))
        self._has_stepped |= self.updates
        return self.updates

    def settle(self, action: str) -> None:
        """End the step, before an action that all workers take together.

        Raises:
            JobError: it is not, as far as this turn of the body has come.
        """
        self._require_whole()
        if self._phase is Phase.UPDATE and self._has_stepped:
            self._end_update()
        if self._phase not in (Phase.OUTSIDE, Phase.BEHIND):
            raise JobError(refused("accelerate.before-update", what=action))

    # -- one step ----------------------------------------------------------------------------------------------

    def _turns_of(self, step: Step) -> Iterator[Any]:
        self._require_whole()
        self._drawn = Generators.capture()
        self._settings.step_begins()
        self._news = self._turns.begin(partial(step.run, self._ask_loss, update=self._ask_update))
        is_first, self._step = True, step
        try:
            while not isinstance(self._news, Done):
                if isinstance(self._news, _Update):
                    batch = self._stand_in(step)
                else:
                    batch = self._news.batch
                    if not is_first:  # the rest of the body before may have drawn
                        self._news.drawn.restore()
                is_first, self._phase, self._has_stepped = False, Phase.FORWARD, False
                self._settings.turn_begins()
                yield batch
                self._settings.turn_ends()
                self._end_turn()
        except GeneratorExit:
            self._leave()
            raise
        finally:
            self._phase = Phase.OUTSIDE
        self._note(step)

    def _note(self, step: Step) -> None:
        self.loss, self.steps = step.loss, step.number + 1

    def _end_turn(self) -> None:
        """Note that the body has come to its end."""
        if self._phase is Phase.FORWARD:
            self._give_up()
            raise JobError(refused("accelerate.no-backward"))
        if self._phase is Phase.UPDATE:
            if not self._has_stepped:
                self._give_up()
                raise JobError(refused("accelerate.no-step"))
            self._end_update()

    def _end_update(self) -> None:
        drawn = Generators.capture()
        self._news = self._turns.answer(None)
        drawn.restore()  # the rest of the body goes on with them
        self._phase = Phase.BEHIND

    def _leave(self) -> None:
        """Leave the loop in its body, after a break or an error."""
        if self._phase is Phase.UPDATE and self._has_stepped:
            self._end_update()
        elif self._phase is not Phase.BEHIND:
            self._give_up()

    def _give_up(self) -> None:
        self._is_broken = True
        self._turns.give_up()

    def _require_whole(self) -> None:
        if self._is_broken:
            raise JobError(refused("accelerate.left-in-a-step"))

    def _stand_in(self, step: Step) -> Any:
        """A batch for a turn that makes the update, on a worker that has no shard in this step."""
        modules = self._run.inside.trained.require_prepared().modules
        self._buffers = [(buffer, buffer.detach().clone()) for module in modules for buffer in module.buffers()]
        source = self._run.inside.loop.body.source
        assert source is not None, "a step comes from a loop"
        with_samples = (number for number in range(step.batch.shards) if len(step.batch.shard(number)))
        with generators_kept():
            (batch,) = source.of(step.batch, [next(with_samples)])
        return to_device(batch, self._run.device)

    # -- on the engine's thread --------------------------------------------------------------------------------

    def _ask_loss(self, _: Any, batch: Any) -> Any:
        return self._turns.ask(_Shard(batch, Generators.capture()))

    _ask_loss.runs_body = True  # type: ignore[attr-defined]  # what repeats shards asks for it

    def _ask_update(self) -> None:
        self._turns.ask(_Update())


@torch.no_grad()
def _put_back(kept: Iterable[tuple[Tensor, Tensor]]) -> None:
    for buffer, value in kept:
        buffer.copy_(value)
