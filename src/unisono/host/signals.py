"""The signals by which batch systems ask for an end beside SIGTERM, when they are told to."""

import signal

NOTICES = (signal.SIGUSR1, signal.SIGUSR2)


def ignore_notices() -> None:
    """Leave them to the launcher and the workers. A batch system sends them to every process of a job."""
    for number in NOTICES:
        signal.signal(number, signal.SIG_IGN)
