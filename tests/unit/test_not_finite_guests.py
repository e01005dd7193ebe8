"""A gradient that is NaN, though the loss is finite, in guests: nothing is updated from it."""

from __future__ import annotations

import re
from pathlib import Path

import keras  # noqa: F401 (it sets a variable of the environment, which is no test's)
import lightning  # noqa: F401 (likewise)
import pytest
from transformers import Trainer  # noqa: F401 (loading it takes seconds, which are no test's)

from script_cluster import Cluster, Done

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]

SCRIPT = Path(__file__).parents[1] / "procs" / "scripts" / "not_finite_guests.py"
NAMES = {
    "keras": "_torch_params.body/kernel",
    "lightning": "net.body.weight",
    "transformers": "body.weight",
    "accelerate": "body.weight",
}


def train(folder: Path, workers: int, guest: str, on_nan: str) -> Done:
    return Cluster(folder)(SCRIPT, workers, shards=4, arguments=[guest, on_nan])


def steps(done: Done) -> list[tuple[str, str]]:
    """Of each step: whether the weights are finite then, and whether they have changed."""
    return re.findall(r"step \d+ is_finite=(\w+) changed=(\w+)", done.printed)


@pytest.mark.parametrize("guest", NAMES)
def test_a_step_is_skipped_and_counted_alike_on_any_number_of_workers(guest: str, tmp_path: Path) -> None:
    serial, both = (train(tmp_path / str(workers), workers, guest, "skip") for workers in (1, 2))
    for done in (serial, both):
        assert steps(done) == [("True", "False" if number in (1, 4) else "True") for number in range(6)]
        why = f"the gradient of {NAMES[guest]} is nan in shard 1 (rank 0)"
        assert [(line["step"], line["why"]) for line in done.journal("skipped")] == [(1, why), (4, why)]
    assert both.outcome == serial.outcome


@pytest.mark.parametrize("guest", NAMES)
def test_it_stops_the_job_and_names_step_parameter_and_shard(guest: str, tmp_path: Path) -> None:
    done = train(tmp_path, 2, guest, "stop")
    assert steps(done) == [("True", "True")]
    told = f"the gradient of {NAMES[guest]} is nan in shard 1 (rank 0); nothing was updated"
    assert f"after is_finite=True changed=False step 1: {told}" in done.printed
