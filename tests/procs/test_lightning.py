"""Lightning in real processes: the main worker is killed, a job is asked to leave, either package is the script's."""

import subprocess
import sys
from pathlib import Path

import pytest

from outcomes import outcome, outcome_in, train
from serial_runs import SerialRuns

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240)]

SCRIPT = Path(__file__).parent / "scripts" / "lightning_training.py"


@pytest.mark.slow  # the suite kills workers that are threads
@pytest.mark.usefixtures("warm", "serial_launches")
def test_weights_are_the_same_in_processes_of_which_one_is_killed(serial_runs: SerialRuns, tmp_path: Path) -> None:
    faults = tmp_path / "faults.toml"
    faults.write_text("[[fault]]\nkind = 'kill'\nrank = 0\nat_step = 9\n")
    done = train(tmp_path / "run", "-n", "2", "--max-restarts", "3", "--faults", str(faults), script=SCRIPT)
    serial = serial_runs(SCRIPT).run_dir
    assert outcome(tmp_path / "run", done) == outcome_in(serial)
    assert '"event": "lost"' in (tmp_path / "run" / "journal.jsonl").read_text()
    rows = Path("rows") / "version_0" / "metrics.csv"
    assert (tmp_path / "run" / rows).read_text() == (serial / rows).read_text()


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


@pytest.mark.slow  # in a process, with a signal and both packages; the suite leaves in a unit test
def test_a_job_that_is_asked_to_leave_leaves_a_checkpoint_and_goes_on_when_it_is_started_again(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LEAVES)
    command = [sys.executable, "-W", "ignore", "train.py"]
    left = subprocess.run([*command, "leave"], cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert left.returncode == 75, left.stderr
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert again.returncode == 0, again.stderr
    assert "steps: 6" in again.stdout
    assert '"event": "resumed"' in (tmp_path / "run" / "journal.jsonl").read_text()
