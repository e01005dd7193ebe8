"""The timeline of a worker's steps: its spans, written down as they are over."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, time
from typing import TYPE_CHECKING, Any

from unisono.checkpoint.folder import warn_unwritten
from unisono.data.sample_order import Order
from unisono.errors import LaunchError
from unisono.jsonl import open_lines
from unisono.plan.batches import Batches
from unisono.spans import CLOCK_MARK, FOLDER, Spans, WorkSpan
from unisono.train.group.membership import Membership
from unisono.train.step.listeners import Listener
from unisono.train.step.step import Step

if TYPE_CHECKING:
    from torch.profiler import profile


DENSE = 1000
"""Steps from the first on of which each is kept; of the later ones a tenth up to ten times as many, and so on."""

CLOCK_S = 10.0
"""Between two looks at the coordinator's clock."""

TRIES = 5
"""At each look, of which the quickest answer counts."""


def is_kept(step: int) -> bool:
    """Whether a step is written down, on all workers alike: of a million steps 3700 are."""
    every = 1
    while step >= DENSE * every:
        every *= 10
    return step % every == 0


@dataclass(frozen=True, slots=True)
class HostClock:
    """The clock of a host.

    Attributes:
        name: what all processes have in common in which it shows the same.
        now: a function that returns what it shows, in seconds.
    """

    name: str
    now: Callable[[], float] = perf_counter

    @classmethod
    def of_this_process(cls) -> HostClock:
        """Return the clock of spans: it begins with a boot, and each time namespace has a clock of its own."""
        parts = []
        with suppress(OSError):
            parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
            parts.append(str(Path("/proc/self/ns/time").readlink()))
        return cls(" ".join(parts) or f"process {os.getpid()}")


class StepTimeline(Listener):
    """Appends lines to ``timeline/<worker>.jsonl``: of a start, of each step, of each look at the coordinator's clock.

    Each is written at once: a worker that is killed takes none with it but that of the step under way. Moments are
    nanoseconds of this host's clock.

    Args:
        worker: this worker's id; ``rank-N`` where workers stay the same.
    """

    def __init__(
        self,
        run_dir: Path,
        worker: str,
        host: str,
        spans: Spans,
        membership: Membership,
        clock: HostClock | None = None,
    ) -> None:
        self._path = run_dir / FOLDER / f"{worker}.jsonl"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file: int | None = open_lines(self._path)
        self._lock = threading.Lock()  # around the file
        clock = clock or HostClock.of_this_process()
        self._spans, self._membership, self._clock = spans, membership, clock.now
        self._begun = clock.now()
        self._step = -1
        self._closed = threading.Event()
        now = {"now": _ns(clock.now()), "time": time()}
        self._write({"worker": worker, "host": host, "pid": os.getpid(), "clock": clock.name, **now})
        self._thread: threading.Thread | None = None
        if membership.is_elastic:
            self._thread = threading.Thread(target=self._keep_time, name="unisono-clock", daemon=True)
            self._thread.start()

    def loop_begins(self, number: int, batches: Batches, order: Order) -> None:
        """Start the first step's wait for samples."""
        self._begun = self._clock()

    def step_begins(self, step: Step) -> None:
        """Its samples are here."""
        kept = self._spans.take()
        regrouped = [span for span in kept if span.kind == "regroup"]
        self._note(kept, is_done=False)  # what happened at the boundary
        self._step = step.number
        self._begun = max([self._begun, *(span.ended for span in regrouped)])
        self._spans.add("data", self._begun, self._clock())

    def renewed(self) -> None:
        """Note that the step under way is computed again."""
        self._note(self._spans.take(), is_done=False)

    def step_ends(self, step: Step, after: int) -> None:
        """Note that the step is committed, and the loop's body done."""
        begun, self._begun = self._begun, self._clock()
        self._spans.add("step", begun, self._begun)
        self._note(self._spans.take(), is_done=True)

    def close(self) -> None:
        """Close the file."""
        self._note(self._spans.take(), is_done=False)
        self._closed.set()
        if self._thread is not None:
            self._thread.join(CLOCK_S)
        self._end()

    def _note(self, spans: Iterable[WorkSpan], *, is_done: bool) -> None:
        kept = list(spans) if is_kept(self._step) else [span for span in spans if span.kind in REGROUP]
        if not kept:
            return
        workers, at = self._membership.workers, _ns(min(span.begun for span in kept))
        place = {"generation": workers.generation.number, "rank": workers.rank, "workers": workers.world_size}
        rows = [_line_of(span, at) for span in kept]
        self._write({"step": self._step, "done": is_done, **place, "at": at, "spans": rows})

    def _write(self, line: dict[str, Any]) -> None:
        text = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        try:
            with self._lock:
                if self._file is not None:
                    os.write(self._file, text)
        except OSError as error:  # a full disk, say: the training goes on without
            self._end()
            warn_unwritten(self._path, error)

    def _end(self) -> None:
        with self._lock:
            file, self._file = self._file, None
        if file is not None:
            os.close(file)

    # -- on a thread

    def _keep_time(self) -> None:
        while True:
            with suppress(LaunchError):  # it is gone for a while, or the run is over
                self._write(min((self._look() for _ in range(TRIES)), key=lambda look: look["within"]))
            if self._closed.wait(CLOCK_S):
                return

    def _look(self) -> dict[str, int]:
        begun = self._clock()
        theirs = self._membership.clock()
        ended = self._clock()
        assert theirs is not None, "an elastic job has a coordinator"
        return {
            "clock_at": _ns((begun + ended) / 2),
            "coordinator": _ns(theirs),
            "within": _ns(ended - begun) // 2,
        }


REGROUP = frozenset({"regroup", "wait", "form", "copy"})
"""Spans that are kept of every step: there are few, and they matter."""


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _line_of(span: WorkSpan, at: int) -> list[Any]:
    ready = [_ns(span.ready) - at] if span.ready else []
    return [span.kind, _ns(span.begun) - at, _ns(span.ended) - at, int(span.on_main), span.number, *ready]


class TorchProfile(Listener):
    """Writes ``timeline/<worker>.torch.json``, a Chrome trace of torch's operators and kernels. It slows steps down.

    Steps that this worker does not compute are left out.
    """

    def __init__(self, run_dir: Path, worker: str, steps: range) -> None:
        self._path, self._steps = run_dir / FOLDER / f"{worker}.torch.json", steps
        self._profile: profile | None = None

    def step_begins(self, step: Step) -> None:
        """Begin with the first of the steps, or with the first one that this worker takes part in."""
        if step.number not in self._steps or self._profile is not None:
            return
        from torch.profiler import profile, record_function

        self._profile = profile()
        self._profile.start()
        with record_function(f"{CLOCK_MARK}{round(perf_counter() * 1e9)}"):
            pass

    def step_ends(self, step: Step, after: int) -> None:
        """Write it when the last one is over."""
        if after >= self._steps.stop:
            self.close()

    def close(self) -> None:
        """Write what there is."""
        recorded, self._profile = self._profile, None
        if recorded is not None:
            recorded.stop()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(self._path))
