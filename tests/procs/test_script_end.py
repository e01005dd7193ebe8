"""What is to be done at the end of a script is done when it has ended well, and only then."""

import subprocess
from pathlib import Path

import pytest

from commands import python

pytestmark = pytest.mark.procs

BEGIN = """
import atexit, sys
from unisono.host.process import OF_THIS_PROCESS as END
END.then(lambda: print("done"))
atexit.register(print, "exits")
"""

WELL = ["", "if True:\n    pass", "sys.exit()", "sys.exit(0)", "try:\n    sys.exit(3)\nexcept SystemExit:\n    pass"]
BADLY = ["1 / 0", "raise SystemExit(3)", "sys.exit(3)", "sys.exit('no')", "raise KeyboardInterrupt"]
WAYS = {"python": [], "worker": ["-P", "-m", "unisono.launch.worker"]}


def ended(folder: Path, way: str, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(BEGIN + text)
    return python(*WAYS[way], "script.py", cwd=folder)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("text", WELL)
def test_it_is_done_behind_the_last_line_and_in_an_orderly_exit(tmp_path: Path, way: str, text: str) -> None:
    done = ended(tmp_path, way, text)
    assert (sorted(done.stdout.split()), done.returncode) == (["done", "exits"], 0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("text", BADLY)
def test_it_is_not_done_when_the_script_fails(tmp_path: Path, way: str, text: str) -> None:
    done = ended(tmp_path, way, text)
    assert "done" not in done.stdout
    assert done.returncode != 0


@pytest.mark.parametrize("way", WAYS)
def test_a_script_at_whose_end_it_fails_has_failed(tmp_path: Path, way: str) -> None:
    done = ended(tmp_path, way, "def fail():\n    raise ValueError('in vain')\nEND.then(fail)")
    assert done.returncode == 1
    assert "ValueError: in vain" in done.stderr


def test_what_is_forgotten_is_not_done_and_leaves_nothing_behind(tmp_path: Path) -> None:
    text = (
        "noting = sys.exit\nforget = END.then(lambda: print('too'))\nforget()\nEND.reached()\nprint(noting is sys.exit)"
    )
    done = ended(tmp_path, "python", text)
    assert done.stdout.split() == ["done", "False", "exits"]
