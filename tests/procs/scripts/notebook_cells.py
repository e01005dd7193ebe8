"""A notebook, executed from its first cell to its last; or a kernel whose cells are interrupted, and which is killed.

    notebook_cells.py execute NOTEBOOK FOLDER        prints what its cells show
    notebook_cells.py interrupt FOLDER               prints what was seen, as JSON

In a process of its own: the clients of kernels keep sockets and threads.
"""

import json
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import nbformat
import psutil
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

PATIENCE_S = 100.0

SLOW = """
import unisono

def train(steps, pace_s):
    import time

    import torch
    from torch import nn

    import unisono

    run = unisono.init(batch_size=8, shards=2, seed=0)
    data = torch.utils.data.TensorDataset(torch.randn(8 * 50, 4, generator=torch.Generator().manual_seed(0)))
    model = nn.Linear(4, 1)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for step in run.steps(data, epochs=steps):
        step.run(lambda model, batch: model(batch[0]).square().mean())
        time.sleep(pace_s)
    run.finish(model)
"""

LACKING = "limit = 3\ndef train():\n    return limit\nunisono.notebook.run(train)"
TIMED = "%%time\ndef train():\n    raise RuntimeError('no luck')"
FAILING = "unisono.notebook.run(train)"


def execute(path: str, folder: str) -> None:
    """Execute a notebook, and print what its cells show."""
    notebook: Any = nbformat.read(path, 4)  # type: ignore[no-untyped-call]
    NotebookClient(notebook, timeout=int(PATIENCE_S), resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            print(output.get("text") or output.get("data", {}).get("text/plain", ""))


class Kernel:
    """A kernel in a folder, and what its cells show."""

    def __init__(self, folder: Path) -> None:
        self.manager = KernelManager()
        self.manager.start_kernel(cwd=str(folder))
        self.client: BlockingKernelClient = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE_S)
        self._asked = ""

    def execute(self, code: str) -> dict[str, Any]:
        """Execute a cell to its end, whatever became of the one before; returns its reply."""
        self._asked = self.client.execute(code, stop_on_error=False)  # else the next one may be aborted, too
        return self.reply()

    def begin(self, code: str, is_enough: Callable[[str], bool]) -> None:
        """Execute a cell until something that it shows is enough."""
        self._asked = self.client.execute(code)
        while True:
            told = self.client.get_iopub_msg(timeout=PATIENCE_S)
            is_ours = told["parent_header"].get("msg_id") == self._asked
            if is_ours and is_enough(told["content"].get("data", {}).get("text/plain", "")):
                return

    def reply(self) -> dict[str, Any]:
        """The reply to the cell that is under way."""
        while True:
            told = self.client.get_shell_msg(timeout=PATIENCE_S)
            if told["parent_header"].get("msg_id") == self._asked:  # others are about the kernel
                return dict(told["content"])

    def close(self) -> None:
        self.client.stop_channels()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel(now=True)


def processes_of(run_dir: Path) -> list[str]:
    """Those of a job that still run: its launcher, workers and coordinator name its folder."""
    found = []
    for one in psutil.process_iter():
        with suppress(psutil.Error):
            words = " ".join(one.cmdline())
            is_alive = one.status() != psutil.STATUS_ZOMBIE and one.pid != psutil.Process().pid
            named = str(run_dir) in words or one.environ().get("UNISONO_RUN_DIR") == str(run_dir)
            if is_alive and named and "ipykernel" not in words:
                found.append(words)
    return found


def newest_step(run_dir: Path) -> int:
    """The last one in ``metrics.jsonl``."""
    return int(json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])["step"])


def interrupt(folder: str) -> None:
    """Interrupt a cell, go on, and kill the kernel; print what was seen meanwhile."""
    run_dir, seen = Path(folder) / "run", dict[str, Any]()
    job = f"unisono.notebook.run(train, {{'steps': 40, 'pace_s': 0.05}}, workers=(1, 2), run_dir={str(run_dir)!r})"
    with closing(Kernel(Path(folder))) as kernel:
        kernel.execute(SLOW)
        kernel.begin(job, lambda text: "\nstep " in text)
        seen["while it trains"] = len(processes_of(run_dir))
        kernel.manager.interrupt_kernel()
        seen["interrupted"] = kernel.reply()["ename"]
        seen["after the interrupt"] = processes_of(run_dir)
        seen["checkpoints"] = [path.name for path in (run_dir / "checkpoints").glob("step-*")]
        left_after = newest_step(run_dir)
        seen["lacking"] = kernel.execute(LACKING)
        kernel.execute(TIMED)
        seen["failing"] = kernel.execute(FAILING)
        kernel.execute(SLOW)
        kernel.begin(job, lambda text: f"\nstep {left_after + 1}" in text or f"\nstep {left_after + 2}" in text)
        kernel.manager.shutdown_kernel(now=True)
        begun = time.monotonic()
        while (left := processes_of(run_dir)) and time.monotonic() - begun < PATIENCE_S:
            time.sleep(0.05)
        seen["after the kill"] = left
    print(json.dumps(seen))


if __name__ == "__main__":
    if sys.argv[1] == "execute":
        execute(*sys.argv[2:4])
    else:
        interrupt(sys.argv[2])
