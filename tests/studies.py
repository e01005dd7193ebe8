"""Studies that were never measured: what tests make reports of."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from unisono_lab.study.results import Cell, Mode, Results


@dataclass(frozen=True)
class MadeUp:
    """A study whose times follow a formula, with a little noise."""

    labels: Sequence[str] = ("small",)
    modes: Sequence[Mode] = ("strong",)
    workers: Sequence[int] = (1, 2, 4)
    repeats: int = 5
    crowded: Sequence[int] = ()
    noise: float = 0.01
    plain: Sequence[int] = (1,)
    seed: int = 0

    def results(self) -> Results:
        """All of it, in random order."""
        chance = random.Random(self.seed)
        cells = [
            self._cell(label, mode, workers, repeat, chance.gauss(1, self.noise))
            for label in self.labels
            for repeat in range(self.repeats)
            for mode in self.modes
            for workers in self.workers
        ]
        cells += [
            self._plain(label, threads, repeat)
            for label in self.labels
            for threads in self.plain
            for repeat in range(self.repeats)
        ]
        return Results(
            cells=tuple(cells),
            environment={"cores": 8, "latency_s": 5e-5, "bandwidth_bytes_per_s": 5e9},
            commands=("unisono study train.py --workers 1,2,4",),
            settings={"shards": 8, "gradient_bytes": 94e6, "epoch_samples": 50000},
        )

    def _cell(self, label: str, mode: Mode, workers: int, repeat: int, noise: float) -> Cell:
        batch = 256 * (workers if mode == "weak" else 1)
        compute, exposed, update = 0.3 * batch / 256 / workers, 0.0 if workers == 1 else 0.01 * workers, 0.006
        step = (compute + exposed + update) * noise
        return Cell(
            label=label,
            mode=mode,
            workers=workers,
            repeat=repeat,
            batch_size=batch,
            learning_rate=0.01 * batch / 256,
            samples=20 * batch,
            seconds=20 * step,
            step_s=step,
            data_s=0.0,
            compute_s=compute,
            exposed_s=exposed,
            update_s=update,
            wait_s=0.0,
            peak_memory_mib=900.0,
            loss=2.1,
            digest=("a" if mode == "strong" else f"b{workers}").ljust(64, "0"),
            oversubscribed=workers in self.crowded,
        )

    def _plain(self, label: str, threads: int, repeat: int) -> Cell:
        seconds = (6.0 + 0.01 * repeat) / threads
        return Cell(label=label, mode="baseline", workers=threads, repeat=repeat, samples=5120, seconds=seconds)
