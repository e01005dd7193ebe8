"""`unisono curvature` on the checkpoints of a small job: figures of its loss, the same on any number of workers."""

import json
from pathlib import Path

import pytest

from commands import completed

pytestmark = [pytest.mark.procs, pytest.mark.slow, pytest.mark.usefixtures("warm")]

SCRIPT = """
    import torch, unisono
    from torch import nn

    run = unisono.init(batch_size=20, shards=5, seed=0, checkpoints={"every": 2})
    inputs = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))
    run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for step in run.steps(torch.utils.data.TensorDataset(inputs, inputs.sum(1)), epochs=1):
        step.run(lambda model, batch: nn.functional.mse_loss(model(batch[0])[:, 0], batch[1]))
    run.finish()
"""


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """The folder of a run, beside its script."""
    lines = SCRIPT.splitlines()
    (tmp_path / "train.py").write_text("\n".join(line.removeprefix("    ") for line in lines))
    ended = completed("run", "-n", 2, "--run-dir", "run", "train.py", timeout=60, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    return tmp_path / "run"


def test_figures_of_a_checkpoint_are_the_same_on_any_number_of_workers(trained: Path) -> None:
    files = sorted(path.name for path in trained.iterdir())
    found = {}
    for workers in (1, 2, 3, 5):
        ended = completed(
            "curvature", "-n", workers, "--samples", 4, "--json", "run", "train.py", timeout=60, cwd=trained.parent
        )
        assert ended.returncode == 0, ended.stderr
        found[workers] = ended.stdout
    assert len(set(found.values())) == 1
    figures = json.loads(found[1])
    assert figures["step"] == 5
    assert figures["samples"] == 20
    assert 0 <= figures["residual"] < 0.1 * figures["largest"]
    assert figures["trace"] > figures["largest"] > 0
    assert figures["critical_sharpness"] > 0
    assert sorted(path.name for path in trained.iterdir()) == sorted([*files, "curvature-step-00000005.json"])
    assert json.loads((trained / "curvature-step-00000005.json").read_text()) == figures


def test_more_batches_are_more_samples_and_an_older_checkpoint_has_another_loss(trained: Path) -> None:
    options = ("--step", 2, "--batches", 3, "--samples", 2)
    ended = completed("curvature", *options, "run", "train.py", timeout=60, cwd=trained.parent)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("after 2 steps, over 60 samples: loss ")
    assert "standard error" in ended.stdout


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import unisono\nunisono.init(batch_size=20, shards=5)", "did not call step.run"),
        (SCRIPT.replace("    ", "").replace("8", "9"), "holds another model"),
    ],
)
def test_a_script_that_does_not_fit_is_told(text: str, words: str, trained: Path) -> None:
    (trained.parent / "other.py").write_text(text.replace("step.run(", "    step.run(") if "for step" in text else text)
    ended = completed("curvature", "run", "other.py", timeout=60, cwd=trained.parent)
    assert ended.returncode == 1
    assert words in " ".join(ended.stderr.split())
