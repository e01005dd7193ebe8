"""The state of a run, models and position, as one thing that is kept, restored and handed on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from typing import Any

from unisono.adapt.view import Setting
from unisono.checkpoint.store import Snapshot
from unisono.errors import CheckpointError
from unisono.received import value_of
from unisono.train.group.workers import Workers
from unisono.train.model.prepared import Prepared
from unisono.train.state.checkpoints import as_snapshot, as_tree
from unisono.train.state.loss_scale import LossScale
from unisono.train.state.monitors import Monitors
from unisono.train.state.policy_state import PolicyState
from unisono.train.state.registered import Registered, all_or_nothing, kept, restoring
from unisono.train.state.state import (
    RunProgress,
    capture,
    holds_models,
    require_same_trained,
    restore_kept,
    restore_models,
    restore_modes,
    restore_optimizers,
    restore_update,
)


@dataclass(frozen=True, slots=True)
class Doubt:
    """Why training must not go on from the present state.

    Attributes:
        step: the number of the first step whose result may be wrong.
        call: the number of the call of ``step.run`` in that step.
        why: a sentence for people.
        is_fault: whether anything wrong was seen. If not, nobody could compare the state.
        is_proven: whether it is known to be a fault of a host: a worker has found it in its own memory, or an audit in
            its results. If not, the script may have set something on some workers only.
    """

    step: int
    call: int
    why: str
    is_fault: bool = True
    is_proven: bool = False


class Trained:
    """The state of a run: models and optimizers, the position in the data, and what the script has registered.

    Args:
        about: JSON values that say whose state this is.
        policy_state: the policies, and what they have changed.

    Attributes:
        prepared: models and optimizers; None before ``run.prepare``.
        progress: the place that the run has reached.
        registered: the objects that the script has registered.
        monitors: the measurements of the steps so far.
        loss_scale: the factor of losses, with ``precision="fp16"``.
        strategy: the present strategy's text, and the state by name that it keeps from round to round.
        doubt: the reason to go back to an older state; None as long as all is well.
        restored: a snapshot that models are restored from, and the script has yet to ask for the rest of.
        has_weights: whether this worker has the weights of all workers, or gets them with the state.
        loops: the number of loops that the script has begun.
        original: the restored snapshot when the script has asked for all of it, and another worker may still lack it.
    """

    def __init__(self, about: Mapping[str, Any], policy_state: PolicyState) -> None:
        self.policy_state = policy_state
        self.prepared: Prepared | None = None
        self.has_weights = False
        self.loops = 0
        self.progress = RunProgress()
        self.registered = Registered()
        self.monitors = Monitors()
        self.loss_scale = LossScale()
        self.strategy: tuple[str, dict[str, Any]] = "", {}
        self.doubt: Doubt | None = None
        self.restored: Snapshot | None = None
        self.original: Snapshot | None = None
        self._about = about
        self._settled: Snapshot | None = None  # in the middle of a loop; as long as no step was computed after it
        self._settled_loop = 0

    @property
    def is_doubted(self) -> bool:
        """Whether the run has to go back to an older state before it goes on."""
        return self.doubt is not None

    def setting(self, workers: Workers) -> Setting:
        """In which steps are computed now."""
        return Setting(
            generation=workers.generation.number,
            world_size=workers.world_size,
            batch_size=self.policy_state.batch_size,
            shards=self.policy_state.shards,
            topology=workers.transport.topology,
            departures=workers.generation.departures,
        )

    def require_prepared(self) -> Prepared:
        """Models and optimizers, which are there by now."""
        assert self.prepared is not None, "there is something to train"
        return self.prepared

    def capture(self) -> Snapshot:
        """All of it, at a step boundary."""
        own = {
            "about": dict(self._about),
            "monitors": self.monitors.state_dict(),
            "loss_scale": self.loss_scale.state_dict(),
            "adaptation": self.policy_state.state_dict(),
            "strategy": list(self.strategy),
            "doubt": None if self.doubt is None else asdict(self.doubt),
        }
        return capture(self.require_prepared(), self.progress, self.registered, own)

    def resume_from(self, snapshot: Snapshot, *, begins: bool = False) -> None:
        """Set models and position; the rest follows when the script has made everything: see :meth:`settle`.

        Args:
            snapshot: the state.
            begins: whether the script has only begun. Between two loops it may build the model anew: if the state is of
                a later loop, its model need not fit until then.
        """
        prepared = self.require_prepared()
        with all_or_nothing(self, self.monitors, self.loss_scale, self.policy_state, *self.policy_state.policies):
            self.restored, self.original = snapshot, None
            with restoring(snapshot, "progress"):
                self.progress = RunProgress.from_tree(kept(snapshot, "progress"))
            self._recall(snapshot)
            with restoring(snapshot, "adaptation"):
                self.policy_state.load_state_dict(kept(snapshot, "adaptation"))
            may_differ = begins and self.progress.loop > 0
            with suppress(CheckpointError) if may_differ else nullcontext(), restoring(snapshot, "model"):
                restore_models(prepared, snapshot)

    def begin_at(self, snapshot: Snapshot) -> None:
        """Set models, and all that :meth:`settle` does, but begin the script's data anew: for a measurement."""
        self.restored = snapshot
        with restoring(snapshot, "model"):
            restore_models(self.require_prepared(), snapshot)

    def go_back(self, snapshot: Snapshot) -> None:
        """Set an older state that is known to be right, all of it."""
        self.resume_from(snapshot)
        self.settle()
        self.original = None

    def anticipate(self) -> None:
        """Restore what optimizers keep before :meth:`settle` does, for servers that go on with it.

        The state may be that of other optimizers, which the script has yet to make; if not, ``settle`` says so.
        """
        if self.restored is not None and self.prepared is not None:
            with suppress(CheckpointError), restoring(self.restored, "optimizers"):
                restore_kept(self.prepared, self.restored)

    def settle(self) -> bool:
        """Restore all that a state holds, now that the script has made everything.

        The models once more: the script may have changed them since, between two loops that were over. A scheduler sets
        its optimizer's learning rate when it is made, so optimizers come last.

        Returns:
            whether there was anything to restore.
        """
        if self.restored is None or self.prepared is None:
            return False
        snapshot, self.restored = self.restored, None
        with restoring(snapshot, "model"):
            if not holds_models(self.prepared, snapshot):  # some strategies refuse weights that were written
                restore_models(self.prepared, snapshot)
            restore_modes(self.prepared, snapshot)
        self.registered.restore(snapshot)
        with restoring(snapshot, "optimizers"):
            restore_optimizers(self.prepared, snapshot)
        self.original = snapshot
        self._settled = snapshot if self.progress.reading is not None else None
        self._settled_loop = self.progress.loop
        return True

    def require_same_trained(self) -> None:
        """Refuse to compute the first step after a restored one with other parameters frozen.

        Raises:
            CheckpointError: some are; says what to do.
        """
        if self._settled is not None and self.prepared is not None:
            if self.loops == self._settled_loop + 1:  # not if nothing was left of that loop
                require_same_trained(self.prepared, self._settled)
            self._settled = None

    def go_on(self) -> None:
        """Another collective call is complete: all workers have restored what this one has."""
        self.original = None

    def give(self) -> list[Any]:
        """All of it as a tree, for a worker that lacks it."""
        # What a checkpoint held is handed on as it is, as long as the script of some worker has not asked for it.
        restored = self.restored or self.original
        return [restored is not None, *as_tree(restored or self.capture())]

    def take(self, given: Sequence[Any], *, joins: bool, follow: Callable[[], None] | None = None) -> None:
        """Set what another worker gave.

        Args:
            given: what its :meth:`give` returned.
            joins: whether this worker has nothing of its own yet. Otherwise what the script has set meanwhile stays.
            follow: a function that makes here the update that this worker lacks, instead of setting what came of it.
        """
        prepared = self.require_prepared()
        is_restored, *parts = value_of(tuple[bool, int, Any, Any, Any], given, "the state that another worker gave")
        snapshot = as_snapshot(parts)
        if self.is_doubted and snapshot.state.get("doubt") is None:  # the others have gone back
            self.go_back(snapshot)
        elif joins or (is_restored and self.original is None):
            self.resume_from(snapshot, begins=is_restored)
            if joins and self.progress.reading is not None:  # what computes is made before its script's next line
                require_same_trained(prepared, snapshot)
        else:
            with all_or_nothing(self, self.monitors, self.loss_scale):
                self._recall(snapshot)
                if follow is not None:
                    follow()
                    return
                with restoring(snapshot, "model or optimizers"):
                    restore_update(prepared, snapshot)

    def _recall(self, snapshot: Snapshot) -> None:
        with restoring(snapshot, "monitors"):
            self.monitors.load_state_dict(kept(snapshot, "monitors"))
        if "loss_scale" in snapshot.state:  # not in checkpoints of earlier versions
            with restoring(snapshot, "loss_scale"):
                self.loss_scale.load_state_dict(snapshot.state["loss_scale"])
        with restoring(snapshot, "strategy"):
            self.strategy = value_of(tuple[str, dict[str, Any]], kept(snapshot, "strategy"), "strategy")
        with restoring(snapshot, "doubt"):
            self.doubt = value_of(Doubt | None, snapshot.state.get("doubt"), "doubt")
