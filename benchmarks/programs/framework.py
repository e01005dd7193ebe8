"""One worker of a framework, alone or with Unisono; trains until it is stopped, and notes when each step was done.

Started as ``python -m benchmarks.programs.framework FRAMEWORK WAY BATCH WORKERS FOLDER``, or by torchrun for several.
"""

import os
import sys
import time
from itertools import count
from pathlib import Path

import torch

from benchmarks.frameworks import PLAIN, train_of

if __name__ == "__main__":
    framework, way, batch, workers, folder = sys.argv[1:]
    torch.set_num_threads(int(workers) if way == PLAIN else 1)
    numbers = count()
    with Path(folder, f"commits-{os.environ.get('RANK', '0')}.txt").open("w", buffering=1) as file:
        train_of(framework)(way, int(batch), int(workers), lambda: print(next(numbers), time.time(), file=file))
