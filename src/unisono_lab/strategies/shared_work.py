"""The common part of strategies whose workers take the next part of the work when they are done with one."""

from __future__ import annotations

import platform
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from unisono.errors import NoProgress, WorkerLost
from unisono.reduce.rpc_message import RpcMessage
from unisono.train.model.tensors import Untouched
from unisono.train.strategies.synchroniser import SyncContext, Synchroniser
from unisono_lab.strategies.parameter_server import StalenessBound
from unisono_lab.strategies.rpc import RpcEndpoint

# Who computes what next, where nobody waits for the slowest worker.


class WorkQueue:
    """Hands out the parts of one step after the other, each once. Many threads ask; some have to wait.

    Args:
        parts: the number of parts of each step.
        staleness: the bound that says who may compute and who may push.
        timeout_s: the longest wait, in seconds, while no other worker gets on.
        called: a function that returns the name of a rank's worker, for messages.

    Attributes:
        next: the number of the next item: steps times parts, and the part.
    """

    def __init__(
        self, parts: int, staleness: StalenessBound, timeout_s: float, called: Callable[[int], str] = "rank {}".format
    ) -> None:
        self.next, self._timeout_s = 0, timeout_s
        self._parts, self._staleness, self._called = parts, staleness, called
        self._changed = threading.Condition()
        self._is_over = False

    def claim(self, worker: int, step: int) -> int | None:
        """The next item of a step; None if it has none left. Whoever asks is done with the one before.

        Raises:
            WorkerLost: the workers part.
            NoProgress: those who go first do not get on.
        """
        with self._changed:
            self._staleness.give_up(worker)  # a step that is skipped is not pushed
            self._changed.notify_all()
            self.next = max(self.next, step * self._parts)  # those of a step before that are left belong to the lost
            self._wait(worker, lambda: self.next >= (step + 1) * self._parts or self._staleness.read(worker))
            if self.next >= (step + 1) * self._parts:
                return None
            self.next += 1
            self._changed.notify_all()
            return self.next - 1

    def taken(self, worker: int, step: int) -> None:
        """Wait until there are no items of a step any more.

        Raises:
            WorkerLost: the workers part.
            NoProgress: nobody takes them.
        """
        with self._changed:
            self._wait(worker, lambda: self.next >= (step + 1) * self._parts)

    def push(self, worker: int) -> None:
        """Wait until what was computed may be pushed.

        Raises:
            WorkerLost: the workers part.
            NoProgress: those who go first do not get on.
        """
        with self._changed:
            self._wait(worker, lambda: self._staleness.push(worker))
            self._changed.notify_all()

    def arrived(self, worker: int) -> None:
        """What the worker pushed has arrived."""
        with self._changed:
            self._staleness.arrived(worker)
            self._changed.notify_all()

    def end(self) -> None:
        """Whoever waits wakes."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _wait(self, worker: int, holds: Callable[[], bool]) -> None:
        while not self._is_over:
            if holds():
                return
            if not self._changed.wait(self._timeout_s):
                out = ", ".join(self._called(other) for other in self._staleness.out if other != worker) or "the others"
                raise NoProgress(
                    f"{self._called(worker)} waited for its turn in vain, which comes after {out}. It hangs, or takes "
                    f"longer for something than the others: see its log, or allow more with "
                    f"unisono.init(faults={{'timeout_s': …}})"
                )
        raise WorkerLost("a worker was lost while others waited for their turn")


# What strategies have in common whose workers take the next part of the work when they are done with one.

QUEUE_RANK = 0
"""The rank that has the work queue."""


class SharedWork(Synchroniser):
    """Workers ask each other, one at a time, and rank 0 for the next part of the work.

    Args:
        context: the workers, what they train, and their limits.
        parts: the number of parts of a step's work.
        bound: the largest staleness of a gradient; None for no limit.
    """

    def __init__(self, context: SyncContext, parts: int, bound: int | None) -> None:
        super().__init__(context)
        self.parts = parts
        self.rank = context.workers.rank
        self._is_bounded = bound is not None
        self._queue = WorkQueue(parts, StalenessBound(bound), context.timeout_s, self._called)
        self._item = 0  # the number behind the newest one that this worker has had
        self._endpoint: RpcEndpoint | None = None
        self._hosts: list[str] = []
        self._context = context
        why = "With this strategy other workers have copies of them, and give them back as they were"
        self._untouched = Untouched(self.replica.weights, why)

    def open(self) -> None:
        """Connect with the others. Collective; the last thing that making a synchroniser does."""
        workers = self.workers
        if workers.world_size > 1:
            self._hosts = workers.gather_json(platform.node())
            traffic, timeout_s = workers.transport.traffic, self._context.timeout_s
            self._endpoint = RpcEndpoint(
                self.rank, workers.host, self._answer, traffic, timeout_s, self._called, self._queue.end, workers.keys
            )
            workers.attach(self._endpoint.abort)
            try:
                self._endpoint.meet(workers.gather_json)
            except BaseException:
                self.close()
                raise

    def follow(self, before: Synchroniser) -> None:
        """Go on with the work where it was."""
        super().follow(before)
        assert isinstance(before, SharedWork)
        self._item = before._item * self.parts // before.parts

    def step_begins(self) -> None:
        """Refuse weights that the script has changed: others have copies, which would undo that."""
        self._untouched.require()

    def claim(self, step: int) -> int | None:
        """The next part, from rank 0."""
        said = self._ask_one(QUEUE_RANK, RpcMessage({"ask": "claim", "step": step})).said["ticket"]
        if said is None:
            return None
        self._item = said + 1
        return int(said) % self.parts

    def _go_along(self, step: int) -> None:
        """Wait until others have taken all of a step. So nobody waits for a whole round of theirs where it ends."""
        self._ask_one(QUEUE_RANK, RpcMessage({"ask": "taken", "step": step}))

    def synchronise(self, *, after_loss: bool) -> Callable[[], None]:
        """All go on behind the newest item that any of them has had."""
        if after_loss:
            self._item = self._queue.next = max(self.workers.gather_json(self._item))
        agreed = self._agreed()

        def make() -> None:
            agreed()
            self._untouched.accept()

        return make

    def close(self) -> None:
        """Hang up on the others."""
        if self._endpoint is not None:
            self.workers.attach(None)
            self._endpoint.close()
            self._endpoint = None

    @abstractmethod
    def _agreed(self) -> Callable[[], None]:
        """Work out the central model. Collective. Returns what sets it, here."""

    @abstractmethod
    def _answered(self, rank: int, message: RpcMessage) -> RpcMessage:
        """What to say to the worker of this rank. On any thread."""

    def _called(self, rank: int) -> str:
        return f"rank {rank} on host {self._hosts[rank]}"

    def _may_push(self) -> None:
        if self._is_bounded:
            self._ask_one(QUEUE_RANK, RpcMessage({"ask": "push"}))

    def _has_arrived(self) -> None:
        if self._is_bounded:
            self._ask_one(QUEUE_RANK, RpcMessage({"ask": "arrived"}))

    def _ask_one(self, rank: int, message: RpcMessage) -> RpcMessage:
        return self._ask({rank: message})[rank]

    def _ask(self, questions: Mapping[int, RpcMessage]) -> dict[int, RpcMessage]:
        others = {rank: message for rank, message in questions.items() if rank != self.rank}
        self.workers.is_asking = True
        try:
            answers = self._endpoint.ask(others) if others and self._endpoint is not None else {}
            if self.rank in questions:
                answers[self.rank] = self._answer(self.rank, questions[self.rank])
        finally:
            self.workers.is_asking = False
        return answers

    def _answer(self, rank: int, message: RpcMessage) -> RpcMessage:
        said: Mapping[str, Any] = message.said
        match said["ask"]:
            case "claim":
                return RpcMessage({"ticket": self._queue.claim(rank, said["step"])})
            case "taken":
                self._queue.taken(rank, said["step"])
                return RpcMessage()
            case "push":
                self._queue.push(rank)
                return RpcMessage()
            case "arrived":
                self._queue.arrived(rank)
                return RpcMessage()
        return self._answered(rank, message)
