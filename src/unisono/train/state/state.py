"""The state of a run as a checkpoint holds it, and how it comes back."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.checkpoint.quick_digest import tree_digest
from unisono.checkpoint.store import Snapshot
from unisono.data.stream_reader import ReaderState
from unisono.errors import CheckpointError, Unreadable
from unisono.plan.batches import Position
from unisono.received import short, value_of
from unisono.train.model.places import BufferPlace, set_places
from unisono.train.model.prepared import Prepared, prefixed
from unisono.train.model.slices import slice_of, sliced_like
from unisono.train.model.tensors import set_all
from unisono.train.state.registered import kept

VERSIONS = "_metadata"
"""Where ``Module.state_dict`` notes the versions of the modules, by which ``load_state_dict`` goes."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The settings that decide, besides the job, which samples a loop's batches hold.

    Attributes:
        samples: the number of samples in the data set.
        shuffle: whether their order is shuffled.
        drop_last: whether a last, smaller batch is left out.
        order: a digest of what a loader's sampler gives for the first epoch; empty without a sampler.
        content: a digest of what a few of the samples hold; empty where that was not noted.
    """

    samples: int
    shuffle: bool
    drop_last: bool
    order: str = ""
    content: str = ""

    def goes_on(self, before: "Reading") -> bool:
        """Whether a loop that was begun with other settings can go on with these."""
        return self == (before if self.content and before.content else replace(before, content=self.content))


@dataclass(frozen=True, slots=True)
class RunProgress:
    """The place that a run has reached.

    Attributes:
        position: the position in the present loop, or in the next one.
        loop: the number of that loop; a script may have several, one after the other.
        reading: the settings of that loop; None before its first step.
        readers: the states of a stream's readers; empty where there are none, or none has begun.
    """

    position: Position = field(default_factory=Position)
    loop: int = 0
    reading: Reading | None = None
    readers: tuple[ReaderState, ...] = ()

    def as_tree(self) -> dict[str, Any]:
        """As numbers by name."""
        return {**asdict(self), "readers": [asdict(one) for one in self.readers]}

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> "RunProgress":
        """The inverse of :meth:`as_tree`.

        Raises:
            Unreadable: it is none.
        """
        forms = {"position": Position, "loop": int, "reading": Reading | None, "readers": tuple[ReaderState, ...]}
        found = value_of(forms, tree, "progress")
        samples = (one.samples for one in found["readers"])
        if not all(number >= 0 for number in (found["loop"], *astuple(found["position"]), *samples)):
            raise Unreadable(f"{short(tree)} does not say where a run stands")
        return cls(**found)


def capture(
    prepared: Prepared, progress: RunProgress, registered: Mapping[str, Any], own: Mapping[str, Any]
) -> Snapshot:
    """The state of a run at a step boundary.

    Args:
        prepared: models and optimizers.
        progress: the place that the run has reached.
        registered: objects with ``state_dict``, by name.
        own: further JSON values by name, such as whose state this is.
    """
    return Snapshot(
        step=progress.position.step,
        model=_module_state(prepared),
        optimizer=[optimizer.state_dict() for optimizer in prepared.optimizers],
        state={
            "progress": progress.as_tree(),
            "registered": {name: thing.state_dict() for name, thing in registered.items()},
            "transient": _transient(prepared),
            "order": prepared.order(),
            "optimizers": kinds_of(prepared.optimizers),
            "trained": list(prepared.parameters),
            "evaluating": [name for name, module in _named_modules(prepared) if not module.training],
            **own,
        },
    )


def restore_models(prepared: Prepared, snapshot: Snapshot) -> None:
    """Set all modules' parameters and buffers, and what only optimizers hold.

    Raises:
        CheckpointError: the checkpoint holds another model; names what differs.
    """
    ours, theirs = _forms(_module_state(prepared)), _forms(snapshot.model)
    if ours != theirs:
        names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
        raise CheckpointError(
            f"the checkpoint of step {snapshot.step} holds another model; {len(names)} tensors differ, first "
            f"{names[0]}: {ours.get(names[0], 'absent')} here, {theirs.get(names[0], 'absent')} in the checkpoint"
        )
    places, values = _transient_places(prepared), value_of(dict[str, Tensor], kept(snapshot, "transient"), "transient")
    odd = [name for name in {**places, **values} if name not in places or name not in values]
    odd += [name for name, place in places.items() if name in values and not place.fits(values[name])]
    if odd:
        raise CheckpointError(
            f"the checkpoint of step {snapshot.step} holds other transient buffers or further state: another model; "
            f"first {odd[0]}"
        )
    for prefix, module in prefixed(prepared.modules):
        part, held = module_part(snapshot.model, prefix), module.state_dict()
        for name in prepared.outside:
            part.pop(name, None)
        for name, value in part.items():
            part[name] = sliced_like(held[name], value)
        part.update((name, value) for name, value in held.items() if _is_hollow(value))
        module.load_state_dict(part)
    set_places([(places[name], value) for name, value in values.items()])
    set_all([(tensor, snapshot.model[name]) for name, tensor in prepared.outside.items()])


def holds_models(prepared: Prepared, snapshot: Snapshot) -> bool:
    """Whether all modules' parameters and buffers are those of a snapshot, bit for bit."""
    ours = [_module_state(prepared), _transient(prepared)]
    return tree_digest(ours) == tree_digest([snapshot.model, kept(snapshot, "transient")])


