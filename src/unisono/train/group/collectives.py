"""The collective calls of a script, which all members make in the same order."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, Generic, NoReturn, TypeVar

from unisono.errors import Dismissed, JobEnded, JobError, JobMismatch, WorkerLost
from unisono.failpoints import failpoint
from unisono.job import differences
from unisono.received import value_of
from unisono.spans import Spans
from unisono.telemetry import span
from unisono.train.group.membership import MemberProgress, Membership, Recovers, StateTransfer, trusted
from unisono.train.group.workers import SAME, Workers

R = TypeVar("R")


def nothing() -> None:
    """Do nothing: the default of a change's ``then`` and ``cause``."""


@dataclass(frozen=True, slots=True)
class Change(Generic[R]):
    """The result of a collective call before it is applied: nothing of the state is changed yet.

    Attributes:
        make: a function that changes the state, and returns the call's value. It is called once, and the call is
            counted right after it. So it does no I/O, runs no code of the script but what sets or updates a state, and
            makes no collective call that it would have to wait for.
        then: a function that is called once the call is counted, to write and report its result.
        cause: a function that is called once the change is made. It returns what a worker that is behind needs to make
            the change by itself; None if such a worker is to take the resulting state.
    """

    make: Callable[[], R]
    then: Callable[[], None] = nothing
    cause: Callable[[], Any] = nothing


Follow = Callable[[Any], None]
"""Makes a change on a worker that is behind, given its cause."""


MOST_FRUITLESS = 10
"""The number of generations in a row that may fail in the same call with the same number of workers."""

WITHIN = (
    "step.run(update=…): the function must not make a collective call (run.evaluate, run.all_reduce, step.run …), "
    "since the other workers may not be in it: make the call after step.run"
)
"""Why a collective call cannot be made in the middle of a change."""

INSIDE = (
    "a collective call inside of another: functions given to step.run, run.evaluate, run.predict and run.together run "
    "more often on some workers than on others, and again if a worker is lost. Make the call after it, or use the "
    "argument of run.together's function (workers.all_reduce …)"
)
"""Why a collective call cannot be made inside of another."""

HALFWAY = (
    "an update has failed halfway ({error}), so weights and optimizers are neither those before it nor those after it, "
    "and nothing of it counts: start the job again, it goes on from its newest checkpoint"
)
"""Why no collective call can be made after a change that failed halfway."""


