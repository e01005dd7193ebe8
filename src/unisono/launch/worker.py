"""The program of a worker: ``python -m unisono.launch.worker script.py arguments``.

It ends with its launcher, runs the script as ``python script.py`` would, and records the exception that ends
it. It does not load torch: the script does.
"""

import atexit
import faulthandler
import importlib.abc
import os
import runpy
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from types import ModuleType, TracebackType

from unisono.checkpoint.folder import RunFolder
from unisono.errors import FIRST_SIGNAL, PREEMPTED
from unisono.host.process import OF_THIS_PROCESS, end_with_parent, write_stacks_on_signal
from unisono.launch.failure import Failure, dismissal_in, note_end, says_all
from unisono.launch.settings import Script
from unisono.launch.terminal import WorkerName
from unisono.membership.environment import device_name

failures: list[int] = []
"""The exit code, once the script has failed."""

ends: list[tuple[int, int]] = []
"""This process and its exit code, once the script has ended in another way."""

LINGER_S = 1.0
"""How long a worker whose script failed may take to clean up, since the other workers wait for its end."""


def main() -> None:
    """Run the script that the arguments name."""
    end_with_launcher()
    keep_from_children(os.environ.get("UNISONO_STORE_FD"))
    # A launcher in the background of a shell script has Ctrl-C ignored, and its workers would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable()
    if "UNISONO_WORKER" in os.environ:
        write_stacks_on_signal()
    script = Script.from_argv(sys.argv[1:])
    OF_THIS_PROCESS.is_told = True
    try:
        run_to_end(script)
    except SystemExit as error:
        ends.append((os.getpid(), code_of(error)))
        if code_of(error) not in (0, PREEMPTED):  # before its exit handlers, which may take long while others wait
            note()
        raise
    except KeyboardInterrupt as error:
        print(f"KeyboardInterrupt{_place(error)}", file=sys.stderr)  # noqa: T201
        sys.exit(FIRST_SIGNAL + signal.SIGINT)
    except BaseException as error:  # noqa: BLE001 (reported, recorded, and turned into the exit code)
        if (dismissed := dismissal_in(error)) is not None:
            text = "".join(traceback.format_exception_only(error)).strip()
            print(f"unisono: left ({dismissed.reason}); the script answered that with {text}", file=sys.stderr)  # noqa: T201
            ends.append((os.getpid(), code_of(dismissed)))
            sys.exit(dismissed.code)
        fail(error)
    else:
        ends.append((os.getpid(), 0))


def end_with_launcher() -> None:
    """Have the kernel end this process with its launcher, if a launcher started it; without Linux the guard does it."""
    if launcher := os.environ.get("UNISONO_LAUNCHER_PID"):
        end_with_parent(int(launcher))


def keep_from_children(descriptor: str | None) -> None:
    """Keep the socket at which the workers meet from the programs that the script starts."""
    if descriptor is not None:
        os.set_inheritable(int(descriptor), False)


def run_to_end(script: Script) -> None:
    """Run a script, and note when it has ended well."""
    try:
        run(script)
    except SystemExit as error:
        if code_of(error) == 0:
            OF_THIS_PROCESS.reached()
        raise
    OF_THIS_PROCESS.reached()


def run(script: Script) -> None:
    """Run a script or a module as ``__main__``, with the arguments and the path that Python would give it."""
    on_path = not os.environ.get("PYTHONSAFEPATH")
    sys.argv = [script.target, *script.args]
    if script.is_module:
        if on_path:
            sys.path.insert(0, os.getcwd())  # noqa: PTH109
        runpy.run_module(script.target, run_name="__main__", alter_sys=True)
    elif Path(script.target).is_file() and not _is_archive(script.target):
        if on_path:
            sys.path.insert(0, str(Path(script.target).resolve().parent))
        _run_file(script.target)
    else:
        runpy.run_path(os.path.abspath(script.target), run_name="__main__")  # noqa: PTH100


class _Source(importlib.abc.SourceLoader):
    """Loads one file as it is. No bytecode is kept, as for any main program."""

    def __init__(self, path: str) -> None:
        self.path = path

    def get_filename(self, fullname: str) -> str:
        return self.path

    def get_data(self, path: str | bytes) -> bytes:
        return Path(os.fsdecode(path)).read_bytes()


def _run_file(target: str) -> None:
    # Not runpy, which removes __main__ after the last line, while threads and exit handlers still need it.
    path = os.path.join(os.getcwd(), target)  # noqa: PTH109, PTH118 (Python tidies nothing here)
    main_module = ModuleType("__main__")
    loader = _Source(path)
    vars(main_module).update(__file__=path, __cached__=None, __loader__=loader, __builtins__=__builtins__)
    sys.modules["__main__"] = main_module
    loader.exec_module(main_module)


def _is_archive(target: str) -> bool:
    with Path(target).open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def fail(error: BaseException) -> None:
    """Print and record the exception that ended the script, and exit with its code: 1 for most."""
    error.__traceback__ = users_part(error.__traceback__)
    failure = Failure.of(error, _name())
    if failure.consequence:
        print(f"{failure.type}: {failure.message}", file=sys.stderr)  # noqa: T201
    elif says_all(error):
        print(failure.traceback, end="", file=sys.stderr)  # noqa: T201
    else:
        sys.excepthook(type(error), error, error.__traceback__)
    run_dir = os.environ.get("UNISONO_RUN_DIR")
    if run_dir:
        try:
            failure.write(RunFolder(run_dir))
        except OSError as problem:
            print(f"unisono: the failure could not be recorded in {run_dir}: {problem}", file=sys.stderr)  # noqa: T201
    failures.append(failure.exit_code)
    faulthandler.dump_traceback_later(LINGER_S, exit=True)  # the stacks say what takes long
    sys.exit(failures[0])


def code_of(error: SystemExit) -> int:
    """The exit code of a script that ends with this exception, as Python decides it."""
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def leave() -> None:
    """Note how the script has ended. After a failure, exit at once: with torch loaded that saves a second."""
    note()
    if failures:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # it is closed, or its reader is gone
                stream.flush()
        os._exit(failures[0])


def note() -> None:
    """Write the script's exit code into the run folder, once."""
    run_dir = os.environ.get("UNISONO_RUN_DIR")
    if run_dir and ends and ends[0][0] == os.getpid():  # not in what the script has forked
        with suppress(OSError):  # the launcher then takes the exit code of the process
            note_end(RunFolder(run_dir), _name(), ends.pop()[1])


atexit.register(leave)  # the first handler runs last, after those that the script registers


def _name() -> WorkerName:
    rank = int(os.environ.get("UNISONO_RANK", "0"))
    worker = os.environ.get("UNISONO_WORKER")
    return device_name(worker, rank) if worker else rank


def users_part(frames: TracebackType | None) -> TracebackType | None:
    """A traceback without the outer frames of Python and of this file."""
    while frames is not None and _is_ours(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return frames


def _is_ours(filename: str) -> bool:
    return filename in (__file__, runpy.__file__) or filename.startswith("<frozen ")


def _place(error: BaseException) -> str:
    """The line of the script that was interrupted, and the innermost line that it had called."""
    frames = traceback.extract_tb(users_part(error.__traceback__))
    script = [frame for frame in frames if frame.filename == frames[0].filename]
    places = dict.fromkeys(f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in (*script[-1:], *frames[-1:]))
    return f" at {', '.join(places)}" if places else ""


if __name__ == "__main__":
    main()