def restore_modes(prepared: Prepared, snapshot: Snapshot) -> None:
    """Set which modules are in evaluation mode: a script may leave some in it, such as a frozen BatchNorm."""
    evaluating = set(kept(snapshot, "evaluating"))
    for name, module in _named_modules(prepared):
        module.training = name not in evaluating


def require_same_trained(prepared: Prepared, snapshot: Snapshot) -> None:
    """Refuse to go on in the middle of a loop with other parameters frozen.

    Raises:
        CheckpointError: names the first one, and says what to do.
    """
    ours, theirs = set(prepared.parameters), set(value_of(list[str], kept(snapshot, "trained"), "trained"))
    if odd := sorted(ours ^ theirs):
        here, there = ("trained", "frozen") if odd[0] in ours else ("frozen", "trained")
        raise CheckpointError(
            f"{odd[0]} is {here} here, and was {there} after step {snapshot.step}, where this worker goes on "
            f"({len(odd)} parameters differ). Whoever joins, resumes or goes back has not run the loop's body of the "
            f"steps before: freeze and unfreeze between two loops"
        )


def restore_optimizers(prepared: Prepared, snapshot: Snapshot) -> None:
    """Set all optimizers' state.

    Raises:
        CheckpointError: the checkpoint holds other optimizers.
    """
    if len(snapshot.optimizer) != len(prepared.optimizers):
        raise CheckpointError(
            f"the checkpoint of step {snapshot.step} holds {len(snapshot.optimizer)} optimizers, the script has "
            f"{len(prepared.optimizers)}"
        )
    theirs = value_of(list[str], kept(snapshot, "optimizers"), "optimizers")
    if (ours := kinds_of(prepared.optimizers)) != theirs:
        raise CheckpointError(
            f"the checkpoint of step {snapshot.step} holds the state of {' and '.join(theirs)}, the script has "
            f"{' and '.join(ours)}: go on with the optimizers of the checkpoint, or begin in another run folder"
        )
    _require_same_order(prepared, snapshot)
    for optimizer, state in zip(prepared.optimizers, snapshot.optimizer, strict=True):
        try:
            optimizer.load_state_dict(state)
        except (ValueError, KeyError) as error:
            raise CheckpointError(
                f"the checkpoint of step {snapshot.step} holds another optimizer than the script's "
                f"{type(optimizer).__name__}: {error}. What a loop's body has changed in it, such as a further group, "
                f"whoever resumes or joins does not have: write one loop for each phase, and call run.prepare between"
            ) from error
        _own_values(optimizer, state)


def kinds_of(optimizers: Sequence[Optimizer]) -> list[str]:
    """The names of the optimizers' classes."""
    return [type(optimizer).__name__ for optimizer in optimizers]


