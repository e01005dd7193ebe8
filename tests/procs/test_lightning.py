"""Lightning by its other package, in a process that is asked to leave. Workers that are killed: ``test_guests.py``."""

from pathlib import Path

import pytest

from commands import python

pytestmark = [
    pytest.mark.procs,
    pytest.mark.timeout(240),
    pytest.mark.slow,
]  # in a process, with a signal and both packages; the suite leaves in a unit test

LEAVES = """
import os, signal, sys
import torch, unisono
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import Callback
from torch.utils.data import DataLoader, TensorDataset

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

class Asked(Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 3 and "leave" in sys.argv:
            os.kill(os.getpid(), signal.SIGTERM)

quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
strategy = unisono.lightning.Strategy(shards=2, run_dir="run")
trainer = Trainer(strategy=strategy, accelerator="cpu", max_epochs=2, callbacks=[Asked()], **quiet)
trainer.fit(Module(), DataLoader(TensorDataset(torch.arange(24.0).view(12, 2)), batch_size=4))
print("steps:", trainer.global_step)
"""


def test_a_job_that_is_asked_to_leave_leaves_a_checkpoint_and_goes_on_when_it_is_started_again(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LEAVES)
    left = python("-W", "ignore", "train.py", "leave", cwd=tmp_path)
    assert left.returncode == 75, left.stderr
    again = python("-W", "ignore", "train.py", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "steps: 6" in again.stdout
    assert '"event": "resumed"' in (tmp_path / "run" / "journal.jsonl").read_text()
