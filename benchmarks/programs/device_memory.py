"""Trains the large GPT of the examples, and writes down the most memory that its tensors took at any time.

Started by ``unisono run -m benchmarks.programs.device_memory FOLDER``, with the options of the example behind it. The
figure is that of torch's profiler, which hears of each piece of memory that the main thread takes for a tensor, or
gives back.
"""

import os
import sys
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from benchmarks.elastic_job import ROOT


def most_alive(changes: Iterable[int]) -> int:
    """The most bytes that are there at any time, by how many each moment takes, or gives back."""
    return max(accumulate(changes), default=0)


def main() -> None:
    """Train it."""
    folder = Path(sys.argv.pop(1))
    sys.path.insert(0, str(ROOT / "examples"))
    from large_gpt import main as train  # type: ignore[import-not-found]

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        train()
    assert profiled.profiler is not None, "it has run"
    events = [each for each in profiled.profiler.kineto_results.events() if each.name() == "[memory]"]
    ordered = sorted(events, key=lambda each: each.start_ns())
    (folder / f"{os.getpid()}.txt").write_text(str(most_alive(each.nbytes() for each in ordered)))


if __name__ == "__main__":
    main()