class CollectiveCalls:
    """Carries out collective calls, even if workers are lost or join meanwhile.

    A collective call is complete on a worker, or it is not. If another worker is lost in the middle of a call, this
    worker repeats the call with those that are left, or takes the result from them if they have it. Members differ by
    one call at most, since no worker completes a call without all others.

    The state and the number of collective calls that made it change together, in :meth:`_commit` and nowhere else. So
    no worker ever has a state that it has not counted, whichever worker is lost at whichever moment.

    Results of calls outside of loops are published for workers that join later: these run the same script from its
    first line, and get the same values.

    Attributes:
        recovery: the keeper of the state that the calls change; by default one that has no state.
        done: the number of collective calls that this worker has completed.
        step: the number of the newest committed step.
        formed_s: the seconds that connecting and catching up took in the present generation; 0 in the first.
    """

    def __init__(self, membership: Membership, recovery: Recovers | None = None, spans: Spans | None = None) -> None:
        self.done = 0
        self.step = 0
        self.formed_s = 0.0
        self._membership, self.recovery, self._spans = membership, recovery or Recovers(), spans
        self._loop = 0
        self._in_loop = False
        self._number = 0  # of the next call outside of loops: joiners find its value by it
        self._value: Any = None
        self._changed = False
        self._cause: Callable[[], Any] = nothing  # of the newest call
        self._follow: Follow | None = None  # of the call under way
        self._lost_at, self._fruitless = (-1, 0), 0  # where the newest call failed, and how often in a row
        self._bar = ""  # why no collective call can be made now

    def changing(self, recovery: Recovers) -> CollectiveCalls:
        """Return the calls that continue these, and change the state that ``recovery`` keeps."""
        calls = copy(self)
        calls.recovery = recovery
        return calls

    @property
    def progress(self) -> MemberProgress:
        """The progress of this worker."""
        return MemberProgress(self.done, self._loop, self.step)

    def together(self, call: Callable[[Workers], R]) -> R:
        """Carry out a collective call that changes nothing.

        Args:
            call: the call; repeated if a worker is lost during it. It returns the same on all workers: numbers, text,
                tensors, or lists and dicts of them.

        Raises:
            WorkerLost: a worker is gone, and the others cannot go on without it.
        """

        def work_out(workers: Workers) -> Change[R]:
            value = call(workers)
            return Change(lambda: value)

        return self._do(work_out, changes=False)

    def change(self, call: Callable[[Workers], Change[R]], follow: Follow | None = None) -> R:
        """Carry out a collective call that changes weights, optimizers or other state.

        Args:
            call: a function that works out the change together with the other workers, and changes nothing yet;
                repeated if a worker is lost during it.
            follow: a function that makes the change from its cause, if the others have made it already.

        Raises:
            WorkerLost: a worker is gone, and the others cannot go on without it.
        """
        self._follow = follow
        try:
            return self._do(call, changes=True)
        finally:
            self._follow = None

    def agree(self, name: str, fields: Mapping[str, Any], cure: str = SAME) -> None:
        """Refuse to go on with workers whose values differ. ``cure`` says what to do where they differ.

        Raises:
            JobMismatch: names the fields and both values.
        """

        def compare(workers: Workers) -> dict[str, Any]:
            workers.require_same(name, fields, cure)
            return dict(fields)

        agreed = self.together(compare)
        if unequal := differences(agreed, dict(fields)):
            lines = "\n  ".join(unequal)
            raise JobMismatch(
                f"this worker, on host {platform.node()}, has another {name} than those it joins (here: those, "
                f"there: this one):\n  {lines}\n{cure}"
            )

    def regroup(self, lost: WorkerLost | None, *, at_boundary: bool = False) -> None:
        """Go on in a new generation, after a loss or because a new one is due.

        Raises:
            WorkerLost: there will be no new generation.
            Dismissed: this worker is not part of it.
        """
        self._require_open()
        with span("regroup", {"step": self.step, "lost": "" if lost is None else str(lost)[:200]}) as regrouping:
            self._regroup(lost, at_boundary=at_boundary)
            regrouping.note(_here(self._membership.workers))

    def _regroup(self, lost: WorkerLost | None, *, at_boundary: bool) -> None:
        while True:
            self._require_progress(lost)
            try:
                failpoint("regroup begins")
                progress = replace(self.progress, at_boundary=at_boundary)
                self._catch_up(self._heeding(partial(self._membership.regroup, lost, progress)))
            except WorkerLost as error:
                if isinstance(error, JobEnded) or not self._membership.is_elastic:
                    raise
                lost = error
            else:
                return

    def _require_progress(self, lost: WorkerLost | None) -> None:
        """Refuse to regroup for ever when calls fail although no worker is gone."""
        place = self.done, self._membership.workers.world_size
        self._fruitless = self._fruitless + 1 if lost is not None and place == self._lost_at else 0
        self._lost_at = place
        if self._fruitless >= MOST_FRUITLESS:
            raise WorkerLost(
                f"{MOST_FRUITLESS} generations in a row did not get through the same call, though their workers were "
                f"there: the connections between them fail. The last error: {lost}"
            )

    def enter(self, loop: int) -> bool:
        """Begin a loop. A joiner waits here until the others take it in, or skips the loop if they finish it first.

        Returns:
            whether this worker takes part in the loop.
        """
        self._loop, self._in_loop = loop, True
        if not self._membership.joins:
            return True
        while self._membership.joins:
            try:
                failpoint("join begins")
                transfer = self._heeding(partial(self._membership.enter, loop))
                if transfer is None:
                    self.leave(loop)
                    return False
                self._catch_up(transfer)
            except JobEnded:  # a WorkerLost after which there is no generation to join
                raise
            except WorkerLost as lost:
                if not self._membership.joins:  # it has the state, and is a member like the others
                    self.regroup(lost)
        return True

    def leave(self, loop: int) -> None:
        """Note that a loop is over."""
        self._loop, self._in_loop, self._number = loop + 1, False, 0
        self._publish(f"loop/{loop}", "over")

    def await_end(self) -> NoReturn:
        """Wait for the end of the job: for a joiner that was not taken in before its script was done.

        Raises:
            Dismissed: this worker is not needed, or the job is done.
        """
        self._heeding(self._membership.await_end)
        raise AssertionError("only the end is waited for")

    def _heeding(self, wait: Callable[[], R]) -> R:
        """Wait for the others. A worker that is dismissed meanwhile departs, wherever in its script it is."""
        try:
            return wait()
        except Dismissed as dismissed:
            self.recovery.depart(dismissed)

    def _do(self, call: Callable[[Workers], Change[R]], *, changes: bool) -> R:
        self._require_open()
        if self._membership.joins:
            return self._published_value()  # type: ignore[no-any-return]
        number = self.done
        # A regroup may complete the call, too: if others have completed it, this worker takes its result from them.
        while self.done == number:
            try:
                change = self._carry_out(call)
                failpoint("act worked out")
                self._require_all(number + 1)
            except WorkerLost as lost:
                self.regroup(lost)
            else:
                self._commit(number + 1, change.make, change.cause, changed=changes)
                failpoint("act counted")
                self.recovery.go_on()
                change.then()
                self._publish_value()
        value: R = self._value
        return value

    def _require_all(self, acts: int) -> None:
        """Refuse to apply a change that another device of this worker could not work out.

        Raises:
            WorkerLost: another device has lost another worker.
        """
        if not self._heeding(partial(self._membership.holds, acts)):
            raise WorkerLost("another device of this worker has lost another worker")

    def _carry_out(self, call: Callable[[Workers], R]) -> R:
        workers = self._membership.workers
        workers.is_called, self._bar = True, INSIDE
        try:
            return call(workers)
        finally:
            workers.is_called, self._bar = False, ""
            workers.ticks += 1

    def _commit(self, done: int, make: Callable[[], Any], cause: Callable[[], Any], *, changed: bool) -> None:
        """Change the state and its count. No collective call and no I/O happen in between.

        Args:
            done: the number of collective calls whose changes are in the state after ``make``.
            make: a function that sets the state, and returns the value of the newest of these calls.
            cause: a function that returns what the newest of these changes was made from, if it can be made again from
                that.
            changed: whether the newest call has changed the state.
        """
        self._bar = WITHIN
        try:
            self._value = make()
        except BaseException as error:
            self._bar = HALFWAY.format(error=f"{type(error).__name__}: {str(error)[:400]}")
            raise
        self._bar = ""
        self.done, self._changed, self._cause = done, changed, cause

    def _require_open(self) -> None:
        """Refuse a collective call inside of a change, or after a change that failed halfway."""
        if self._bar:
            raise JobError(self._bar)

    def _publish_value(self) -> None:
        # A joiner skips the steps of a loop and takes their state over, so it needs the values of other calls alone.
        if not self._in_loop:
            self._publish(f"act/{self._loop}/{self._number}", self._value)
            self._number += 1

    def _publish(self, name: str, value: Any) -> None:
        if not self._membership.joins:  # a joiner has read these values from the others
            self._membership.publish(name, value)

    def _published_value(self) -> Any:
        value = self._heeding(partial(self._membership.published, f"act/{self._loop}/{self._number}"))
        self._number += 1
        return value

    def _catch_up(self, transfer: StateTransfer) -> None:
        begun = perf_counter()
        failpoint("generation formed")
        self.recovery.leave()
        if transfer.behind:
            attributes = {"source": transfer.source, "behind": len(transfer.behind), "joiners": len(transfer.joiners)}
            with span("hand_over", {**_here(self._membership.workers), **attributes}):
                self._hand_over(transfer)
        self.recovery.renew()
        failpoint("engine made")
        seconds = {**transfer.seconds, "copy": (ended := perf_counter()) - begun}
        if self._spans is not None:
            self._spans.regrouped(begun, ended, seconds)
        self.formed_s = seconds.get("form", 0.0) + seconds["copy"]
        self._membership.formed(seconds)
        failpoint("caught up")

    def _hand_over(self, transfer: StateTransfer) -> None:
        """Give the workers behind all that they lack in one message, which they apply once it is whole. Collective."""
        workers, message = self._membership.workers, None
        transfer = self._trusted(transfer)
        if workers.rank == transfer.source:
            cause, members = self._cause() if transfer.behind else None, transfer.behind - transfer.joiners
            if self._changed and transfer.is_alone and members:
                self.recovery.suspect_only_copy()
            if self._changed and cause is None and members:
                self.recovery.require_same_result()
            # After a call that changed nothing, members that are behind have the right state already.
            is_lacking = self._changed or transfer.joiners
            state = self.recovery.give() if is_lacking else None
            message = [self.done, self._changed, self._value, state, cause]
            failpoint("state captured")
        message = workers.broadcast(message, transfer.source)
        form = tuple[int, bool, Any, Any, Any]
        done, changed, value, state, cause = value_of(form, message, "what the source handed over")
        if workers.rank in transfer.behind:
            failpoint("state received")
            self._require_all(done)
            self._take_over(done, value, state, cause, changed=changed, joins=workers.rank in transfer.joiners)
            failpoint("state taken")

    def _trusted(self, transfer: StateTransfer) -> StateTransfer:
        """Compare the state among the workers that hold it, and have one of the majority give it. Collective.

        Raises:
            JobMismatch: no majority of them holds the same state.
        """
        if transfer.is_alone:
            return transfer
        workers, is_lacking = self._membership.workers, self._changed or transfer.joiners
        own_digests = self.recovery.digests() if is_lacking and workers.rank not in transfer.behind else None
        held = {
            rank: tuple(digests) for rank, digests in enumerate(workers.gather_json(own_digests)) if digests is not None
        }
        if (result := trusted(transfer, held)) is None:
            states = ", ".join(
                f"rank {rank}: {'/'.join(f'{digest:016x}' for digest in digests)}" for rank, digests in held.items()
            )
            raise JobMismatch(
                f"workers come and go, and those that have come furthest hold different states ({states}), and no "
                f"majority says which are right: start the job again, it goes on from its newest verified checkpoint"
            )
        return result

    def _take_over(self, done: int, value: Any, state: Any, cause: Any, *, changed: bool, joins: bool) -> None:
        is_new = done > self.done  # else this worker held another state than most
        follow = None
        if self._follow is not None and cause is not None and is_new and not joins:
            follow = partial(self._follow, cause)

        def take() -> Any:
            if changed or joins:
                self.recovery.take(state, joins=joins, follow=follow)
            return value

        self._commit(done, take, lambda: cause, changed=changed)
        if joins:
            self._membership.joins = False
        elif is_new:
            self._publish_value()


def _here(workers: Workers) -> dict[str, int]:
    """The attributes that tell spans of several workers apart."""
    return {"generation": workers.generation.number, "rank": workers.rank, "world_size": workers.world_size}
