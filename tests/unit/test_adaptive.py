"""Policies decide the same, at the same steps, on any number of workers and whatever happens to them."""

from pathlib import Path

import pytest

from script_cluster import Cluster, Done, Kill
from unisono.errors import PolicyError

pytestmark = pytest.mark.cluster

SHARDS = 8
EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT, ADA_SCALE = EXAMPLES / "adaptive.py", EXAMPLES / "ada_scale.py"
SHORT = {SCRIPT: ("--epochs", "6"), ADA_SCALE: ("--iterations", "150")}
KILLS = {
    SCRIPT: [Kill(12, 0), Kill(35, 1, 3), Kill(41, 0, 5), Kill(60, 2, 5), Kill(80, 0, 20), Kill(103, 1, 2)],
    ADA_SCALE: [Kill(6, 0), Kill(14, 1, 3), Kill(22, 0, 2)],
}
"""One where workers have come because a policy has asked for them.

None just when the main worker has counted a step: what it has decided then is carried out, and not in the journal.
"""


def train(folder: Path, script: Path, workers: int | tuple[int, int], *kills: Kill) -> Done:
    return Cluster(folder)(script, workers, shards=SHARDS, arguments=SHORT[script], kills=kills)


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Done]:
    return {script: train(tmp_path_factory.mktemp(script.stem), script, 1) for script in SHORT}


def test_alone_the_policies_decide_all_that_they_may(serial: dict[Path, Done]) -> None:
    assert {verb for _, _, verb, _, _ in serial[SCRIPT].decided} == {"set_batch_size", "set_learning_rate", "resize"}
    rates = [value for _, _, verb, value, _ in serial[ADA_SCALE].decided if verb == "set_learning_rate"]
    assert len(set(rates)) > 10
    assert serial[ADA_SCALE].decided[-1][2] == "stop"


@pytest.mark.parametrize("script", SHORT, ids=lambda script: script.stem)
def test_decisions_and_weights_are_the_same_on_three_workers(
    script: Path, serial: dict[Path, Done], tmp_path: Path
) -> None:
    assert train(tmp_path, script, 3).outcome == serial[script].outcome


@pytest.mark.parametrize("script", SHORT, ids=lambda script: script.stem)
def test_decisions_and_weights_are_the_same_while_workers_come_and_die(
    script: Path, serial: dict[Path, Done], tmp_path: Path
) -> None:
    done = train(tmp_path, script, (2, 4), *KILLS[script])
    assert done.outcome == serial[script].outcome
    assert done.world.struck == len(KILLS[script])
    assert len({len(names) for names in done.world.formed}) > 1


LOCAL = """
import torch
from torch import nn

import unisono


class ByRank(unisono.Policy):
    def after_step(self, view):
        if view.step == 3:
            DECIDE


run = unisono.init(batch_size=16, shards=4, policies=[ByRank()])
model = nn.Linear(4, 2)
run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
data = torch.utils.data.TensorDataset(torch.randn(256, 4, generator=torch.Generator().manual_seed(0)))
for step in run.steps(data, epochs=2):
    step.run(lambda model, batch: model(batch[0]).square().mean())
run.finish()
"""


@pytest.mark.parametrize(
    ("verb", "first", "second"),
    [
        (
            "self.set_batch_size(32 if run.rank == 0 else 64)",
            "by-rank: set_batch_size(32)",
            "by-rank: set_batch_size(64)",
        ),
        ("if run.rank == 0: self.set_topology('auto')", "by-rank: set_topology(auto)", "nothing"),
        ("if run.rank == 0: self.measure_links()", "by-rank: measure_links()", "nothing"),
    ],
)
def test_a_policy_that_decides_differently_on_two_workers_is_caught_and_named(
    verb: str, first: str, second: str, tmp_path: Path
) -> None:
    script = tmp_path / "local.py"
    script.write_text(LOCAL.replace("DECIDE", verb))
    with pytest.raises(PolicyError, match="the policies decided differently before step 3") as caught:
        Cluster(tmp_path)(script, 2, shards=4)
    assert f"rank 0: {first}" in str(caught.value)
    assert f"rank 1: {second}" in str(caught.value)
