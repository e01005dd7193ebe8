"""Models and optimizers as a checkpoint holds them, and how they come back."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.checkpoint.codec import tree_digest
from unisono.checkpoint.snapshot import Snapshot
from unisono.errors import CheckpointError
from unisono.received import value_of
from unisono.train.model.places import BufferPlace, set_places
from unisono.train.model.prepared import Prepared, prefixed
from unisono.train.model.slices import slice_of, sliced_like
from unisono.train.model.tensors import set_all
from unisono.train.state.registry import Entry, Moment, kept, restoring

VERSIONS = "_metadata"
"""Where ``Module.state_dict`` notes the versions of the modules, by which ``load_state_dict`` goes."""


class ModelState(Entry):
    """Modules' parameters and buffers, what only optimizers hold, and in which mode modules are."""

    def __init__(self, prepared: Callable[[], Prepared]) -> None:
        super().__init__(("model",), prepared, ("weights", "script"))

    def capture(self, tree: dict[str, Any]) -> None:
        """Put it into a tree, with the names of what is trained, by which a run that goes on is compared."""
        prepared: Prepared = self.thing()
        tree |= {
            "model": _module_state(prepared),
            "transient": _transient(prepared),
            "trained": list(prepared.parameters),
            "evaluating": [name for name, module in _named_modules(prepared) if not module.training],
        }

    def restore(self, snapshot: Snapshot, moment: Moment) -> None:
        """Set all of it; at the moment ``script`` once more, as the script may have changed it since.

        Raises:
            CheckpointError: the checkpoint holds another model.
        """
        prepared = self.thing()
        with restoring(snapshot, "model"):
            ours = [_module_state(prepared), _transient(prepared)]
            # Once more only if they are others by a bit: some strategies refuse weights that were written.
            if moment == "weights" or tree_digest(ours) != tree_digest([snapshot.model, kept(snapshot, "transient")]):
                restore_models(prepared, snapshot)
            if moment == "script":  # a script may leave some modules in evaluation mode, such as a frozen BatchNorm
                evaluating = set(kept(snapshot, "evaluating"))
                for name, module in _named_modules(prepared):
                    module.training = name not in evaluating


class OptimizerState(Entry):
    """The state of the optimizers, and their hyperparameters."""

    def __init__(self, prepared: Callable[[], Prepared]) -> None:
        super().__init__(("optimizer",), prepared, ("kept", "last"))

    def capture(self, tree: dict[str, Any]) -> None:
        """Put it into a tree, with what tells one optimizer from another."""
        prepared: Prepared = self.thing()
        tree |= {
            "optimizer": [optimizer.state_dict() for optimizer in prepared.optimizers],
            "order": prepared.order(),
            "optimizers": kinds_of(prepared.optimizers),
        }

    def restore(self, snapshot: Snapshot, moment: Moment) -> None:
        """Set all of it; at the moment ``kept`` what goes with parameters alone.

        Raises:
            CheckpointError: the checkpoint holds other optimizers.
        """
        prepared = self.thing()
        groups = [optimizer.param_groups for optimizer in prepared.optimizers]
        try:
            with restoring(snapshot, "optimizers"):
                restore_optimizers(prepared, snapshot)
        finally:
            if moment == "kept":  # hyperparameters are the script's, which may have set those for a later step
                for optimizer, before in zip(prepared.optimizers, groups, strict=True):
                    optimizer.param_groups = before


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
            f"({len(odd)} parameters differ). A worker that joins, resumes or goes back has not run the loop's body "
            f"of the steps before: freeze and unfreeze between two loops"
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
                f"a worker that resumes or joins does not have: write one loop per phase, and call run.prepare between"
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


def module_part(state: Mapping[str, Any], prefix: str) -> OrderedDict[str, Any]:
    """The part of the state that belongs to a module, under the module's own names."""
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
    return [
        (prefix + name, part) for prefix, module in prefixed(prepared.modules) for name, part in module.named_modules()
    ]


def _transient_places(prepared: Prepared) -> dict[str, BufferPlace]:
    # What state_dict leaves out still decides bits, so a resumed run needs it.
    saved = {tensor.data_ptr() for tensor in prepared.tensors().values() if tensor.numel()}
    return {place.name: place for place in prepared.buffers if place.tensor.data_ptr() not in saved}


def _transient(prepared: Prepared) -> dict[str, Tensor]:
    return {name: place.tensor for name, place in _transient_places(prepared).items()}
