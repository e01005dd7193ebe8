"""The record of an exception that ends a worker's script."""

import os
import socket
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import takewhile

from unisono.checkpoint.folder import RunFolder, write_json
from unisono.errors import Dismissed, LaunchError, UnisonoError, WorkerLost
from unisono.host.tracebacks import OURS, for_people
from unisono.launch.terminal import WorkerName, called
from unisono.received import open_file, read_object, value_of

# The exit code of a worker's script, noted before its process exits.
#
# With torch loaded the exit takes a while. If the process is killed meanwhile, the code of its script counts.


def note_end(folder: RunFolder, worker: WorkerName, code: int) -> None:
    """Note the exit code of a script, and that it ends now.

    Raises:
        OSError: the folder cannot be written to.
    """
    folder.ended_of(worker).write_text(f"{code} {time.time()}")


def noted_end(folder: RunFolder, worker: WorkerName) -> tuple[int, float] | None:
    """The exit code of a worker's script, and the time of its end, in seconds since 1970; None if none was noted."""
    with suppress(OSError, ValueError), open_file(folder.ended_of(worker)) as file:
        code, at = file.read(64).split()
        return int(code), float(at)
    return None


def end_of(folder: RunFolder, worker: WorkerName, code: int) -> tuple[int, float]:
    """The exit code of a worker, and the time of its end, in seconds since 1970: that of its script, if it was noted.

    The code is that of the process, unless a signal has ended the process: then it is that of the script.
    """
    script_code, at = noted_end(folder, worker) or (code, time.time())
    return (script_code if code < 0 else code), at


# The record that a worker writes when its script ends with an exception.


@dataclass(frozen=True, slots=True)
class Failure:
    """The exception that ended a worker's script.

    Attributes:
        rank: the worker's rank; its id where ranks change.
        type: the exception's type, as a traceback names it.
        traceback: the whole traceback, frames of the user's script first; for an error that says all, the script's
            line and the message alone.
        consequence: whether it only follows from the loss of another worker.
        time: the time of the exception, in seconds since 1970.
    """

    rank: WorkerName
    host: str
    pid: int
    type: str
    message: str
    traceback: str
    consequence: bool
    time: float
    exit_code: int = 1

    @classmethod
    def of(cls, error: BaseException, rank: WorkerName) -> "Failure":
        """The failure of this process, now."""
        described = traceback.TracebackException.from_exception(error)
        return cls(
            rank=rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            type=_type_name(type(error)),
            message=str(described),
            traceback=_report(error, described),
            consequence=any(isinstance(link, WorkerLost) for link in _chain(error)),
            time=time.time(),
            # An attribute of this name of another library's exception may be 0, 75 or no number.
            exit_code=error.exit_code if isinstance(error, UnisonoError) else 1,
        )

    def write(self, folder: RunFolder) -> None:
        """Write the record into the run folder, whole or not at all.

        Raises:
            OSError: the folder cannot be written to.
        """
        folder.logs.mkdir(parents=True, exist_ok=True)
        write_json(folder.error_of(self.rank), asdict(self))

    @classmethod
    def read(cls, folder: RunFolder, rank: WorkerName) -> "Failure | None":
        """The failure of a worker, or None if its script did not end with an exception.

        Raises:
            LaunchError: there is a record and it cannot be read; names the file.
        """
        path = folder.error_of(rank)
        try:
            failure: Failure = value_of(cls, read_object(path), "the record")
            return failure
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise LaunchError(
                f"the record of what happened to {called(rank)}, {path}, is unreadable: {error}"
            ) from error


def dismissal_in(error: BaseException) -> Dismissed | None:
    """The dismissal that ended a script, if this exception only follows from it; None if there was none."""
    return next((link for link in _chain(error) if isinstance(link, Dismissed)), None)


def _report(error: BaseException, described: traceback.TracebackException) -> str:
    if not says_all(error):
        return for_people(error)
    frames = list(takewhile(lambda frame: not frame.filename.startswith(OURS), described.stack))
    place = f"  at {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}\n" if frames else ""
    return f"{place}{_type_name(type(error))}: {described}\n"


def says_all(error: BaseException) -> bool:
    """Whether the message alone helps the script's author, or the person who started it, without a traceback."""
    return isinstance(error, UnisonoError) and error.says_all


def _type_name(kind: type[BaseException]) -> str:
    return (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception, and those that it was raised from or while handling."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        yield link
        seen.add(id(link))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
