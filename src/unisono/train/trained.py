"""What a run trains and where it stands, as one thing that is kept, restored and handed on."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from unisono.checkpoint.store import Snapshot
from unisono.errors import CheckpointError, JobMismatch
from unisono.train.adaptation import Adaptation
from unisono.train.checkpoints import shared_snapshot
from unisono.train.digest import checksum
from unisono.train.membership import Arrival
from unisono.train.monitors import Monitors
from unisono.train.prepared import Prepared
from unisono.train.registered import Registered
from unisono.train.state import Progress, capture, restore_kept, restore_models, restore_optimizers, restore_update
from unisono.train.workers import Workers


class Trained:
    """Models and optimizers, the position in the data, and what the script has registered.

    Args:
        about: JSON values that say whose state this is.
        adaptation: policies, and what they have changed.

    Attributes:
        prepared: models and optimizers; None before ``run.prepare``.
        progress: where the run stands.
        registered: objects of the script.
        monitors: what was measured in the steps so far.
        strategy: what the present strategy keeps from round to round: its text, and its state by name.
        restored: what the script has yet to ask for of a state that models are restored from already.
    """

    def __init__(self, about: Mapping[str, Any], adaptation: Adaptation) -> None:
        self.adaptation = adaptation
        self.prepared: Prepared | None = None
        self.progress = Progress()
        self.registered = Registered()
        self.monitors = Monitors()
        self.strategy: tuple[str, dict[str, Any]] = "", {}
        self.restored: Snapshot | None = None
        self._about = about

    def capture(self) -> Snapshot:
        """All of it, at a step boundary."""
        assert self.prepared is not None, "there is something to train"
        own = {
            "about": dict(self._about),
            "monitors": self.monitors.state_dict(),
            "adaptation": self.adaptation.state_dict(),
            "strategy": list(self.strategy),
        }
        return capture(self.prepared, self.progress, self.registered, own)

    def resume_from(self, snapshot: Snapshot) -> None:
        """Set models and position; the rest follows when the script has made everything: see :meth:`settle`."""
        assert self.prepared is not None, "there is something to train"
        restore_models(self.prepared, snapshot)
        self.restored = snapshot
        self.progress = Progress.from_tree(snapshot.state["progress"])
        self._recall(snapshot)
        self.adaptation.load_state_dict(snapshot.state["adaptation"])

    def anticipate(self) -> None:
        """Restore what optimizers keep before :meth:`settle` does, for servers that go on with it.

        The state may be that of other optimizers, which the script has yet to make; if not, ``settle`` says so.
        """
        if self.restored is not None and self.prepared is not None:
            with suppress(CheckpointError):
                restore_kept(self.prepared, self.restored)

    def settle(self) -> bool:
        """Restore what a state holds besides the models, now that the script has made everything.

        A scheduler sets its optimizer's learning rate when it is made, so optimizers come last.

        Returns:
            whether there was anything to restore.
        """
        if self.restored is None or self.prepared is None:
            return False
        snapshot, self.restored = self.restored, None
        self.registered.restore(snapshot)
        restore_optimizers(self.prepared, snapshot)
        return True

    def hand_over(self, workers: Workers, arrival: Arrival) -> None:
        """Whoever is behind gets the state of the source. Collective.

        Raises:
            JobMismatch: what arrived is not what was sent.
        """
        rank, gives = workers.rank, workers.rank == arrival.source
        # What a checkpoint held and the script has not yet asked for is handed on as it is.
        pending = workers.broadcast(self.restored is not None, arrival.source)
        snapshot = shared_snapshot((self.restored or self.capture()) if gives else None, workers, arrival.source)
        assert snapshot is not None, "the source has a state"
        assert self.prepared is not None, "there is something to train"
        if rank in arrival.joiners or (pending and rank in arrival.behind):
            self.resume_from(snapshot)
        elif rank in arrival.behind:
            restore_update(self.prepared, snapshot)
            self._recall(snapshot)
        ours = checksum(self.prepared.tensors()) if gives or rank in arrival.behind else None
        if workers.broadcast(ours, arrival.source) != ours and rank in arrival.behind:
            raise JobMismatch(
                f"rank {rank} has other weights than rank {arrival.source}, from which it was given them: a fault of "
                f"this host's memory, or of Unisono's. This worker ends; the others go on"
            )

    def _recall(self, snapshot: Snapshot) -> None:
        self.monitors.load_state_dict(snapshot.state["monitors"])
        name, state = snapshot.state["strategy"]
        self.strategy = name, dict(state)
