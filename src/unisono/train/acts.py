"""The collective calls of a script, which all members make in the same order."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, NoReturn, TypeVar

from unisono.errors import Dismissed, JobEnded, JobMismatch, WorkerLost
from unisono.job import differences
from unisono.train.membership import Arrival, Membership, Standing
from unisono.train.workers import Workers

R = TypeVar("R")

HandOver = Callable[[Arrival, bool], None]
"""Gives the run's state to those who lack it. Told who is in the new generation, and whether the newest act of the
source has changed the state. Collective."""


class Acts:
    """Carries collective calls out, whoever is lost or comes meanwhile.

    An act is complete on a worker, or it is not: a worker that is in the middle of one when another is lost does it
    again with those who are left, or takes its result from them if they have it. Members differ by one act at most,
    since none completes without all.

    What is agreed on outside of loops is made known to those who join later: they run the same script from its first
    line, and get the same values.

    Attributes:
        done: how many this worker has completed.
        step: that it has committed last.
        begins: called before each of the script's calls, outside of acts.
        formed_s: seconds that connecting and catching up took in the present generation; 0 in the first.
    """

    def __init__(self, membership: Membership) -> None:
        self.done = 0
        self.hand_over: HandOver = lambda arrival, changed: None
        self.depart: Callable[[Dismissed], NoReturn] = _leave
        self.begins: Callable[[], None] = lambda: None
        self.step = 0
        self.formed_s = 0.0
        self._membership = membership
        self._loop = 0
        self._in_loop = False
        self._number = 0
        self._value: Any = None
        self._changed = False

    @property
    def standing(self) -> Standing:
        """How far this worker has come."""
        return Standing(self.done, self._loop, self.step)

    def together(self, act: Callable[[Workers], R], *, changes_state: bool = False) -> R:
        """Carry an act out.

        Args:
            act: the call; repeated if a worker is lost in it. What it returns is the same on all workers: numbers,
                text, tensors, and lists and dicts of them.
            changes_state: whether weights or optimizers are other ones after it.

        Raises:
            WorkerLost: a worker is gone, and the others cannot go on without it.
        """
        if self._membership.joins:
            return self._known()  # type: ignore[no-any-return]
        self.begins()
        number = self.done
        while self.done == number:
            try:
                value = self._carry_out(act)
            except WorkerLost as lost:
                self.regroup(lost)
            else:
                self._complete(value, changes_state)
        found: R = self._value
        return found

    def agree(self, what: str, fields: Mapping[str, Any]) -> None:
        """Refuse to go on with workers that differ.

        Raises:
            JobMismatch: names the fields and both values.
        """

        def compare(workers: Workers) -> dict[str, Any]:
            workers.require_same(what, fields)
            return dict(fields)

        theirs = self.together(compare)
        if unequal := differences(theirs, dict(fields)):
            listed = "\n  ".join(unequal)
            raise JobMismatch(
                f"this worker has another {what} than those it joins (here: they, there: it):\n  {listed}\n"
                f"All workers need the same, or their weights would differ"
            )

    def regroup(self, lost: WorkerLost | None, *, at_boundary: bool = False) -> None:
        """Go on in a new generation: after a loss, or because one is due.

        Raises:
            WorkerLost: there will be none.
            Dismissed: this worker is not part of it.
        """
        while True:
            try:
                standing = replace(self.standing, at_boundary=at_boundary)
                self._catch_up(self._heeding(partial(self._membership.regroup, lost, standing)))
            except WorkerLost as error:
                if isinstance(error, JobEnded) or not self._membership.is_elastic:
                    raise
                lost = error
            else:
                return

    def enter(self, loop: int) -> bool:
        """A loop begins. Whoever joins waits here until the others take it in, and otherwise skips the loop.

        Returns:
            whether there is something to do in it.
        """
        self._loop, self._in_loop = loop, True
        if not self._membership.joins:
            return True
        while True:
            try:
                arrival = self._heeding(partial(self._membership.enter, loop))
                if arrival is not None:
                    self._catch_up(arrival)
            except JobEnded:
                raise
            except WorkerLost:  # until the state is here, this worker has no part in what the others do
                continue
            if arrival is None:
                self.leave(loop)
            return arrival is not None

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
            self.depart(dismissed)

    def _carry_out(self, act: Callable[[Workers], R]) -> R:
        workers = self._membership.workers
        workers.is_called = True
        try:
            return act(workers)
        finally:
            workers.is_called = False
            workers.ticks += 1

    def _complete(self, value: Any, changed: bool) -> None:
        self.done += 1
        self._value, self._changed = value, changed
        if not self._in_loop:
            self._publish(f"act/{self._loop}/{self._number}", value)
            self._number += 1

    def _publish(self, name: str, value: Any) -> None:
        if not self._membership.joins:  # what it skips, it has heard of from the others
            self._membership.publish(name, value)

    def _known(self) -> Any:
        value = self._heeding(partial(self._membership.published, f"act/{self._loop}/{self._number}"))
        self._number += 1
        return value

    def _catch_up(self, arrival: Arrival) -> None:
        begun = perf_counter()
        workers = self._membership.workers
        changed = False
        if arrival.behind:
            told = [self.done, self._changed, self._value] if workers.rank == arrival.source else None
            done, changed, value = workers.broadcast(told, arrival.source)
        self.hand_over(arrival, changed)
        if workers.rank in arrival.behind:
            self._overtake(done, changed, value, joins=workers.rank in arrival.joiners)
        seconds = {**arrival.seconds, "copy": perf_counter() - begun}
        self.formed_s = seconds.get("form", 0.0) + seconds["copy"]
        self._membership.formed(seconds)

    def _overtake(self, done: int, changed: bool, value: Any, *, joins: bool) -> None:
        if joins:
            self.done, self._changed, self._value = done, changed, value
        else:
            self._complete(value, changed)


def _leave(dismissed: Dismissed) -> NoReturn:
    raise dismissed
