"""A fault plan that is drawn from a seed: the same for the same seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from unisono.errors import JobError
from unisono_lab.faults.fault import RECOVERY
from unisono_lab.faults.faults import Faults

SHARES = {
    "kill": 30,
    "stop": 18,
    "resize": 14,
    "join": 12,
    "leave": 10,
    "slow": 5,
    "partition": 5,
    "kill_coordinator": 3,
    "kill_agent": 3,
}
"""How often each kind is drawn, in parts of a hundred. What memory and processors do wrong is left out: a job may
rightly end with an error by it, as after its last step. ``benchmarks.flip_campaign`` injects such faults."""

FOREVER = 8
"""One worker in so many that stand still does not go on."""

RECOVERIES = 4
"""One fault in so many is injected during the recovery from another one."""

WITHIN_S = 0.1
"""The latest moment of a fault, in seconds after a step's beginning: in the middle of it, or of one that follows."""


@dataclass(frozen=True, slots=True)
class RandomFaults:
    """The settings from which a fault plan is drawn.

    Attributes:
        seed: the seed of all that is drawn.
        faults: the number of faults.
        steps: the number of steps of the job, over which they are spread.
        largest: the largest number of workers of the job.
        has_agents_killed: whether agents are killed, too; whoever starts the job has to start it again then.
        devices: the number of devices of each worker.
    """

    seed: int
    faults: int
    steps: int
    largest: int
    has_agents_killed: bool = True
    devices: int = 1

    def draw(self) -> Faults:
        """The script.

        Raises:
            JobError: there is no room for faults in this job.
        """
        if self.faults < 1 or self.steps < 2:
            raise JobError(f"{self.faults} faults in {self.steps} steps: at least 1 fault and 2 steps are needed")
        draw = random.Random(self.seed)  # noqa: S311  nothing secret
        kinds = self._kinds(draw)
        draw.shuffle(kinds)
        script = Faults()
        for number, kind in enumerate(kinds):
            first, last = (self.steps * edge // self.faults for edge in (number, number + 1))
            at_step = max(1, min(draw.randint(first, max(first, last - 1)), self.steps - 1))
            script = self._add(script, kind, at_step, draw)
            if kind != "slow" and draw.randrange(RECOVERIES) == 0:
                script = script.in_recovery(draw.choice(RECOVERY))
        return script

    def _kinds(self, draw: random.Random) -> list[str]:
        """Of each kind its share, and one of each if there is room."""
        shares = {kind: share for kind, share in SHARES.items() if kind != "kill_agent" or self.has_agents_killed}
        least = 1 if self.faults >= len(shares) else 0
        counts = {kind: max(least, self.faults * share // 100) for kind, share in shares.items()}
        kinds = [kind for kind, number in counts.items() for _ in range(number)]
        missing = max(0, self.faults - len(kinds))
        return (kinds + draw.choices(list(shares), list(shares.values()), k=missing))[-self.faults :]

    def _add(self, script: Faults, kind: str, at_step: int, draw: random.Random) -> Faults:
        rank = draw.randrange(self.largest)
        after_s = round(draw.choice((0.0, draw.uniform(0, WITHIN_S))), 3)
        if kind == "stop":
            for_s = None if draw.randrange(FOREVER) == 0 else round(draw.uniform(0.1, 1.0), 3)
            device = self._device(draw)
            return script.stop(rank=rank, at_step=at_step, for_s=for_s, after_s=after_s, device=device)
        if kind == "slow":
            factor = round(draw.uniform(1.5, 5.0), 1)
            return script.slow(rank=rank, factor=factor, at_step=at_step, steps=draw.randint(1, 10))
        if kind == "partition":
            for_s = round(draw.uniform(0.1, 1.5), 3)
            return script.partition(rank=rank, at_step=at_step, for_s=for_s, after_s=after_s)
        if kind == "resize":
            # More often up than down, or the job would spend most of its life on a single worker.
            workers = max(draw.randint(1, self.largest), draw.randint(1, self.largest))
            return script.resize(workers=workers, at_step=at_step, after_s=after_s)
        if kind == "join":
            return script.join(at_step=at_step, after_s=after_s)
        if kind == "kill_coordinator":
            return script.kill_coordinator(at_step=at_step, for_s=draw.choice((0.0, 0.5)), after_s=after_s)
        if kind == "kill":
            return script.kill(rank=rank, at_step=at_step, after_s=after_s, device=self._device(draw))
        of_rank = {"leave": script.leave, "kill_agent": script.kill_agent}[kind]
        return of_rank(rank=rank, at_step=at_step, after_s=after_s)

    def _device(self, draw: random.Random) -> int:
        return draw.randrange(self.devices) if self.devices > 1 else 0
