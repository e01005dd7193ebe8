"""How a worker's script has ended, noted when nothing of it is left to do but to take its process apart.

With torch loaded that takes a while, and whoever kills a process meanwhile takes nothing from anybody.
"""

from contextlib import suppress

from unisono.checkpoint.folder import RunFolder
from unisono.launch.terminal.name import WorkerName
from unisono.received import open_file


def note_end(folder: RunFolder, worker: WorkerName, code: int) -> None:
    """Note with which code a script has ended, once it has: its exit handlers and threads as well.

    Raises:
        OSError: the folder cannot be written to.
    """
    folder.ended_of(worker).write_text(str(code))


def exit_code(folder: RunFolder, worker: WorkerName, code: int) -> int:
    """The exit code of a worker: of its script, if a signal has ended the process after that; else the process's."""
    if code < 0:
        with suppress(OSError, ValueError), open_file(folder.ended_of(worker)) as file:
            return int(file.read(32))
    return code
