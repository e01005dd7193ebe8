"""A plugin whose worker cannot take the state that others give it, as where the joiner's memory does not suffice."""

from unisono import Run, failpoints


def begin(run: Run) -> None:
    """Listen to the points that this worker passes."""
    failpoints.listen(fail)


def fail(point: str) -> None:
    """Fail once the state has come, which is before this worker has ever trained."""
    if point == "state received":
        raise MemoryError("no room for the state")
