"""Float16 in guests, by their own settings: any number of workers skips the same steps, and all else goes on alike."""

from __future__ import annotations

import re
from pathlib import Path

import keras  # noqa: F401 (it sets a variable of the environment, which is no test's)
import lightning  # noqa: F401 (likewise)
import pytest
from transformers import Trainer  # noqa: F401 (loading it takes seconds, which are no test's)

from script_cluster import Cluster, Done, Kill

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]

SCRIPT = Path(__file__).parents[1] / "procs" / "scripts" / "float16_guests.py"
GUESTS = ["keras", "lightning", "transformers", "accelerate"]
ONE = ["lightning", *(pytest.param(guest, marks=pytest.mark.slow) for guest in GUESTS if guest != "lightning")]
STEPS = 12


def train(folder: Path, workers: int, guest: str, /, **settings: object) -> Done:
    return Cluster(folder)(SCRIPT, workers, shards=5, arguments=[guest], **settings)  # type: ignore[arg-type]


def steps(done: Done) -> list[tuple[int, bool, float, float, float]]:
    """Of each step: its number as the guest counts, whether it was made, the scale, learning rate and norm after it."""
    found = re.findall(r"step (\d+) changed=(\w+) scale=(\S+) rate=(\S+) norm=(\S+)", done.printed)
    return [(int(step), changed == "True", *map(float, rest)) for step, changed, *rest in found]


@pytest.mark.parametrize("guest", ONE)
def test_any_number_of_workers_skips_the_same_steps(guest: str, tmp_path: Path) -> None:
    serial, *others = (train(tmp_path / str(workers), workers, guest) for workers in (1, 2, 3, 5))
    numbers, made, scales, rates, norms = zip(*steps(serial), strict=True)
    weighs = guest != "keras"  # which goes backward before its losses are weighted, so these are smaller
    first = [False, False, False] if weighs else [True, True, False]
    assert [*made] == first + 3 * [True, True, False]
    assert [*numbers] == [*range(1, STEPS + 1)]
    for number in range(1, STEPS):
        assert scales[number] == scales[number - 1] / (1 if made[number] else 2)
        waits = not made[number] and guest != "lightning"  # where schedulers go on
        assert (rates[number] == rates[number - 1]) == waits
    assert max(norms) < 2
    for other in others:
        assert other.outcome == serial.outcome
        assert other.said == serial.said


@pytest.mark.parametrize("guest", ONE)
def test_whoever_is_killed_and_whoever_resumes_has_the_scale_of_the_others(guest: str, tmp_path: Path) -> None:
    serial = train(tmp_path / "serial", 1, guest)
    kills = [Kill(1, 1), Kill(5, 0, 4), Kill(8, 2, 9)]
    folder = tmp_path / "stopped"
    train(tmp_path, 3, guest, folder=folder, UNISONO_STOP_AFTER="5")
    for done in train(tmp_path / "struck", 3, guest, kills=kills), train(tmp_path, 2, guest, folder=folder):
        assert done.outcome == serial.outcome
        assert done.said[0] == serial.said[0]  # what has come of it in the end
