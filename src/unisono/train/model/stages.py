"""The stages of a model, and which device of a worker holds which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from torch import nn

from unisono.errors import JobError, ModelError
from unisono.plan.split import even_bounds
from unisono.train.model.slices import is_sliced

SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble")
"""The orders in which devices compute stages and shards. In the last three, a device may hold several blocks."""

LOOPED = SCHEDULES[2:]


@dataclass(frozen=True, slots=True)
class StagePlaces:
    """The blocks of neighbouring stages, and the devices that hold them.

    ``firsts`` has the first stage of each block.
    """

    schedule: str
    firsts: tuple[int, ...]
    devices: int
    rank: int

    @classmethod
    def of(cls, schedule: str, stages: int, devices: int, rank: int) -> StagePlaces:
        """Distribute stages among devices.

        Raises:
            JobError: there is no such schedule, or there are fewer stages than devices.
        """
        if schedule not in SCHEDULES:
            raise JobError(f"run.pipeline(schedule={schedule!r}): use one of {', '.join(map(repr, SCHEDULES))}")
        if devices > stages:
            raise JobError(
                f"run.pipeline: each worker has {devices} devices, and the model has {stages} stages: give it more "
                f"cuts, at least {devices - 1}, or start workers of at most {stages} devices"
            )
        blocks = stages // devices * devices if schedule in LOOPED else devices
        return cls(schedule, tuple(even_bounds(stages, blocks)[:-1]), devices, rank)

    @property
    def own(self) -> range:
        """The blocks of this device."""
        return range(self.rank, len(self.firsts), self.devices)

    @property
    def last(self) -> int:
        """The device that has the last stage, which computes losses."""
        return self.device(len(self.firsts) - 1)

    def device(self, block: int) -> int:
        """The device that holds a block."""
        return block % self.devices


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages of a model: its modules in the order in which they are registered, cut before some of them.

    Attributes:
        cuts: the names of the modules with which the stages but the first begin.
        names: the names of all modules, in their order.
        starts: the number of the module with which each stage begins.
    """

    cuts: tuple[str, ...]
    names: tuple[str, ...]
    starts: tuple[int, ...]

    @classmethod
    def of(cls, model: nn.Module, cuts: Sequence[str]) -> Stages:
        """Cut a model.

        Raises:
            ModelError: a module is compiled, a cut names no module, cuts are not in the order of the model, a stage has
                no parameters, stages share some, or the model lies in slices; says what to do.
        """
        names = [name for name, _ in model.named_modules()]
        for name, module in model.named_modules():
            if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
                raise ModelError(
                    f"run.pipeline: {name or type(module).__name__} is compiled (torch.compile), and what is compiled "
                    f"with stages in it would compute other bits than without: leave torch.compile out"
                )
        if not cuts or isinstance(cuts, str):
            raise ModelError(f"run.pipeline(cuts={cuts!r}): needs a list of names of modules, such as ['layers.2']")
        for cut in cuts:
            if cut not in names or not cut:
                similar = get_close_matches(str(cut), names, n=3, cutoff=0.3)
                raise ModelError(
                    f"run.pipeline: the model has no module {cut!r} to cut before. Name one of model.named_modules()"
                    f"{', for instance ' + ', '.join(map(repr, similar)) if similar else ''}"
                )
        places = [names.index(cut) for cut in cuts]
        for before, after, left, right in zip(places, places[1:], cuts, cuts[1:], strict=False):
            if before >= after:
                raise ModelError(
                    f"run.pipeline: the cut before {right!r} comes after the one before {left!r}, and in the model "
                    f"{right!r} is registered first: list cuts in the order of the model"
                )
        stages = cls(tuple(cuts), tuple(names), (0, *places))
        stages._require_apart(model)
        return stages

    @property
    def count(self) -> int:
        """The number of stages."""
        return len(self.starts)

    def stage(self, number: int) -> int:
        """The stage of a module, by its number."""
        return sum(start <= number for start in self.starts) - 1

    def title(self, first: int, last: int) -> str:
        """Some neighbouring stages in words, for messages."""
        begin = f"from {self.cuts[first - 1]!r} on" if first else f"up to {self.cuts[last]!r}"
        return f"stage {first} ({begin})" if first == last else f"stages {first} to {last} ({begin})"

    def _require_apart(self, model: nn.Module) -> None:
        owners: dict[int, tuple[int, str]] = {}
        stages_with_parameters = set[int]()
        for number, (name, module) in enumerate(model.named_modules()):
            for key, parameter in module._parameters.items():
                if parameter is None:
                    continue
                full, stage = f"{name}.{key}".lstrip("."), self.stage(number)
                stages_with_parameters.add(stage)
                if is_sliced(parameter):
                    raise ModelError(
                        f"run.pipeline: {full} lies in slices (run.fully_shard), and stages of slices are not built: "
                        f"use one of both"
                    )
                owner, first = owners.setdefault(id(parameter), (stage, full))
                if owner != stage:
                    raise ModelError(
                        f"run.pipeline: {first} of stage {owner} and {full} of stage {stage} are one parameter (tied "
                        f"weights), and two devices would train it. Put both into one stage by other cuts, or untie "
                        f"them: give {full.rsplit('.', 1)[0] or full} a parameter of its own"
                    )
        if empty := sorted(set(range(self.count)) - stages_with_parameters):
            raise ModelError(
                f"run.pipeline: {self.title(empty[0], empty[0])} has no parameters: leave a cut beside it out"
            )
