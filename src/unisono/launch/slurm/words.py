"""Words and durations as bash and Slurm read them."""

import re
import shlex

from unisono.errors import JobError
from unisono.received import short

# Words that stay one word: in a bash script, and in the lines of it that Slurm reads.

CONTROL = re.compile(r"[\x00-\x1f\x7f]")
"""What would end a line, or is not seen in a terminal."""


def shell_word(text: str) -> str:
    """A text as one word of bash, on one line, which nothing in it can end or expand.

    Args:
        text: anything without a NUL, as arguments and paths are; bytes that are no text as ``os.fsdecode`` has them.

    Returns:
        the text itself if nothing in it means anything to a shell; in ``'…'``; or in ``$'…'`` if it holds
        control characters, which bash then makes from their numbers.
    """
    if not CONTROL.search(text):
        return shlex.quote(text)
    plain = text.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + CONTROL.sub(lambda found: f"\\{ord(found.group()):03o}", plain) + "'"


def directive(name: str, value: str) -> str:
    """An option of sbatch, as the part of a ``#SBATCH`` line that Slurm takes for one argument.

    Slurm does not read these lines as a shell does: a backslash escapes the next character within quotes of either
    kind, and nothing can stand for a new line (``get_argument`` in Slurm's ``src/sbatch/opt.c``).

    Args:
        name: the name of the option, without dashes.
        value: the value of the option.

    Raises:
        JobError: the value is empty, or has control characters, which no such line can hold.
    """
    require_line(f"--{name}", value)
    if re.fullmatch(r"[\w.,:/@%+=-]+", value, re.ASCII):
        return f"--{name}={value}"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'--{name}="{escaped}"'


def require_line(what: str, value: str) -> None:
    """Refuse what cannot stand in a line that Slurm reads.

    Raises:
        JobError: the value is empty, has control characters or bytes that are no text.
    """
    if not value:
        raise JobError(f"{what} is empty")
    found = CONTROL.search(value)
    if found:
        raise JobError(
            f"{what} {short(value)}: a {found.group()!r} in it cannot be told to Slurm, which reads line by line"
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise JobError(f"{what} {short(value)}: not all of it is text in UTF-8") from None


# How long a Slurm job may take, in the words of Slurm.

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
    raise JobError(f"--time {short(text)}: write hours:minutes:seconds, as in 00:30:00, or days-hours:minutes:seconds")


def _long_enough(text: str, seconds: int) -> int:
    if seconds <= LEAST_S:
        raise JobError(
            f"--time {text}: that is {seconds} s; workers are asked to leave up to {LEAST_S} s before the end, so a "
            f"job needs more than that"
        )
    return seconds
