"""A call that asks questions in its middle, on a thread of its own, and is answered by the thread that began it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from unisono.host.tracebacks import SCRIPT_THREADS


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
            threads, script = torch.get_num_threads(), threading.get_ident()  # torch keeps it thread by thread
            carry_out = partial(run, self._carry_out, threads, script)
            self._thread = threading.Thread(target=carry_out, name=name, daemon=True)
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

    def _carry_out(self, threads: int, script: int) -> None:
        torch.set_num_threads(threads)
        SCRIPT_THREADS[threading.get_ident()] = script
        while (call := self._calls.get()) is not None:
            try:
                news: Done | _Failed = Done(call())
            except BaseException as error:  # noqa: BLE001 (it is raised on the script's thread)
                news = _Failed(error)
            call = None  # it holds what it was made of
            self._news.put(news)
            news = Done(None)
        del SCRIPT_THREADS[threading.get_ident()]

    def _next_question(self) -> Any:
        self._has_question = False
        news = self._news.get()
        if isinstance(news, _Failed):
            raise news.error
        self._has_question = not isinstance(news, Done)
        return news
