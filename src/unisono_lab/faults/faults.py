"""Faults as data: written down once, carried out again and again."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from unisono.errors import JobError
from unisono.received import short
from unisono_lab.faults.fault import (
    KINDS,
    Fault,
    FlipBit,
    FlippedPlace,
    Join,
    Kill,
    KillAgent,
    KillCoordinator,
    Leave,
    Partition,
    Point,
    Resize,
    Slow,
    Stop,
    WrongResult,
)


@dataclass(frozen=True)
class Faults:
    """A fault plan. Each method returns a new plan with one more fault.

    A fault with ``at_step=k`` is injected when k steps are committed and the next is about to be computed, or as soon
    after that as possible. A rank that does not exist then stands for ``rank % workers``, and a device likewise.

    Attributes:
        faults: the faults, in the order in which they were written.

    Raises:
        JobError: by each method: a value is out of range; names the fault's number, the field and what to do.
    """

    faults: tuple[Fault, ...] = ()

    def kill(self, *, rank: int, at_step: int, after_s: float = 0.0, device: int = 0) -> Faults:
        """A worker is killed, or one of its devices and they with it, so many seconds after the step has begun."""
        return self._with(Kill, rank=rank, at_step=at_step, after_s=after_s, device=device)

    def stop(
        self, *, rank: int, at_step: int, for_s: float | None = None, after_s: float = 0.0, device: int = 0
    ) -> Faults:
        """A worker stands still, or one of its devices, for some seconds or for good."""
        return self._with(Stop, rank=rank, at_step=at_step, for_s=for_s, after_s=after_s, device=device)

    def slow(self, *, rank: int, factor: float, at_step: int = 0, steps: int | None = None) -> Faults:
        """A worker needs ``factor`` times as long for its shards, for some steps or to the end."""
        return self._with(Slow, rank=rank, factor=factor, at_step=at_step, steps=steps)

    def join(self, *, at_step: int, workers: int = 1, after_s: float = 0.0) -> Faults:
        """So many workers more are asked for."""
        return self._with(Join, at_step=at_step, workers=workers, after_s=after_s)

    def leave(self, *, rank: int, at_step: int, after_s: float = 0.0) -> Faults:
        """A worker is asked to leave."""
        return self._with(Leave, rank=rank, at_step=at_step, after_s=after_s)

    def resize(self, *, workers: int, at_step: int, after_s: float = 0.0) -> Faults:
        """So many workers are asked for."""
        return self._with(Resize, workers=workers, at_step=at_step, after_s=after_s)

    def kill_coordinator(self, *, at_step: int, for_s: float = 0.0, after_s: float = 0.0) -> Faults:
        """The coordinator is killed, and for so many seconds again whenever it is back."""
        return self._with(KillCoordinator, at_step=at_step, for_s=for_s, after_s=after_s)

    def kill_agent(self, *, rank: int, at_step: int, after_s: float = 0.0) -> Faults:
        """The agent of a worker's host is killed, and with it all that it has started."""
        return self._with(KillAgent, rank=rank, at_step=at_step, after_s=after_s)

    def partition(self, *, rank: int, at_step: int, for_s: float = 1.0, after_s: float = 0.0) -> Faults:
        """A worker is cut off from the coordinator and from the other workers."""
        return self._with(Partition, rank=rank, at_step=at_step, for_s=for_s, after_s=after_s)

    def flip_bit(self, *, rank: int, at_step: int, place: FlippedPlace = "weights", bit: int = 0) -> Faults:
        """One bit in a worker's memory flips, of a number in that place, from its lowest bit on."""
        return self._with(FlipBit, rank=rank, at_step=at_step, place=place, bit=bit)

    def wrong_result(self, *, rank: int, at_step: int, bit: int = 0) -> Faults:
        """From a step on a worker computes one element of one gradient with a wrong bit."""
        return self._with(WrongResult, rank=rank, at_step=at_step, bit=bit)

    def in_recovery(self, point: Point = "regroup begins") -> Faults:
        """Have the newest fault wait for a recovery that begins after so many committed steps, and happen during it."""
        newest = self.faults[-1].model_dump(exclude_defaults=True)
        table = {**newest, "kind": self.faults[-1].kind, "during": "recovery", "point": point}
        return Faults((*self.faults[:-1], _read(len(self.faults), table)))

    @classmethod
    def from_toml(cls, text: str, where: str = "the fault plan") -> Faults:
        """Read a fault plan: one ``[[fault]]`` table each.

        Args:
            text: the text of the plan.
            where: the name of its source, for errors.

        Raises:
            JobError: it is no TOML, or a fault in it makes no sense; names the fault's number, field and value.
        """
        try:
            found = tomllib.loads(text)
        except RecursionError:
            raise JobError(f"{where} is no TOML: it is nested too deep") from None
        except ValueError as error:  # TOMLDecodeError, or a number of thousands of digits
            raise JobError(f"{where} is no TOML: {error}") from error
        tables = found.pop("fault", [])
        if found or not isinstance(tables, list):
            wrong = next(iter(found), "fault")
            raise JobError(f"{where}: {short(wrong)} is unknown there: write a table [[fault]] for each fault")
        try:
            return cls(tuple(_read(number, table) for number, table in enumerate(tables, 1)))
        except JobError as error:
            raise JobError(f"{where}: {error}") from error

    @classmethod
    def read(cls, path: Path) -> Faults:
        """Read a script from a file.

        Raises:
            JobError: it cannot be read, or makes no sense.
        """
        try:
            return cls.from_toml(path.read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise JobError(f"the fault plan {path} cannot be read: {error}") from error

    def to_toml(self) -> str:
        """The script as text, which :meth:`from_toml` reads again."""
        return "\n".join(_table(fault) for fault in self.faults)

    @property
    def counts(self) -> dict[str, int]:
        """How many there are of each kind."""
        return count(fault.kind for fault in self.faults)

    def _with(self, kind: type[Fault], **fields: Any) -> Faults:
        name = kind.model_fields["kind"].default
        return Faults((*self.faults, _read(len(self.faults) + 1, {"kind": name, **fields})))


def count(kinds: Iterable[str]) -> dict[str, int]:
    """How many there are of each kind, in the order in which kinds are explained."""
    found = list(kinds)
    return {kind: found.count(kind) for kind in KINDS if kind in found}


def _read(number: int, table: Any) -> Fault:
    if not isinstance(table, Mapping):
        raise JobError(f"fault {number} is no table: write [[fault]], and its fields below")
    kind = table.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise JobError(f"fault {number}: kind {short(kind)} is unknown: choose of {', '.join(KINDS)}")
    try:
        return KINDS[kind].model_validate(dict(table))
    except ValidationError as error:
        # A name that nobody knows is why another one is missing.
        first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
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
    found = fault.model_dump(exclude_defaults=True)
    when: dict[str, Any] = {
        name: found.pop(name) for name in ("at_step", "after_s", "during", "point") if name in found
    }
    fields: dict[str, Any] = {"kind": fault.kind, **found, **when}
    return "".join(["[[fault]]\n", *(f"{name} = {json.dumps(value)}\n" for name, value in fields.items())])
