"""How many files this process may have open, connections and pipes included."""

import resource
from contextlib import suppress


def allow_open_files(wanted: int) -> int:
    """Raise the limit to so many, as far as the system lets this user; it is never lowered.

    Args:
        wanted: the number of files.

    Returns:
        how many may be open now, at most ``wanted``.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return soft
