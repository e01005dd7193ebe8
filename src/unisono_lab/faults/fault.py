"""One fault: what goes wrong, where, and before which step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from unisono.failpoints import FailpointListener, listen
from unisono.received import LONGEST_S

# Listening at the points at which a fault may be injected; see :mod:`unisono.failpoints`.

Point = Literal["regroup begins", "generation formed", "state captured", "state received", "state taken", "engine made"]
"""A point that workers pass while they recover from a loss, or take others in."""

RECOVERY: tuple[Point, ...] = get_args(Point)

OF_SOME = ("state captured", "state received", "state taken")
"""Points that not all workers pass: only whoever gives the state, or gets it."""


@contextmanager
def listening(listener: FailpointListener) -> Iterator[None]:
    """Have this be told of every point that is passed meanwhile."""
    before = listen(listener)
    try:
        yield
    finally:
        listen(before)


Steps = Annotated[int, Field(ge=0)]
Rank = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0, le=LONGEST_S, allow_inf_nan=False)]


class _Fault(BaseModel):
    """The fields of every fault.

    Attributes:
        at_step: the number of committed steps at which it is injected, before the next step is computed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    at_step: Steps


class _Delayed(_Fault):
    """A fault that may be injected in the middle of the step, or of a recovery.

    Attributes:
        after_s: the seconds from the beginning of the step, or from the point of the recovery.
        during: ``step``, or ``recovery`` to wait until workers form the next generation, after a loss or to take others
            in.
        point: the failpoint of the recovery.
    """

    after_s: Seconds = 0.0
    during: Literal["step", "recovery"] = "step"
    point: Point = "regroup begins"

    @model_validator(mode="after")
    def _require_recovery(self) -> Self:
        if self.during == "step" and "point" in self.model_fields_set:
            raise ValueError(f'point = {self.point!r} is of a recovery: write during = "recovery", too')
        return self


class Kill(_Delayed):
    """The worker is killed with SIGKILL.

    Attributes:
        device: the number of one of its devices; the others of the worker end with it.
    """

    kind: Literal["kill"] = "kill"
    rank: Rank
    device: Rank = 0


class Stop(_Delayed):
    """The worker stands still, as on a machine that swaps or hangs.

    Attributes:
        device: the number of one of its devices.
        for_s: seconds until it goes on; None for never.
    """

    kind: Literal["stop"] = "stop"
    rank: Rank
    device: Rank = 0
    for_s: Annotated[float, Field(gt=0, le=LONGEST_S, allow_inf_nan=False)] | None = None


class Slow(_Fault):
    """The worker computes slower.

    Attributes:
        factor: the factor on the time that its shards take.
        steps: the number of steps for which it lasts; None for all.
    """

    kind: Literal["slow"] = "slow"
    rank: Rank
    factor: Annotated[float, Field(ge=1, le=LONGEST_S, allow_inf_nan=False)]
    steps: Count | None = None


class Join(_Delayed):
    """So many workers more are asked for."""

    kind: Literal["join"] = "join"
    workers: Count = 1


class Leave(_Delayed):
    """The worker is asked to leave, with SIGTERM."""

    kind: Literal["leave"] = "leave"
    rank: Rank


class Resize(_Delayed):
    """So many workers are asked for."""

    kind: Literal["resize"] = "resize"
    workers: Count


class KillCoordinator(_Delayed):
    """The coordinator is killed with SIGKILL.

    Attributes:
        for_s: seconds in which it is killed again whenever it is back.
    """

    kind: Literal["kill_coordinator"] = "kill_coordinator"
    for_s: Seconds = 0.0


class KillAgent(_Delayed):
    """The agent of the worker's host is killed with SIGKILL."""

    kind: Literal["kill_agent"] = "kill_agent"
    rank: Rank


class Partition(_Delayed):
    """The worker can reach neither the coordinator nor the other workers.

    Attributes:
        for_s: seconds until it can again.
    """

    kind: Literal["partition"] = "partition"
    rank: Rank
    for_s: Seconds = 1.0


FlippedPlace = Literal["weights", "buffers", "optimizer", "partial_sum", "gradient", "shard_buffer", "checkpoint"]


class FlipBit(_Fault):
    """Flips one bit in the worker's memory, or of a checkpoint on its disk.

    Attributes:
        place: ``weights``, ``buffers`` or ``optimizer``: the largest number of the first tensor there.
            ``partial_sum``, of the gradients of its shards, before it is read, or ``gradient``, the mean over the
            global batch, before the update reads it: its first number, if it is checked.
            ``shard_buffer``, what a shard has made of a buffer. ``checkpoint``: the weights'
            file of the newest one in the run folder.
        bit: the number of the bit: in that number, from the lowest on, or in that file, from its beginning on; larger
            ones start over.
    """

    kind: Literal["flip_bit"] = "flip_bit"
    rank: Rank
    place: FlippedPlace = "weights"
    bit: Annotated[int, Field(ge=0)] = 0


class WrongResult(_Fault):
    """Has the worker compute one element of one gradient with a wrong bit, from this step on.

    Attributes:
        bit: the number of the bit, from the lowest on; larger ones start over.
    """

    kind: Literal["wrong_result"] = "wrong_result"
    rank: Rank
    bit: Annotated[int, Field(ge=0)] = 0


Fault = Kill | Stop | Slow | Join | Leave | Resize | KillCoordinator | KillAgent | Partition | FlipBit | WrongResult

KINDS: dict[str, type[Fault]] = {kind.model_fields["kind"].default: kind for kind in Fault.__args__}
"""By the name that scripts use."""
