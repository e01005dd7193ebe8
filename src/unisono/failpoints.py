"""Places in a worker's run at which tests and fault injection may kill or stop it. By default nothing happens there."""

from __future__ import annotations

from collections.abc import Callable

POINTS = (
    "act worked out",  # its collectives are done, and nothing is changed yet
    "act counted",  # the state is changed, and the act is counted
    "regroup begins",  # a worker was lost, or others come and go: before the coordinator is told
    "join begins",  # a joiner waits for the others to take it in
    "generation formed",  # the workers of the next generation are connected
    "state captured",  # the source is about to hand its state over
    "state received",  # and it is the one that was sent; nothing is changed yet
    "state taken",  # it is set, and what the source has done is counted
    "engine made",  # what computes in the new generation
    "caught up",  # this worker is about to train on
    "heal begins",  # some worker holds another state than most
    "healed",  # it has been given theirs
    "round worked out",  # what everybody's weights are to be is known, and nothing is changed yet
    "checkpoint captured",  # the main worker is about to write it
    "checkpoint kept",  # it is on disk, or on its way there
    "checkpoint share written",  # on the thread that writes: what this process writes of it is on disk, the rest is not
)
"""The names of the failpoints, each with what has happened when it is passed."""

FailpointListener = Callable[[str], None]
"""A function that is called with the name of each failpoint that is passed, on the thread that passes it."""

_listener: FailpointListener | None = None


def failpoint(name: str) -> None:
    """Pass a failpoint.

    Args:
        name: one of :data:`POINTS`.
    """
    if _listener is not None:
        _listener(name)


def listen(listener: FailpointListener | None) -> FailpointListener | None:
    """Set the listener that is called for every failpoint from now on; None for no listener.

    Returns:
        the listener before.
    """
    global _listener
    before, _listener = _listener, listener
    return before
