"""How long a Slurm job may take, in the words of Slurm."""

import re

from unisono.errors import JobError

NOTICE_S = 120
"""How long before the limit workers are asked to leave."""

LEAST_S = NOTICE_S + 60
"""Slurm may ask a minute early."""

FORMS = (
    r"(?P<minutes>\d+)(:(?P<seconds>\d+))?",
    r"(?P<hours>\d+):(?P<minutes>\d+):(?P<seconds>\d+)",
    r"(?P<days>\d+)-(?P<hours>\d+)(:(?P<minutes>\d+)(:(?P<seconds>\d+))?)?",
)
SECONDS_OF = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}


def seconds_of(text: str) -> int:
    """A time limit in seconds.

    Args:
        text: one of Slurm's forms: ``M``, ``M:S``, ``H:M:S``, ``D-H``, ``D-H:M``, ``D-H:M:S``.

    Raises:
        JobError: it is of none of them, or so short that workers would be asked to leave at once.
    """
    for form in FORMS:
        if found := re.fullmatch(form, text, re.ASCII):
            parts = {name: int(value) for name, value in found.groupdict().items() if value is not None}
            return _long_enough(text, sum(SECONDS_OF[name] * count for name, count in parts.items()))
    raise JobError(f"--time {text!r}: write hours:minutes:seconds, as in 00:30:00, or days-hours:minutes:seconds")


def _long_enough(text: str, seconds: int) -> int:
    if seconds <= LEAST_S:
        raise JobError(
            f"--time {text}: that is {seconds} s; workers are asked to leave up to {LEAST_S} s before the end, so a "
            f"job needs more than that"
        )
    return seconds
