"""Checkpoints and the end of the process that writes them: whatever the moment, a whole one is left."""

import os
import subprocess
from pathlib import Path

import pytest

from commands import python
from same_trees import same
from unisono.checkpoint.snapshot import read_snapshot

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240)]

TESTS = Path(__file__).parents[1]

WRITER = """
import os
import signal
import sys
from itertools import count
from pathlib import Path

import torch

from same_trees import same
from unisono.checkpoint.snapshot import read_snapshot
from unisono.checkpoint.snapshot import Snapshot
from unisono.checkpoint.checkpoint_store import CheckpointStore

torch.set_num_threads(1)
KEEP = 2


def content(step, attempt, size):
    generator = torch.Generator().manual_seed(2 * step + attempt)
    weight = torch.randn(size, generator=generator)
    return Snapshot(step, {"weight": weight}, [{"state": {0: {"momentum": -weight}}}], {"attempt": attempt})


def write(store, first, last, size, done):
    # Each step twice, as a run does whose last step is due for a checkpoint and ends it as well.
    for step in range(first, last):
        for attempt in (0, 1):
            store.save(content(step, attempt, size))
            store.wait()
            os.write(done, b"%d %d\\n" % (step, attempt))


def forked(child):
    \"\"\"A process that runs ``child`` with the writing end of a pipe; its number and the reading end.\"\"\"
    reading, writing = os.pipe()
    number = os.fork()
    if number == 0:
        os.close(reading)
        child(writing)
        os._exit(0)
    os.close(writing)
    return number, reading


def last_line(reading):
    data = b""
    while piece := os.read(reading, 2**16):
        data += piece
    os.close(reading)
    lines = data.decode().splitlines()
    return tuple(map(int, lines[-1].split())) if lines else (0, 0)


def check(folder, done, size):
    \"\"\"The newest is what its step saved, and no older than what was said to be done; all are whole.\"\"\"
    store = CheckpointStore(folder, keep=KEEP)
    found = store.newest()
    store.close()
    left = [path.name for path in folder.glob(".*")]
    assert not left, f"left behind: {left}"
    reached = (found.step, found.state["attempt"]) if found else (0, 0)
    assert reached >= done, f"{done} was done, and {reached} is all there is"
    assert found is None or same(vars(found), vars(content(*reached, size)))
    for path in folder.glob("step-*"):
        read_snapshot(path)


CHANGES, REMOVALS = {"open", "os.mkdir", "os.rename"}, {"os.remove", "os.rmdir"}


def killed_before(moment, folder):
    \"\"\"Have this process killed before its n-th operation on a file of the folder.\"\"\"
    operations = count(1)

    def watch(event, arguments):
        ours = event in REMOVALS or (event in CHANGES and str(folder) in str(arguments[0]))
        if ours and next(operations) == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def train(moment, folder, done):
    store = CheckpointStore(folder, keep=KEEP)
    killed_before(moment, folder)
    write(store, 1, 4, 8, done)
    store.close()


for moment in count(1):
    folder = Path(sys.argv[1], str(moment))
    number, reading = forked(lambda done: train(moment, folder, done))
    done = last_line(reading)
    _, status = os.waitpid(number, 0)
    check(folder, done, 8)
    if not os.WIFSIGNALED(status):
        assert done == (3, 1) and os.WEXITSTATUS(status) == 0, (done, status)
        break
print(moment - 1)
"""


def run_python(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return python("-c", script, *arguments, PYTHONPATH=path)


def test_whenever_the_writer_is_killed_the_newest_whole_checkpoint_is_what_its_step_saved(tmp_path: Path) -> None:
    done = run_python(WRITER, tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 80


TRAIN = """
import resource
import sys

import torch
import unisono
from torch import nn

full = int(sys.argv[2])  # from this step on the disk is
run = unisono.init(batch_size=32, seed=0, run_dir=sys.argv[1], checkpoints={"every": 2, "keep": 5})
model = nn.Linear(8, 1)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
dataset = torch.utils.data.TensorDataset(torch.randn(320, 8), torch.randn(320, 1))
for step in run.steps(dataset, epochs=1):
    if step.number == full:
        run.inside.checkpoints.store.wait()  # what was begun before has the room of then
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    step.run(lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]))
run.finish(model)
"""


@pytest.mark.slow
def test_a_disk_that_stays_full_costs_neither_the_weights_nor_the_checkpoint_before(tmp_path: Path) -> None:
    full, free = tmp_path / "full", tmp_path / "free"
    done, undisturbed = run_python(TRAIN, full, "3"), run_python(TRAIN, free, "99")
    assert (done.returncode, undisturbed.returncode) == (0, 0), done.stderr + undisturbed.stderr
    assert done.stdout.splitlines()[-1] == undisturbed.stdout.splitlines()[-1]
    assert "the checkpoint of step 10 could not be written" in done.stderr
    assert [path.name for path in (full / "checkpoints").iterdir()] == ["step-00000002"]
    ours, theirs = (read_snapshot(folder / "checkpoints" / "step-00000002") for folder in (full, free))
    assert same([ours.model, ours.optimizer], [theirs.model, theirs.optimizer])


MEMORY = """
import sys
from pathlib import Path

import torch

from unisono.checkpoint.snapshot import Snapshot
from unisono.checkpoint.checkpoint_store import CheckpointStore


def most():
    # getrusage knows it too, but starts from what the parent had.
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


model = {str(number): torch.ones(2**19) for number in range(24)}
optimizer = {number: torch.ones(2**19) for number in range(24)}
size, before = 2 * 24 * 2**21, most()
store = CheckpointStore(Path(sys.argv[1]))
store.save(Snapshot(1, model, optimizer, {}))
store.close()
print((most() - before) / size)
"""


@pytest.mark.slow
def test_saving_holds_one_copy_of_the_state_and_no_more(tmp_path: Path) -> None:
    done = run_python(MEMORY, tmp_path)
    assert done.returncode == 0, done.stderr
    assert 0.75 < float(done.stdout) < 1.25
