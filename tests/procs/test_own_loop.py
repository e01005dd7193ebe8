"""Scripts that begin a run, and then train by themselves."""

from pathlib import Path

import pytest

from outcomes import train

pytestmark = [pytest.mark.procs, pytest.mark.timeout(120), pytest.mark.usefixtures("warm")]

SCRIPT = Path(__file__).parent / "scripts" / "own_loop.py"


@pytest.mark.parametrize(
    ("how", "words"), [("prepare", "SGD.step() is called by the script"), ("", "this run ends without run.prepare")]
)
def test_several_workers_that_each_train_alone_are_told_of_once(how: str, words: str, tmp_path: Path) -> None:
    done = train(tmp_path / "run", "-n", "3", script=SCRIPT, arguments=(how,))
    assert (done.stdout + done.stderr).count(words) == 1, done.stderr
    assert "each of the 3 workers" in done.stdout + done.stderr


@pytest.mark.slow
def test_one_worker_may_train_as_it_likes(tmp_path: Path) -> None:
    done = train(tmp_path / "run", "-n", "1", script=SCRIPT, arguments=("prepare",))
    assert (done.returncode, "UnisonoWarning" in done.stdout + done.stderr) == (0, False)