def _require_same_order(prepared: Prepared, snapshot: Snapshot) -> None:
    # What an optimizer keeps goes by its parameters' numbers. Other parameters are told of by the optimizer itself.
    kept_order = value_of(list[list[str]], kept(snapshot, "order"), "order")
    for number, (ours, theirs) in enumerate(zip(prepared.order(), kept_order, strict=False)):
        if ours != theirs and sorted(ours) == sorted(theirs):
            here, there = next(pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1])
            raise CheckpointError(
                f"the checkpoint of step {snapshot.step} holds the parameters of optimizer {number} in another order: "
                f"{there} is where the script has {here}. Give the optimizer a list, whose order is always the same, "
                f"and no set"
            )


def restore_update(prepared: Prepared, snapshot: Snapshot) -> None:
    """Set what an update changes: weights, buffers, what the optimizers keep per parameter."""
    restore_models(prepared, snapshot)
    restore_kept(prepared, snapshot)


def restore_kept(prepared: Prepared, snapshot: Snapshot) -> None:
    """Set what the optimizers keep per parameter.

    Hyperparameters stay: they are the script's, which may have set those of the snapshot for a later step.

    Raises:
        CheckpointError: the checkpoint holds other optimizers.
    """
    groups = [optimizer.param_groups for optimizer in prepared.optimizers]
    try:
        restore_optimizers(prepared, snapshot)
    finally:
        for optimizer, before in zip(prepared.optimizers, groups, strict=True):
            optimizer.param_groups = before


def module_part(state: Mapping[str, Any], prefix: str) -> OrderedDict[str, Any]:
    """What belongs to one of several modules, under the module's own names."""
    part = _part(state, prefix)
    setattr(part, VERSIONS, _part(getattr(state, VERSIONS, {}), prefix))
    return part


def _module_state(prepared: Prepared) -> OrderedDict[str, Any]:
    """What the modules' ``state_dict`` say, by name, with torch's note of their versions; and what optimizers hold."""
    whole: OrderedDict[str, Any] = OrderedDict()
    versions: dict[str, Any] = {}
    for prefix, module in prefixed(prepared.modules):
        state = module.state_dict()
        whole.update((prefix + name, slice_of(value)) for name, value in state.items() if not _is_hollow(value))
        versions |= {prefix + name: value for name, value in getattr(state, VERSIONS, {}).items()}
    whole.update((name, tensor.detach()) for name, tensor in prepared.outside.items())
    setattr(whole, VERSIONS, versions)
    return whole


def _is_hollow(value: Any) -> bool:
    """Whether another device holds a tensor."""
    return isinstance(value, Tensor) and value.is_meta


def _part(state: Mapping[str, Any], prefix: str) -> OrderedDict[str, Any]:
    mine = ((name.removeprefix(prefix), value) for name, value in state.items() if name.startswith(prefix))
    return OrderedDict(mine)


def _forms(state: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        for name, value in state.items()
        if isinstance(value, Tensor)
    }


def _own_values(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    # torch casts state to its parameter's dtype, which rounds what an optimizer keeps in another one. And what it takes
    # as it is lies in one buffer with all that was read, which nobody could let go of.
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for parameter, number in zip(parameters, numbers, strict=True):
        for name, value in state["state"].get(number, {}).items():
            ours = optimizer.state[parameter]
            if isinstance(value, Tensor):
                ours[name] = value.to(ours[name].device, copy=True)


def _named_modules(prepared: Prepared) -> list[tuple[str, nn.Module]]:
    return [(prefix + name, each) for prefix, one in prefixed(prepared.modules) for name, each in one.named_modules()]


def _transient_places(prepared: Prepared) -> dict[str, BufferPlace]:
    # What state_dict leaves out still decides bits, so a resumed run needs it.
    saved = {tensor.data_ptr() for tensor in prepared.tensors().values() if tensor.numel()}
    return {place.name: place for place in prepared.buffers if place.tensor.data_ptr() not in saved}


def _transient(prepared: Prepared) -> dict[str, Tensor]:
    return {name: place.tensor for name, place in _transient_places(prepared).items()}
