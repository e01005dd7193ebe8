"""Workers that a fork server has forked, and fresh ones to compare them with."""

import asyncio
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from unisono.launch.worker_start import WarmStart, WarmWorker, WorkerRequest

PATIENCE_S = 100.0


class Host:
    """Starts workers of one fork server in a folder."""

    def __init__(self, folder: Path, warm: WarmStart) -> None:
        self.folder, self.warm = folder, warm
        self._number = 0

    async def start(self, *argv: str, **variables: str) -> "Started":
        self._number += 1
        out, err = (self.folder / f"{name}-{self._number}" for name in ("out", "err"))
        with out.open("wb") as writes_out, err.open("wb") as writes_err:
            request = WorkerRequest(argv, variables, str(self.folder))
            worker = await self.warm.start(request, writes_out.fileno(), writes_err.fileno())
        return Started(worker, out, err)

    async def run(self, body: str, *args: str, **variables: str) -> "Ended":
        path = self.folder / f"script-{self._number}.py"
        path.write_text(textwrap.dedent(body))
        return await (await self.start(path.name, *args, **variables)).ended()


class Ended:
    """What a worker has left."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


class Started:
    """A worker that runs."""

    def __init__(self, worker: WarmWorker, out: Path, err: Path) -> None:
        self.worker, self._out, self._err = worker, out, err

    async def wrote(self, words: str) -> None:
        """Until it has written these words."""
        async with asyncio.timeout(PATIENCE_S):
            while words not in self._out.read_text():
                await asyncio.sleep(0.005)

    async def ended(self) -> Ended:
        async with asyncio.timeout(PATIENCE_S):
            code = await self.worker.wait()
        return Ended(code, self._out.read_text(), self._err.read_text())


def environment(**further: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("UNISONO_")}
    return kept | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} | further


def cold(folder: Path, *argv: str, **variables: str) -> Ended:
    done = subprocess.run(
        [sys.executable, "-P", "-u", "-m", "unisono.launch.worker", *argv],
        cwd=folder,
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


OPENS = """
import asyncio, os
from pathlib import Path
from unisono.launch.worker_start import WorkerRequest
from unisono.launch.worker_start import WarmStart

if "SHARED_FORK_SERVERS" in os.environ:
    from forks.starts import replace
    replace()

async def main():
    warm = await WarmStart.open(os.environ, Path("log"))
    worker = await warm.start(WorkerRequest(("wait.py",), {}, os.getcwd()), 1, 2)
    print(warm.pid, worker.pid, flush=True)
    await worker.wait()

asyncio.run(main())
"""
"""What a launcher does: it has a fork server (which a shared one forks, if there is one), and a worker of it."""


@contextmanager
def launcher_and_forks(
    folder: Path, variables: Mapping[str, str]
) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A launcher in a folder, its fork server, and a worker that waits."""
    (folder / "wait.py").write_text("import signal; signal.pause()")
    with subprocess.Popen(
        [sys.executable, "-c", OPENS], cwd=folder, env=variables, stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        forks = [psutil.Process(int(pid)) for pid in launcher.stdout.readline().split()]
        assert len(forks) == 2
        yield launcher, forks


LOOK = """
import os, signal, sys, threading, __main__
print(sys.argv, sys.orig_argv[1:], os.getcwd())
print(sys.path[0], len(sys.path), sys.flags)
print(__name__, __file__, __package__, __spec__ and __spec__.name, __doc__)
print(__main__ is sys.modules["__main__"], __main__.__dict__ is globals())
print(os.getpid() == os.getpgrp() == os.getsid(0), os.environ.get("GREETING"), os.environ["OMP_NUM_THREADS"])
print(sorted(name for name in os.environ if name.startswith("UNISONO_") and name != "UNISONO_LAUNCHER_PID"))
print([signal.getsignal(number) for number in signal.valid_signals()], signal.pthread_sigmask(signal.SIG_BLOCK, []))
print(threading.enumerate(), len(os.listdir("/proc/self/task")))
print(sys.stdin.read(), sys.stdout.isatty(), sys.stdout.encoding, sys.stdout.line_buffering, sys.stdout.write_through)
print(os.readlink("/proc/self/fd/0"), sys.stderr.line_buffering, sys.stderr.errors)
import torch
print(torch.get_num_threads(), torch.get_num_interop_threads(), torch.cuda.is_initialized())
"""
"""Shows a script's surroundings."""


TRAINING = """
import torch, unisono
from torch import nn
run = unisono.init(batch_size=32, seed=3, shards=4)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.BatchNorm1d(16), nn.Linear(16, 4))
optimizer = torch.optim.Adam(model.parameters())
run.prepare(model, optimizer)
generator = torch.Generator().manual_seed(5)
data = torch.utils.data.TensorDataset(
    torch.randn(200, 8, generator=generator), torch.randint(0, 4, (200,), generator=generator)
)
def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
for step in run.steps(data, epochs=3):
    step.run(loss)
run.finish(model)
print("digest", unisono.digest(model))
"""
"""Trains for a moment, and prints the digest of the weights."""


def seen(ended: Ended) -> list[str]:
    """What ``LOOK`` has shown, without what differs from process to process."""
    # `cold` has not put it into a session of its own, as a launcher does
    text = ended.out.replace("True hello", "… hello").replace("False hello", "… hello")
    return [line.partition("MainThread")[0] if "MainThread" in line else line for line in text.splitlines()]
