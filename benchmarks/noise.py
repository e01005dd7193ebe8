"""How noisy the machine was while it was measured."""

import resource
import statistics
from dataclasses import dataclass
from time import monotonic, perf_counter

import psutil
import torch

PIECES = 9
CALM_SPREAD = 0.05
CALM_FOREIGN = 0.05


@dataclass(frozen=True, slots=True)
class Noise:
    """What disturbed the measurement.

    Attributes:
        calibrations: milliseconds that one fixed piece of work took, each time it was done between two runs.
        load: the load average of the last minute before the benchmark.
        foreign: the share of the machine's cores that processes of others used meanwhile.
        stolen: the share of the machine's cores that the hypervisor gave to other machines meanwhile.
    """

    calibrations: tuple[float, ...]
    load: float
    foreign: float
    stolen: float

    @property
    def spread(self) -> float:
        """How far the middle 80 % of the calibrations lie apart, as a share of their median."""
        if len(self.calibrations) < 2:
            return 0.0
        tenths = statistics.quantiles(self.calibrations, n=10, method="inclusive")
        return (tenths[-1] - tenths[0]) / statistics.median(self.calibrations)

    @property
    def is_calm(self) -> bool:
        """Whether nothing that was measured here needs a second look."""
        return self.spread < CALM_SPREAD and self.foreign + self.stolen < CALM_FOREIGN

    def __str__(self) -> str:
        verdict = "The machine was calm" if self.is_calm else "THE MACHINE WAS NOISY: trust intervals, not digits"
        return (
            f"{verdict}. One fixed piece of work between the runs took {statistics.median(self.calibrations):.1f} ms, "
            f"the middle 80 % within {self.spread:.1%}; others used {self.foreign:.1%} of the cores, the hypervisor "
            f"took {self.stolen:.1%}; the load average before was {self.load:.2f}."
        )


class NoiseMeter:
    """Watches the machine from its making until :meth:`read`."""

    def __init__(self) -> None:
        self._load = psutil.getloadavg()[0]
        self._calibrations: list[float] = []
        self._matrix, self._long = torch.ones(256, 256), torch.ones(2**21)
        self._began = _Clocks.now()

    def calibrate(self) -> None:
        """Do the fixed piece of work, on all cores."""
        took = []
        for _ in range(PIECES):
            begun = perf_counter()
            torch.mm(self._matrix, self._matrix)
            self._long.mul_(1.0)
            took.append(perf_counter() - begun)
        self._calibrations.append(1000 * statistics.median(took))

    def read(self) -> Noise:
        """What was seen so far."""
        since = _Clocks.now().since(self._began)
        cores = max(since.wall * (psutil.cpu_count() or 1), 1e-9)
        foreign = max(0.0, since.busy - since.ours) / cores
        return Noise(tuple(self._calibrations), self._load, foreign, since.stolen / cores)


@dataclass(frozen=True, slots=True)
class _Clocks:
    """Seconds: on the wall, of all cores busy, of this process and its ended children, and stolen."""

    wall: float
    busy: float
    ours: float
    stolen: float

    @classmethod
    def now(cls) -> "_Clocks":
        cores = psutil.cpu_times()
        used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        ours = sum(one.ru_utime + one.ru_stime for one in used)
        # Interrupts are nobody's, and those of a network are mostly our own.
        return cls(monotonic(), cores.user + cores.nice + cores.system, ours, getattr(cores, "steal", 0.0))

    def since(self, before: "_Clocks") -> "_Clocks":
        return _Clocks(
            self.wall - before.wall, self.busy - before.busy, self.ours - before.ours, self.stolen - before.stolen
        )
