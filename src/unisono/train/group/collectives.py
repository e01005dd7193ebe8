"""The collective calls of a script, which all members make in the same order."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from unisono.train.group.majority import trusted
from unisono.train.group.membership import MemberProgress, Membership, StateTransfer
from unisono.train.group.workers import SAME, Workers

R = TypeVar("R")


def nothing() -> None:
    """Neither write nor tell."""


@dataclass(frozen=True, slots=True)
class Change(Generic[R]):
    """The result of a collective call before it is applied: nothing of the state is changed yet.

    Attributes:
        make: changes the state, and returns the call's value. Called once, and the call is counted at once: so there is
            no I/O and no code of the script in it, but for what sets or updates a state, and no collective without
            which it could not go on.
        then: a function that is called once the call is counted, to write and tell what came of it.
        cause: a function that returns, once the change is made, what a worker that is behind needs to make it by
            itself; None if such a worker is to take the state that came of it.
    """

    make: Callable[[], R]
    then: Callable[[], None] = nothing
    cause: Callable[[], Any] = nothing


Follow = Callable[[Any], None]
"""Makes a change on a worker that is behind, given its cause."""


class Recovers:
    """Keeps the state that collective calls change, and knows how to go on when workers come and go. Here: none."""

    def leave(self) -> None:
        """The generation is over: let go of what was made for it."""

    def give(self) -> Any:
        """The whole state, as a tree that can be broadcast."""

    def take(self, given: Any, *, joins: bool, follow: Callable[[], None] | None = None) -> None:
        """Set the state that another worker has given. Neither collective nor I/O.

        Args:
            given: what its :meth:`give` returned.
            joins: whether this worker joins.
            follow: a function that makes the newest change here, so that what this changes need not be set.
        """

    def renew(self) -> None:
        """Make what computes in the new generation. Collective."""

    def go_on(self) -> None:
        """A collective call is complete, so that all have completed the one before."""

    def digests(self) -> Sequence[int] | None:
        """Of the state, alike on all who have completed the same calls; None where they may differ."""
        return None

    def gives_alone(self) -> None:
        """Members get a state that this one alone has, so that nobody can compare it. Called before :meth:`give`."""

    def gives_result(self) -> None:
        """Members get what came of a change that they have not made, and not its cause. Called before :meth:`give`.

        Raises:
            JobMismatch: the script has changed it since, and would do so there once more.
        """

    def heal(self, workers: Workers, transfer: StateTransfer, what: str) -> None:
        """Some workers hold another state than most: they get the right one. Collective.

        Args:
            workers: the workers of this generation.
            transfer: the rank that gives the state, and those that get it.
            what: the name of what differs, for the message.
        """

    def depart(self, dismissed: Dismissed) -> NoReturn:
        """The others go on without this worker, or the job does later."""
        raise dismissed


MOST_FRUITLESS = 10
"""Generations in a row that nobody was lost in, and that did not get through the same call."""

WITHIN = (
    "step.run(update=…): what it is given makes this worker's update, and the others wait for nobody in it: call "
    "run.evaluate, run.all_reduce, step.run and the like after step.run"
)
"""Why a collective call cannot be made in the middle of a change."""

INSIDE = (
    "a collective call inside of another: the functions that step.run, run.evaluate, run.predict and run.together are "
    "given are called oftener on some workers than on others, and again if one is lost. Call run.evaluate, step.run, … "
    "after that call; a function of run.together has what it is given (workers.all_reduce …)"
)
"""Why a collective call cannot be made while one is carried out."""

HALFWAY = (
    "an update has failed halfway ({error}), so weights and optimizers are neither those before it nor those after it, "
    "and nothing of it counts: start the job again, it goes on from its newest checkpoint"
)
"""Why no collective call can be made after such a change."""


class CollectiveCalls:
    """Carries collective calls out, whoever is lost or comes meanwhile.

    A collective call is complete on a worker, or it is not: a worker that is in the middle of one when another is lost
    does it again with those who are left, or takes its result from them if they have it. Members differ by one call at
    most, since none completes without all.

    The state and the number of collective calls that made it change together, in :meth:`_commit` and nowhere else:
    whatever is lost at whatever moment, a worker never has a state that it has not counted.

    What is agreed on outside of loops is made known to those who join later: they run the same script from its first
    line, and get the same values.

    Args:
        membership: the members of the job.
        recovery: keeps the state that they change; by default they change none.
        spans: this worker's spans, if they are kept.

    Attributes:
        recovery: the argument, or a stand-in that changes no state.
        done: the number of collective calls that this worker has completed.
        step: the number of the newest committed step.
        formed_s: seconds that connecting and catching up took in the present generation; 0 in the first.
    """

    def __init__(self, membership: Membership, recovery: Recovers | None = None, spans: Spans | None = None) -> None:
        self.done = 0
        self.step = 0
        self.formed_s = 0.0
        self._membership, self.recovery, self._spans = membership, recovery or Recovers(), spans
        self._loop = 0
        self._in_loop = False
        self._number = 0
        self._value: Any = None
        self._changed = False
        self._cause: Callable[[], Any] = nothing  # of the newest call
        self._follow: Follow | None = None  # of the call under way
        self._lost_at, self._fruitless = (-1, 0), 0
        self._bar = ""  # why no collective call can be made now

    def changing(self, recovery: Recovers) -> CollectiveCalls:
        """The collective calls that follow on these, and change a state."""
        found = copy(self)
        found.recovery = recovery
        return found

    @property
    def progress(self) -> MemberProgress:
        """How far this worker has come."""
        return MemberProgress(self.done, self._loop, self.step)

    def together(self, call: Callable[[Workers], R]) -> R:
        """Carry a collective call out that changes nothing.

        Args:
            call: the call; repeated if a worker is lost in it. What it returns is the same on all workers: numbers,
                text, tensors, and lists and dicts of them.

        Raises:
            WorkerLost: a worker is gone, and the others cannot go on without it.
        """

        def found(workers: Workers) -> Change[R]:
            value = call(workers)
            return Change(lambda: value)

        return self._do(found, changes=False)

    def change(self, call: Callable[[Workers], Change[R]], follow: Follow | None = None) -> R:
        """Carry a collective call out that changes weights, optimizers, or what else is handed over.

        Args:
            call: works the change out with the others, and changes nothing; repeated if a worker is lost in it.
            follow: a function that makes the change if others have made it and hand its cause over.

        Raises:
            WorkerLost: a worker is gone, and the others cannot go on without it.
        """
        self._follow = follow
        try:
            return self._do(call, changes=True)
        finally:
            self._follow = None

    def agree(self, what: str, fields: Mapping[str, Any], cure: str = SAME) -> None:
        """Refuse to go on with workers that differ.

        Args:
            what: the name of what they compare.
            fields: this worker's values by name.
            cure: what to do where they differ.

        Raises:
            JobMismatch: names the fields and both values.
        """

        def compare(workers: Workers) -> dict[str, Any]:
            workers.require_same(what, fields, cure)
            return dict(fields)

        theirs = self.together(compare)
        if unequal := differences(theirs, dict(fields)):
            listed = "\n  ".join(unequal)
            raise JobMismatch(
                f"this worker, on host {platform.node()}, has another {what} than those it joins (here: they, there: "
                f"it):\n  {listed}\n{cure}"
            )

    def regroup(self, lost: WorkerLost | None, *, at_boundary: bool = False) -> None:
        """Go on in a new generation: after a loss, or because one is due.

        Raises:
            WorkerLost: there will be none.
            Dismissed: this worker is not part of it.
        """
        self._require_open()
        with span("regroup", {"step": self.step, "lost": "" if lost is None else str(lost)[:200]}) as found:
            self._regroup(lost, at_boundary=at_boundary)
            found.note(self._here())

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
        """Refuse to regroup for ever, where what fails is nobody's loss."""
        place = self.done, self._membership.workers.world_size
        self._fruitless = self._fruitless + 1 if lost is not None and place == self._lost_at else 0
        self._lost_at = place
        if self._fruitless >= MOST_FRUITLESS:
            raise WorkerLost(
                f"{MOST_FRUITLESS} generations in a row did not get through the same call, though their workers were "
                f"there: what connects them does not carry it. The last time: {lost}"
            )

    def _here(self) -> dict[str, int]:
        workers = self._membership.workers
        return {"generation": workers.generation.number, "rank": workers.rank, "world_size": workers.world_size}

    def enter(self, loop: int) -> bool:
        """A loop begins. Whoever joins waits here until the others take it in, and otherwise skips the loop.

        Returns:
            whether there is something to do in it.
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
            except JobEnded:
                raise
            except WorkerLost as lost:
                if not self._membership.joins:  # it has the state, and is a member like the others
                    self.regroup(lost)
        return True

    def leave(self, loop: int) -> None:
        """A loop is over."""
        self._loop, self._in_loop, self._number = loop + 1, False, 0
        self._publish(f"loop/{loop}", "over")

    def await_end(self) -> NoReturn:
        """For a joiner that was not taken in before its script was done.

        Raises:
            Dismissed: this worker is not needed, or the job is done.
        """
        self._heeding(self._membership.await_end)
        raise AssertionError("only the end is waited for")

    def _heeding(self, wait: Callable[[], R]) -> R:
        """Wait for the others. Whoever is dismissed meanwhile departs, wherever in its script it stands."""
        try:
            return wait()
        except Dismissed as dismissed:
            self.recovery.depart(dismissed)

    def _do(self, call: Callable[[Workers], Change[R]], *, changes: bool) -> R:
        self._require_open()
        if self._membership.joins:
            return self._known()  # type: ignore[no-any-return]
        number = self.done
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
                self._tell_joiners()
        found: R = self._value
        return found

    def _require_all(self, acts: int) -> None:
        """Refuse to set what some device of this worker could not work out.

        Raises:
            WorkerLost: one of them has lost another worker.
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
        """The state and its count change. Nothing stands between: no collective, no I/O.

        Args:
            done: the number of collective calls whose changes are in the state after ``make``.
            make: a function that sets the state, and returns the value of the newest of these calls.
            cause: a function that returns what the newest of these changes was made from, if it may be made again.
            changed: whether the newest call has changed the state.
        """
        with self._barred():
            self._value = make()
        self.done, self._changed, self._cause = done, changed, cause

    @contextmanager
    def _barred(self) -> Iterator[None]:
        """No collective call can be made in here, and none after an error in here."""
        self._bar = WITHIN
        try:
            yield
        except BaseException as error:
            self._bar = HALFWAY.format(error=f"{type(error).__name__}: {str(error)[:400]}")
            raise
        self._bar = ""

    def _require_open(self) -> None:
        """Refuse a collective call inside of a change, or after one that was not made whole."""
        if self._bar:
            raise JobError(self._bar)

    def _tell_joiners(self) -> None:
        if not self._in_loop:
            self._publish(f"act/{self._loop}/{self._number}", self._value)
            self._number += 1

    def _publish(self, name: str, value: Any) -> None:
        if not self._membership.joins:  # what it skips, it has heard of from the others
            self._membership.publish(name, value)

    def _known(self) -> Any:
        value = self._heeding(partial(self._membership.published, f"act/{self._loop}/{self._number}"))
        self._number += 1
        return value

    def _catch_up(self, transfer: StateTransfer) -> None:
        begun = perf_counter()
        failpoint("generation formed")
        self.recovery.leave()
        if transfer.behind:
            about = {"source": transfer.source, "behind": len(transfer.behind), "joiners": len(transfer.joiners)}
            with span("hand_over", {**self._here(), **about}):
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
        """Whoever is behind gets all that it lacks in one piece, and takes it over once it is whole. Collective."""
        workers, told = self._membership.workers, None
        transfer = self._trusted(transfer)
        if workers.rank == transfer.source:
            cause, members = self._cause() if transfer.behind else None, transfer.behind - transfer.joiners
            if self._changed and transfer.is_alone and members:
                self.recovery.gives_alone()
            if self._changed and cause is None and members:
                self.recovery.gives_result()
            is_lacking = self._changed or transfer.joiners
            given = self.recovery.give() if is_lacking else None
            told = [self.done, self._changed, self._value, given, cause]
            failpoint("state captured")
        told = workers.broadcast(told, transfer.source)
        form = tuple[int, bool, Any, Any, Any]
        done, changed, value, given, cause = value_of(form, told, "what the source handed over")
        if workers.rank in transfer.behind:
            failpoint("state received")
            self._require_all(done)
            self._take_over(done, value, given, cause, changed=changed, joins=workers.rank in transfer.joiners)
            failpoint("state taken")

    def _trusted(self, transfer: StateTransfer) -> StateTransfer:
        """Have those who hold the state that is to be handed over compare it: one of most of them gives it. Collective.

        Raises:
            JobMismatch: no majority of them holds the same.
        """
        if transfer.is_alone:
            return transfer
        workers, is_lacking = self._membership.workers, self._changed or transfer.joiners
        own = self.recovery.digests() if is_lacking and workers.rank not in transfer.behind else None
        held = {rank: tuple(told) for rank, told in enumerate(workers.gather_json(own)) if told is not None}
        if (found := trusted(transfer, held)) is None:
            listed = ", ".join(f"rank {rank}: {'/'.join(f'{one:016x}' for one in each)}" for rank, each in held.items())
            raise JobMismatch(
                f"workers come and go, and those that have come furthest hold different states ({listed}), and no "
                f"majority says which are right: start the job again, it goes on from its newest verified checkpoint"
            )
        return found

    def _take_over(self, done: int, value: Any, given: Any, cause: Any, *, changed: bool, joins: bool) -> None:
        is_new = done > self.done  # or this worker had held another state than most
        follow = None
        if self._follow is not None and cause is not None and is_new and not joins:
            follow = partial(self._follow, cause)

        def take() -> Any:
            if changed or joins:
                self.recovery.take(given, joins=joins, follow=follow)
            return value

        self._commit(done, take, lambda: cause, changed=changed)
        if joins:
            self._membership.joins = False
        elif is_new:
            self._tell_joiners()
