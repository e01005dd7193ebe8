"""How many files, and so connections, a process may have open."""

import resource


class TooFewFiles(Exception):
    """This system does not let a process have so many connections; says how to change that."""


def allow_files(needed: int, limits: tuple[int, int] | None = None) -> None:
    """Let this process, and those that it starts, have as many open files as the system allows.

    Args:
        needed: that one process opens.
        limits: the soft and the hard limit; by default those of this process.

    Raises:
        TooFewFiles: these are not enough.
    """
    soft, hard = limits or resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != hard < needed:
        raise TooFewFiles(
            f"one process has to have {needed} open files, and this system allows {hard}: raise the hard limit "
            f"(ulimit -Hn, as root), or take fewer --workers"
        )
    if resource.RLIM_INFINITY != soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else hard, hard))
