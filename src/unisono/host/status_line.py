"""A line of status, such as a progress bar, on its way from a worker to its launcher's terminal, among other lines."""

import re

VARIABLE = "UNISONO_TERMINAL"
"""The variable of a worker's environment that says whether its launcher's terminal shows such lines."""

BEGIN, END = "\x1b]9;unisono;", "\x07"
"""The beginning and end of an "operating system command": terminals that do not know it show nothing."""

_LINE = re.compile(rb"\x1b\]9;unisono;[^\x07\n]*\x07\r?\n")


def as_line(text: str) -> str:
    """The line with a status, for a worker to write; an empty text removes the status."""
    return f"{BEGIN}{text}{END}\n"


def status_in(line: str) -> str | None:
    """The status in a line, without control characters; None if the line is none of status."""
    if not (line.startswith(BEGIN) and line.endswith(END)):
        return None
    return "".join(filter(str.isprintable, line.removeprefix(BEGIN).removesuffix(END)))


def without_status(data: bytes) -> bytes:
    """The output of a worker without lines of status, for its log."""
    return _LINE.sub(b"", data) if b"\x1b]9;unisono;" in data else data
