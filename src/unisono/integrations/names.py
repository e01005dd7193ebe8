"""Names for what guests keep in checkpoints."""

from unisono.train.run import Run


def free_name(run: Run, guest: str) -> str:
    """A name that nothing registered has yet: there may be several models or trainers.

    Args:
        run: the run.
        guest: the name of the framework.
    """
    taken = run.inside.trained.registered
    numbered = (f"{guest} {number}" for number in range(2, len(taken) + 3))
    return next(name for name in (guest, *numbered) if name not in taken)
