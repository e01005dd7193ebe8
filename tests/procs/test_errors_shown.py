"""The terminal shows the script's own lines of an error, and one of Unisono's for each call of it."""

import re
from pathlib import Path

import pytest

from commands import python
from unisono.host.tracebacks import OURS

pytestmark = pytest.mark.procs

BEGIN = """
import torch, unisono
from torch import nn
from torch.utils.data import TensorDataset
run = unisono.init(batch_size=16, shards=4, seed=1)
model = nn.Linear(4, 4)
run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-6))
def loss_fn(model, batch):
    BODY
for step in run.steps(TensorDataset(torch.ones(64, 4))):
    step.run(loss_fn)
"""

COMMAND = ["-m", "unisono", "run", "-n", "1", "--run-dir", "run"]

ERRORS = {
    "of the script": ("return model(batch[0]).nothing()", "AttributeError: 'Tensor' object has no attribute 'nothing'"),
    "of torch": ("return model(batch[0][:, :3]).mean()", "RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
    "refused": ("return 'loss'", "LossError: step 0, shard 0, rank 0: the loss function returned a str"),
}


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        pytest.param([], "of the script", marks=pytest.mark.slow),
        pytest.param(COMMAND, "of torch", marks=pytest.mark.slow),
        (COMMAND, "refused"),
    ],
    ids=ERRORS,
)
def test_an_error_shows_the_scripts_lines_and_one_of_ours_and_says_where_all_are(
    command: list[str], kind: str, tmp_path: Path
) -> None:
    body, message = ERRORS[kind]
    (tmp_path / "train.py").write_text(BEGIN.replace("BODY", body))
    done = python(*command, "train.py", cwd=tmp_path)
    assert done.returncode == 1
    shown, _, _ = done.stderr.partition("failed (exit code")
    frames = re.findall(r'File "(.*?)", line \d+, in', shown)
    assert sum(frame.startswith(OURS) for frame in frames) == 1, shown
    assert any(frame.endswith("train.py") for frame in frames)
    assert message in shown
    [path] = re.findall(r"the whole traceback is in (.*)", shown)
    whole = Path(path).read_text()
    assert message in whole
    assert len([frame for frame in re.findall(r'File "(.*?)"', whole) if frame.startswith(OURS)]) > 5
