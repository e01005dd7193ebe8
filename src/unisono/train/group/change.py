"""The change that a collective call makes, and who keeps the state that it changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

from unisono.errors import Dismissed
from unisono.train.group.membership import StateTransfer
from unisono.train.group.workers import Workers

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
