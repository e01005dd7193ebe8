"""How long a worker takes to begin, warm and cold: ``python -m benchmarks.start``.

From the moment in which it is asked for to a line of its script that has torch, unisono and an optimizer.
"""

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

from unisono.launch.worker_start import WarmStart, WorkerRequest

ROUNDS = 9
SCRIPT = """
import os, torch, unisono
unisono.init
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
os.write(1, b"!")
"""


async def warm(rounds: int, folder: Path) -> tuple[float, list[float]]:
    """Seconds until the fork server is ready, and until each worker of it has begun."""
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    began = perf_counter()
    fork_server = await WarmStart.open(environment, folder / "template.log")
    try:
        await fork_server.ready()
        loaded = perf_counter() - began
        return loaded, [await _warm_one(fork_server, folder) for _ in range(rounds)]
    finally:
        await fork_server.close()


async def _warm_one(fork_server: WarmStart, folder: Path) -> float:
    reading, writing = os.pipe()
    began = perf_counter()
    worker = await fork_server.start(WorkerRequest(("script.py",), {}, str(folder)), writing, 2)
    os.close(writing)
    await asyncio.to_thread(os.read, reading, 1)
    took = perf_counter() - began
    os.close(reading)
    await worker.wait()
    return took


def cold(folder: Path) -> float:
    """Seconds until a worker that is a program of its own has begun."""
    began = perf_counter()
    with subprocess.Popen(
        [sys.executable, "-P", "-u", "-m", "unisono.launch.worker", "script.py"],
        cwd=folder,
        env=dict(os.environ, OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
    ) as worker:
        assert worker.stdout is not None
        worker.stdout.read(1)
        return perf_counter() - began


def main() -> None:
    """Measure both, and print them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "script.py").write_text(SCRIPT)
        cold(folder)  # the files are in memory from now on
        colds = [cold(folder) for _ in range(ROUNDS)]
        loaded, warms = asyncio.run(warm(ROUNDS, folder))
    middle_cold, middle_warm = statistics.median(colds), statistics.median(warms)
    print(f"cold: {1000 * middle_cold:.0f} ms, {1000 * min(colds):.0f} to {1000 * max(colds):.0f}")
    print(f"warm: {1000 * middle_warm:.1f} ms, {1000 * min(warms):.1f} to {1000 * max(warms):.1f}")
    print(f"ratio: {middle_cold / middle_warm:.0f}; the fork server itself is ready after {1000 * loaded:.0f} ms")


if __name__ == "__main__":
    main()
