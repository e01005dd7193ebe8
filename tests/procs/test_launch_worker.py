"""A script under `unisono run` sees what it would see under `python`."""

import os
import subprocess
from pathlib import Path

import pytest

from commands import python

pytestmark = pytest.mark.procs

LOOK = """
import os, sys, __main__
print(sys.argv)
print(sys.path[0])
print(len(sys.path))
print(__name__, __file__, __package__, __spec__ and __spec__.name, __doc__)
print(__main__ is sys.modules["__main__"], __main__.__dict__ is globals())
print("torch" in sys.modules)
from neighbour import word
print(word)
"""


def lay_out(folder: Path) -> None:
    app = folder / "app"
    app.mkdir()
    for name in ("train.py", "__main__.py"):
        (app / name).write_text(LOOK)
    (app / "neighbour.py").write_text("word = 'beside'\n")
    (folder / "neighbour.py").write_text("word = 'in the current folder'\n")
    (folder / "json.py").write_text("raise RuntimeError('a file of the user that hides a standard module')\n")
    (folder / "linked.py").symlink_to("app/train.py")


def unisono(folder: Path, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    # The bootstrap itself, as the launcher starts it.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("UNISONO_")}
    return python("-P", "-u", "-m", "unisono.launch.worker", *args, cwd=folder, env={**environ, **variables})


@pytest.mark.parametrize(
    "args",
    [
        ["app/train.py", "-m", "x", ""],
        ["./app/../app/train.py"],
        ["linked.py"],
        ["-m", "app.train", "--flag"],
        ["-m", "app", "--flag"],
    ],
    ids=" ".join,
)
def test_a_script_sees_what_python_would_show_it(tmp_path: Path, args: list[str]) -> None:
    lay_out(tmp_path)
    assert unisono(tmp_path, *args).stdout == python(*args, cwd=tmp_path).stdout


def test_a_folder_with_a_main_is_run_as_python_would_save_that_its_path_is_whole(tmp_path: Path) -> None:
    lay_out(tmp_path)
    assert unisono(tmp_path, "app").stdout == python(tmp_path / "app", cwd=tmp_path).stdout


@pytest.mark.parametrize(
    "body",
    [
        "def f():\n    1 / 0\nf()",
        "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise RuntimeError('two') from e",
        "x = (",
        "import nonexistent_module",
        "# -*- coding: latin-1 -*-\nraise ValueError('\\xe9')",
        "import atexit\natexit.register(print, 'at exit', end='')\n1 / 0",
        "import sys\nsys.exit('words')",
        "import sys\nsys.exit(7)",
        "import sys\nsys.excepthook = lambda *a: print('own hook', a[0].__name__, a[2].tb_lineno)\n1 / 0",
        "import atexit, threading\natexit.register(print, 'at exit')\n"
        "threading.Thread(target=lambda: print('thread', __name__)).start()",
    ],
)
def test_a_script_ends_as_under_python(tmp_path: Path, body: str) -> None:
    (tmp_path / "train.py").write_bytes(body.encode("latin-1"))
    plain = python("train.py", cwd=tmp_path)
    ours = unisono(tmp_path, "train.py")
    assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr)
    assert not (tmp_path / "__pycache__").exists()


SPAWNS = """
import multiprocessing
def double(x):
    return 2 * x
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [1, 2]))
        pool.close()
        pool.join()
"""


def test_processes_that_a_script_spawns_find_its_functions(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SPAWNS)
    done = unisono(tmp_path, "train.py")
    assert (done.stdout, done.stderr) == ("[2, 4]\n", "")


def test_a_worker_whose_launcher_is_gone_already_does_not_begin(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('began')")
    done = unisono(tmp_path, "train.py", UNISONO_LAUNCHER_PID="999999999")
    assert (done.returncode, done.stdout) == (-9, "")


def test_a_failure_that_cannot_be_recorded_is_still_told(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise ValueError('boom')")
    (tmp_path / "file").write_text("")
    done = unisono(tmp_path, "train.py", UNISONO_RANK="0", UNISONO_RUN_DIR=str(tmp_path / "file"))
    assert done.returncode == 1
    assert "ValueError: boom" in done.stderr
    assert "could not be recorded" in done.stderr


@pytest.mark.parametrize(
    ("answer", "said"),
    [("raise", ""), ("raise RuntimeError('training failed') from error", "RuntimeError: training failed")],
    ids=["lets it go", "turns it into an error"],
)
def test_a_dismissed_worker_ends_with_code_0_and_without_a_traceback(answer: str, said: str, tmp_path: Path) -> None:
    dismissed = "try:\n    raise Dismissed('the job goes on with 1 workers')\nexcept BaseException as error:\n    "
    (tmp_path / "train.py").write_text(f"from unisono.errors import Dismissed\n{dismissed}{answer}")
    done = unisono(tmp_path, "train.py")
    assert (done.returncode, done.stdout) == (0, "")
    assert "Traceback" not in done.stderr
    assert said in done.stderr
