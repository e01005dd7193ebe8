"""Faults as data: fault plans that can be injected again and again."""

from __future__ import annotations

import json
import random
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from unisono.errors import JobError
from unisono.failpoints import FailpointListener, listen
from unisono.received import LONGEST_S, short

# The points at which a fault may be injected; see :mod:`unisono.failpoints`.

Point = Literal["regroup begins", "generation formed", "state captured", "state received", "state taken", "engine made"]
"""A point that workers pass while they recover from a loss, or take joiners in."""

RECOVERY: tuple[Point, ...] = get_args(Point)

OF_SOME = ("state captured", "state received", "state taken")
"""Points that only some workers pass: those that send the state, or receive it."""


@contextmanager
def listening(listener: FailpointListener) -> Iterator[None]:
    """Call the listener at every point that is passed within this context."""
    previous = listen(listener)
    try:
        yield
    finally:
        listen(previous)


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
        during: ``step``, or ``recovery`` to wait until workers form the next generation, after a loss or to take
            joiners in.
        point: the failpoint of the recovery.
    """

    after_s: Seconds = 0.0
    during: Literal["step", "recovery"] = "step"
    point: Point = "regroup begins"

    @model_validator(mode="after")
    def _require_recovery(self) -> Self:
        if self.during == "step" and "point" in self.model_fields_set:
            raise ValueError(f'point = {self.point!r} belongs to a recovery: also write during = "recovery"')
        return self


class Kill(_Delayed):
    """The worker is killed with SIGKILL.

    Attributes:
        device: the number of one of its devices; the worker's other devices end with it.
    """

    kind: Literal["kill"] = "kill"
    rank: Rank
    device: Rank = 0


class Stop(_Delayed):
    """The worker is stopped, as on a host that swaps or hangs.

    Attributes:
        device: the number of one of its devices.
        for_s: the seconds until it continues; None for never.
    """

    kind: Literal["stop"] = "stop"
    rank: Rank
    device: Rank = 0
    for_s: Annotated[float, Field(gt=0, le=LONGEST_S, allow_inf_nan=False)] | None = None


class Slow(_Fault):
    """The worker computes more slowly.

    Attributes:
        factor: the factor on the time that its shards take.
        steps: the number of slow steps; None for all steps.
    """

    kind: Literal["slow"] = "slow"
    rank: Rank
    factor: Annotated[float, Field(ge=1, le=LONGEST_S, allow_inf_nan=False)]
    steps: Count | None = None


class Join(_Delayed):
    """The job is asked for this number of additional workers."""

    kind: Literal["join"] = "join"
    workers: Count = 1


class Leave(_Delayed):
    """The worker is asked to leave, with SIGTERM."""

    kind: Literal["leave"] = "leave"
    rank: Rank


class Resize(_Delayed):
    """The job is asked to change to this number of workers."""

    kind: Literal["resize"] = "resize"
    workers: Count


class KillCoordinator(_Delayed):
    """The coordinator is killed with SIGKILL.

    Attributes:
        for_s: the seconds for which it is killed again whenever it is back.
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
        for_s: the seconds until it can reach them again.
    """

    kind: Literal["partition"] = "partition"
    rank: Rank
    for_s: Seconds = 1.0


FlippedPlace = Literal["weights", "buffers", "optimizer", "partial_sum", "gradient", "shard_buffer", "checkpoint"]


class FlipBit(_Fault):
    """Flips one bit in the worker's memory, or of a checkpoint on its disk.

    Attributes:
        place: the place of the bit. ``weights``, ``buffers`` or ``optimizer``: in the largest number of the first
            tensor there. ``partial_sum`` or ``gradient``: in the first number of a partial sum of gradients before it
            is read, or of the mean gradient before the update reads it, if it is checked. ``shard_buffer``: in the
            value of a buffer after a shard. ``checkpoint``: in the weights' file of the newest checkpoint in the run
            folder.
        bit: the number of the bit in that number, from the lowest on, or in that file, from its beginning on; modulo
            the number of bits.
    """

    kind: Literal["flip_bit"] = "flip_bit"
    rank: Rank
    place: FlippedPlace = "weights"
    bit: Annotated[int, Field(ge=0)] = 0


class WrongResult(_Fault):
    """Makes the worker compute one element of one gradient with a wrong bit, from this step on.

    Attributes:
        bit: the number of the bit, from the lowest on; modulo the number of bits.
    """

    kind: Literal["wrong_result"] = "wrong_result"
    rank: Rank
    bit: Annotated[int, Field(ge=0)] = 0


Fault = Kill | Stop | Slow | Join | Leave | Resize | KillCoordinator | KillAgent | Partition | FlipBit | WrongResult

KINDS: dict[str, type[Fault]] = {kind.model_fields["kind"].default: kind for kind in Fault.__args__}
"""The classes of faults, by their names in fault plans."""


# Fault plans.


@dataclass(frozen=True)
class Faults:
    """A fault plan. Each method returns a new plan with one more fault.

    A fault with ``at_step=k`` is injected when k steps are committed and the next is about to be computed, or as soon
    after that as possible. A rank that does not exist then stands for ``rank % workers``, and a device for ``device %
    devices``.

    Attributes:
        faults: the faults, in the order in which they were written.

    Raises:
        JobError: a value is out of range, in each method; the message names the fault's number, the field and a remedy.
    """

    faults: tuple[Fault, ...] = ()

    def kill(self, *, rank: int, at_step: int, after_s: float = 0.0, device: int = 0) -> Faults:
        """A worker, or one of its devices and so the worker, is killed ``after_s`` seconds after the step began."""
        return self._with(Kill, rank=rank, at_step=at_step, after_s=after_s, device=device)

    def stop(
        self, *, rank: int, at_step: int, for_s: float | None = None, after_s: float = 0.0, device: int = 0
    ) -> Faults:
        """A worker, or one of its devices, is stopped for some seconds or for good."""
        return self._with(Stop, rank=rank, at_step=at_step, for_s=for_s, after_s=after_s, device=device)

    def slow(self, *, rank: int, factor: float, at_step: int = 0, steps: int | None = None) -> Faults:
        """A worker needs ``factor`` times as long for its shards, for some steps or to the end."""
        return self._with(Slow, rank=rank, factor=factor, at_step=at_step, steps=steps)

    def join(self, *, at_step: int, workers: int = 1, after_s: float = 0.0) -> Faults:
        """The job is asked for this number of additional workers."""
        return self._with(Join, at_step=at_step, workers=workers, after_s=after_s)

    def leave(self, *, rank: int, at_step: int, after_s: float = 0.0) -> Faults:
        """A worker is asked to leave."""
        return self._with(Leave, rank=rank, at_step=at_step, after_s=after_s)

    def resize(self, *, workers: int, at_step: int, after_s: float = 0.0) -> Faults:
        """The job is asked to change to this number of workers."""
        return self._with(Resize, workers=workers, at_step=at_step, after_s=after_s)

    def kill_coordinator(self, *, at_step: int, for_s: float = 0.0, after_s: float = 0.0) -> Faults:
        """The coordinator is killed, and for ``for_s`` seconds again whenever it is back."""
        return self._with(KillCoordinator, at_step=at_step, for_s=for_s, after_s=after_s)

    def kill_agent(self, *, rank: int, at_step: int, after_s: float = 0.0) -> Faults:
        """The agent of a worker's host is killed, and with it all processes that it has started."""
        return self._with(KillAgent, rank=rank, at_step=at_step, after_s=after_s)

    def partition(self, *, rank: int, at_step: int, for_s: float = 1.0, after_s: float = 0.0) -> Faults:
        """A worker is cut off from the coordinator and from the other workers."""
        return self._with(Partition, rank=rank, at_step=at_step, for_s=for_s, after_s=after_s)

    def flip_bit(self, *, rank: int, at_step: int, place: FlippedPlace = "weights", bit: int = 0) -> Faults:
        """One bit of a number in a worker's memory, or of a checkpoint, flips; see :class:`FlipBit`."""
        return self._with(FlipBit, rank=rank, at_step=at_step, place=place, bit=bit)

    def wrong_result(self, *, rank: int, at_step: int, bit: int = 0) -> Faults:
        """From this step on a worker computes one element of one gradient with a wrong bit."""
        return self._with(WrongResult, rank=rank, at_step=at_step, bit=bit)

    def in_recovery(self, point: Point = "regroup begins") -> Faults:
        """Let the newest fault of the plan happen during the first recovery after its ``at_step`` committed steps."""
        newest = self.faults[-1].model_dump(exclude_defaults=True)
        table = {**newest, "kind": self.faults[-1].kind, "during": "recovery", "point": point}
        return Faults((*self.faults[:-1], _read(len(self.faults), table)))

    @classmethod
    def from_toml(cls, text: str, where: str = "the fault plan") -> Faults:
        """Read a fault plan, which has a ``[[fault]]`` table for each fault.

        Args:
            text: the text of the plan.
            where: the name of its source, for errors.

        Raises:
            JobError: the text is no TOML, or a fault makes no sense; the message names its number, field and value.
        """
        try:
            document = tomllib.loads(text)
        except RecursionError:
            raise JobError(f"{where} is no TOML: it is nested too deep") from None
        except ValueError as error:  # TOMLDecodeError, or a number of thousands of digits
            raise JobError(f"{where} is no TOML: {error}") from error
        tables = document.pop("fault", [])
        if document or not isinstance(tables, list):
            unknown = next(iter(document), "fault")
            raise JobError(f"{where}: {short(unknown)} is unknown: write a table [[fault]] for each fault")
        try:
            return cls(tuple(_read(number, table) for number, table in enumerate(tables, 1)))
        except JobError as error:
            raise JobError(f"{where}: {error}") from error

    @classmethod
    def read(cls, path: Path) -> Faults:
        """Read a fault plan from a file.

        Raises:
            JobError: the file cannot be read, or holds no fault plan.
        """
        try:
            return cls.from_toml(path.read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise JobError(f"the fault plan {path} cannot be read: {error}") from error

    def to_toml(self) -> str:
        """The fault plan as text, which :meth:`from_toml` reads again."""
        return "\n".join(_table(fault) for fault in self.faults)

    @property
    def counts(self) -> dict[str, int]:
        """The number of faults of each kind."""
        return count(fault.kind for fault in self.faults)

    def _with(self, kind: type[Fault], **fields: Any) -> Faults:
        name = kind.model_fields["kind"].default
        return Faults((*self.faults, _read(len(self.faults) + 1, {"kind": name, **fields})))


def count(kinds: Iterable[str]) -> dict[str, int]:
    """The number of each kind, in the order of ``KINDS``."""
    all_kinds = list(kinds)
    return {kind: all_kinds.count(kind) for kind in KINDS if kind in all_kinds}


def _read(number: int, table: Any) -> Fault:
    if not isinstance(table, Mapping):
        raise JobError(f"fault {number} is no table: write [[fault]], and its fields below")
    kind = table.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise JobError(f"fault {number}: kind {short(kind)} is unknown: use one of {', '.join(KINDS)}")
    try:
        return KINDS[kind].model_validate(dict(table))
    except ValidationError as error:
        # An unknown name comes first: it is the reason why another one is missing.
        first = min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
        field = ".".join(str(part) for part in first["loc"] if part != "constrained-float")
        raise JobError(f"fault {number} ({kind}): {_trouble(kind, field, first)}") from error


def _trouble(kind: str, field: str, error: Mapping[str, Any]) -> str:
    match error["type"]:
        case "missing":
            return f"{field} is missing: write {field} = …"
        case "extra_forbidden":
            return f"{field} is unknown: {kind} has {', '.join(KINDS[kind].model_fields)}"
        case "value_error":
            return str(error["ctx"]["error"])
    words = error["msg"].removeprefix("Input ").removeprefix("should be ")
    return f"{field} = {short(error['input'])}: needs to be {words}"


def _table(fault: Fault) -> str:
    fields = fault.model_dump(exclude_defaults=True)
    when: dict[str, Any] = {
        name: fields.pop(name) for name in ("at_step", "after_s", "during", "point") if name in fields
    }
    table = {"kind": fault.kind, **fields, **when}
    return "".join(["[[fault]]\n", *(f"{name} = {json.dumps(value)}\n" for name, value in table.items())])


# Fault plans that are drawn from a seed.


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
"""The share of each kind, in percent. Faults of memory and processors are left out: a job may rightly end with an error
by one, for example after its last step. ``benchmarks.flip_campaign`` injects such faults."""

FOREVER = 8
"""One in this number of stopped workers never continues."""

RECOVERIES = 4
"""One in this number of faults is injected during a recovery from another one."""

WITHIN_S = 0.1
"""The latest moment of a fault, in seconds after the step's beginning; it may lie in a later step."""


@dataclass(frozen=True, slots=True)
class RandomFaults:
    """The settings from which a fault plan is drawn.

    Attributes:
        steps: the number of steps of the job, over which the faults are spread.
    """

    seed: int
    faults: int
    steps: int
    largest: int
    devices: int = 1

    def draw(self) -> Faults:
        """Draw the fault plan.

        Raises:
            JobError: the job has too few steps, or there are no faults.
        """
        if self.faults < 1 or self.steps < 2:
            raise JobError(f"{self.faults} faults in {self.steps} steps: at least 1 fault and 2 steps are needed")
        draw = random.Random(self.seed)  # noqa: S311  nothing secret
        kinds = self._kinds(draw)
        draw.shuffle(kinds)
        plan = Faults()
        for number, kind in enumerate(kinds):
            first, last = (self.steps * edge // self.faults for edge in (number, number + 1))
            at_step = max(1, min(draw.randint(first, max(first, last - 1)), self.steps - 1))
            plan = self._add(plan, kind, at_step, draw)
            if kind != "slow" and draw.randrange(RECOVERIES) == 0:
                plan = plan.in_recovery(draw.choice(RECOVERY))
        return plan

    def _kinds(self, draw: random.Random) -> list[str]:
        """The kinds of all faults: each kind by its share, and at least one of each if there is room."""
        minimum = 1 if self.faults >= len(SHARES) else 0
        counts = {kind: max(minimum, self.faults * share // 100) for kind, share in SHARES.items()}
        kinds = [kind for kind, number in counts.items() for _ in range(number)]
        missing = max(0, self.faults - len(kinds))
        return (kinds + draw.choices(list(SHARES), list(SHARES.values()), k=missing))[-self.faults :]

    def _add(self, plan: Faults, kind: str, at_step: int, draw: random.Random) -> Faults:
        rank = draw.randrange(self.largest)
        after_s = round(draw.choice((0.0, draw.uniform(0, WITHIN_S))), 3)
        fields: dict[str, Any] = {"at_step": at_step, "after_s": after_s}
        if kind not in ("resize", "join", "kill_coordinator"):
            fields["rank"] = rank
        match kind:
            case "stop":
                fields["for_s"] = None if draw.randrange(FOREVER) == 0 else round(draw.uniform(0.1, 1.0), 3)
                fields["device"] = self._device(draw)
            case "slow":
                del fields["after_s"]
                fields |= {"factor": round(draw.uniform(1.5, 5.0), 1), "steps": draw.randint(1, 10)}
            case "partition":
                fields["for_s"] = round(draw.uniform(0.1, 1.5), 3)
            case "resize":
                # The larger of two draws, since the job would otherwise spend most of its time on few workers.
                fields["workers"] = max(draw.randint(1, self.largest), draw.randint(1, self.largest))
            case "kill_coordinator":
                fields["for_s"] = draw.choice((0.0, 0.5))
            case "kill":
                fields["device"] = self._device(draw)
        added: Faults = getattr(plan, kind)(**fields)
        return added

    def _device(self, draw: random.Random) -> int:
        return draw.randrange(self.devices) if self.devices > 1 else 0
