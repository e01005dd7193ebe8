"""A line of status, such as a progress bar, on its way from a worker to its launcher's terminal, among other lines."""

import re

VARIABLE = "UNISONO_TERMINAL"
"""Of a worker's environment: whether its launcher has a terminal that shows such lines."""

BEGIN, END = "\x1b]9;unisono;", "\x07"
"""An operating system command, as terminals call it: those that do not know it show nothing."""

_LINE = re.compile(rb"\x1b\]9;unisono;[^\x07\n]*\x07\r?\n")


def as_line(text: str) -> str:
    """The line that a worker writes; an empty text takes the status away."""
    return f"{BEGIN}{text}{END}\n"


def status_in(line: str) -> str | None:
    """The status that a line holds, without signs that would move a cursor; None if it is another one."""
    if not (line.startswith(BEGIN) and line.endswith(END)):
        return None
    return "".join(filter(str.isprintable, line.removeprefix(BEGIN).removesuffix(END)))


def without_status(data: bytes) -> bytes:
    """What a worker has written, for its log."""
    return _LINE.sub(b"", data) if b"\x1b]9;unisono;" in data else data
