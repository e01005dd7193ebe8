"""Objects of the script that are part of every checkpoint."""

from collections.abc import Mapping
from typing import Any

from unisono.checkpoint.store import Snapshot
from unisono.errors import CheckpointError, JobError
from unisono.train.state.restoring import kept, restoring


class Registered(dict[str, Any]):
    """Schedulers, counters, averages of the weights …, by the names they are found again by."""

    def add(self, name: str, thing: Any) -> None:
        """Take in an object.

        Raises:
            JobError: the name is taken, or the object lacks ``state_dict`` or ``load_state_dict``.
        """
        if name in self:
            raise JobError(f"run.register({name!r}): the name is taken by a {type(self[name]).__name__}")
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise JobError(f"run.register({name!r}): {type(thing).__name__} has no state_dict and load_state_dict")
        self[name] = thing

    def restore(self, snapshot: Snapshot) -> None:
        """Set every object to its state in a checkpoint.

        Raises:
            CheckpointError: the checkpoint was written with other objects, or one does not take its state; names them.
        """
        states: Mapping[str, Any] = kept(snapshot, "registered")
        if not isinstance(states, dict):
            raise CheckpointError(f"the checkpoint of step {snapshot.step} has no states of registered objects by name")
        missing = [name for name in states if name not in self]
        unknown = [name for name in self if name not in states]
        if missing or unknown:
            raise CheckpointError(
                f"the checkpoint of step {snapshot.step} and the script registered different objects: "
                f"only in the checkpoint {missing or 'none'}, only in the script {unknown or 'none'}"
            )
        for name, state in states.items():
            with restoring(snapshot, f"state of the {type(self[name]).__name__} that is registered as {name!r}"):
                self[name].load_state_dict(state)
