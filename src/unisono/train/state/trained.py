"""The state of a run, models and position, as one thing that is kept, restored and handed on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from unisono.adapt.norms import GradientNorms, NoiseAverage, loss_variance
from unisono.adapt.view import Setting, Timings
from unisono.checkpoint.snapshot import Snapshot, as_snapshot, as_tree
from unisono.data.stream_reader import ReaderState
from unisono.errors import CheckpointError, Unreadable
from unisono.plan.batches import Position
from unisono.plan.topology import Links
from unisono.received import short, value_of
from unisono.train.group.workers import Workers
from unisono.train.model.prepared import Prepared
from unisono.train.state.model_state import ModelState, OptimizerState, require_same_trained
from unisono.train.state.policy_state import PolicyState
from unisono.train.state.registry import UPDATE, Attribute, Registry, kept


@dataclass(frozen=True, slots=True)
class Reading:
    """The settings that decide, besides the job, which samples a loop's batches hold.

    Attributes:
        order: a digest of what a loader's sampler gives for the first epoch; empty without a sampler.
        content: a digest of what a few of the samples hold; empty where that was not noted.
        filled: the number of shards that have samples, where the size of the batches decides it; else None.
    """

    samples: int
    shuffle: bool
    drop_last: bool
    order: str = ""
    content: str = ""
    filled: int | None = None

    def can_continue(self, before: Reading) -> bool:
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

    def __post_init__(self) -> None:
        at = self.position
        if min(self.loop, at.step, at.samples, at.epoch, at.offset, *(reader.samples for reader in self.readers)) < 0:
            raise Unreadable(f"{short(asdict(self))} does not say where a run stands")


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


# The factor that keeps gradients of float16 above 0: it halves when they overflow, and grows when they do not.

FIRST, GROWTH_STEPS = 2.0**16, 2000
"""As ``torch.amp.GradScaler`` has them."""

LEAST, MOST = 2.0**-20, 2.0**32
"""The least is below 1, since losses are multiplied by their shard's weight as well: by its number of tokens, say."""


@dataclass(eq=False, slots=True)
class LossScale:
    """The factor by which losses are multiplied before the backward pass, and sums of gradients divided.

    Each factor is a power of two, so both are exact. It changes by what all workers know: whether their gradient, added
    up, is finite. So it is the same on every number of workers. See Micikevicius and others, "Mixed Precision Training"
    (2018), and ``torch.amp.GradScaler``.

    Attributes:
        steps: the number of updates since it was changed last.
    """

    value: float = FIRST
    steps: int = 0

    def __post_init__(self) -> None:
        is_one = LEAST <= self.value <= MOST and math.frexp(self.value)[0] == 0.5
        if not (is_one and 0 <= self.steps < GROWTH_STEPS):
            raise Unreadable(f"{short(asdict(self))} is no loss scale")

    def updated(self) -> None:
        """Note that an update was made."""
        self.steps += 1
        if self.steps >= GROWTH_STEPS:
            self.value, self.steps = min(2 * self.value, MOST), 0

    def overflowed(self) -> None:
        """Note that a gradient was not finite, and its step is skipped."""
        self.value, self.steps = max(self.value / 2, LEAST), 0


NAMES = ("gradient_norm", "gradient_variance", "gradient_signal", "noise_scale", "ada_scale_gain", "loss_variance")
"""In ``metrics.jsonl``, in steps that are watched."""


@dataclass(eq=False)
class Monitors:
    """The measurements of the steps so far. All but times are the same on every worker, for every number of workers.

    Attributes:
        newest: the norms of the gradients of the newest step that was watched.
        step: the number of that step.
        steady: the number of steps in a row under these conditions.
        timings: the times of the newest step, by rank.
        seconds: the seconds of training so far: the slowest worker's step times, added up.
        critical_step: the newest one that was measured, from which the next measurement starts; 1 before the first.
    """

    noise: NoiseAverage = field(default_factory=NoiseAverage)
    newest: GradientNorms | None = None
    step: int = -1
    setting: Setting = field(default_factory=Setting)
    steady: int = 0
    timings: tuple[Timings, ...] = ()
    seconds: float = 0.0
    links: Links | None = None
    critical_step: float = 1.0

    def time(self, setting: Setting, timings: Sequence[Timings]) -> None:
        """Note the times of a committed step."""
        self.steady = self.steady + 1 if setting == self.setting else 1
        self.setting, self.timings = setting, tuple(timings)
        self.seconds += max(worker.step_s for worker in timings)

    @property
    def times(self) -> dict[str, Any]:
        """Return the times of the newest step, and how it was computed."""
        setting = {**asdict(self.setting), "steady": self.steady, "seconds": self.seconds}
        return {"workers": [asdict(worker) for worker in self.timings], "setting": setting}

    def see(self, step: int, norms: GradientNorms, losses: Sequence[float]) -> dict[str, float]:
        """A step was committed. Return figures by name, without those that are not known yet."""
        self.noise = self.noise.after(norms)
        self.newest, self.step = norms, step
        samples, known = sum(norms.sizes), dict[str, float | None]()
        if (noise := self.noise.noise) is not None:
            known = {"gradient_variance": noise.variance, "gradient_signal": noise.signal, "noise_scale": noise.scale}
            known["ada_scale_gain"] = noise.gain(samples / len(norms.sizes), samples)
        spread = loss_variance(losses, norms.sizes)
        figures = {"gradient_norm": math.sqrt(norms.mean), **known, "loss_variance": spread}
        return {name: value for name, value in figures.items() if value is not None}

    def norms_of(self, step: int) -> GradientNorms | None:
        """Return the norms of the gradients of a step, if it is the newest one that was watched."""
        return self.newest if step == self.step else None


class Trained:
    """The state of a run: models and optimizers, the position in the data, and what else is registered.

    Attributes:
        prepared: models and optimizers; None before ``run.prepare``.
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
        self.monitors = Monitors()
        self.loss_scale = LossScale()
        self.strategy: tuple[str, dict[str, Any]] = "", {}
        self.doubt: Doubt | None = None
        self.restored: Snapshot | None = None
        self.original: Snapshot | None = None
        self._about = about
        self.registry = self._registry()
        self._settled: Snapshot | None = None  # in the middle of a loop; as long as no step was computed after it

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
        """Return a snapshot of the whole state, at a step boundary."""
        return self.registry.capture(self.progress.position.step)

    def resume_from(self, snapshot: Snapshot, *, begins: bool = False) -> None:
        """Set models and position; the rest follows when the script has made everything: see :meth:`settle`.

        ``begins`` says that the script has only begun. Between two loops it may build the model anew: if the state is
        of a later loop, its model need not fit until then.
        """
        with self.registry.all_or_nothing():
            self.registry.restore(snapshot, "early")
            with suppress(CheckpointError) if begins and self.progress.loop > 0 else nullcontext():
                self.registry.restore(snapshot, "weights")
            self.restored, self.original = snapshot, None

    def begin_at(self, snapshot: Snapshot) -> None:
        """Set models, and all that :meth:`settle` does, but begin the script's data anew: for a measurement."""
        self.restored = snapshot
        self.registry.restore(snapshot, "weights")

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
            with suppress(CheckpointError):
                self.registry.restore(self.restored, "kept")

    def settle(self) -> bool:
        """Restore all that a state holds, now that the script has made everything.

        Return whether there was anything to restore.
        """
        if self.restored is None or self.prepared is None:
            return False
        snapshot, self.restored = self.restored, None
        self.registry.restore(snapshot, "script", "last")
        self.original = snapshot
        self._settled = snapshot if self.progress.reading is not None else None
        return True

    def require_same_trained(self) -> None:
        """Refuse to compute the first step after a restored one with other parameters frozen.

        Raises:
            CheckpointError: some are; says what to do.
        """
        if self._settled is not None and self.prepared is not None:
            # Not if nothing was left of that loop.
            if self.loops == kept(self._settled, "progress", "loop") + 1:
                require_same_trained(self.prepared, self._settled)
            self._settled = None

    def go_on(self) -> None:
        """Note that another collective call is complete: all workers have restored the same state."""
        self.original = None

    def give(self) -> list[Any]:
        """Return the whole state as a tree, for a worker that lacks it."""
        # What a checkpoint held is handed on as it is, as long as the script of some worker has not asked for it.
        restored = self.restored or self.original
        return [restored is not None, *as_tree(self.registry.handed_over(restored or self.capture()))]

    def take(self, state: Sequence[Any], *, joins: bool, follow: Callable[[], None] | None = None) -> None:
        """Set the state that another worker gave.

        If this worker ``joins``, it has nothing of its own yet; otherwise what the script has set meanwhile stays.
        ``follow`` makes the update that this worker lacks, instead of setting what came of it.
        """
        prepared = self.require_prepared()
        is_restored, *parts = value_of(tuple[bool, int, Any, Any, Any], state, "the state that another worker gave")
        snapshot = as_snapshot(parts)
        if self.is_doubted and snapshot.state.get("doubt") is None:  # the others have gone back
            self.go_back(snapshot)
        elif joins or (is_restored and self.original is None):
            self.resume_from(snapshot, begins=is_restored)
            if joins and self.progress.reading is not None:  # what computes is made before its script's next line
                require_same_trained(prepared, snapshot)
        else:
            with self.registry.all_or_nothing():
                self.registry.restore(snapshot, "behind")
                if follow is not None:
                    follow()
                else:
                    self.registry.restore(snapshot, "weights", "kept")

    def _registry(self) -> Registry:
        """The registry with the state of this object itself. Other objects add their state."""
        registry = Registry()
        add = partial(registry.add, within=())
        add("about", Attribute(self, "_about", dict), when=(), hand_over=False)
        add("progress", Attribute(self, "progress", RunProgress), when=("early",))
        add("monitors", Attribute(self, "monitors", Monitors), when=UPDATE)
        # Checkpoints of earlier versions have none.
        add("loss_scale", Attribute(self, "loss_scale", LossScale), when=UPDATE, optional=True)
        add("strategy", Attribute(self, "strategy", tuple[str, dict[str, Any]]), when=UPDATE)
        add("doubt", Attribute(self, "doubt", Doubt | None), when=UPDATE, optional=True)
        self.policy_state.register(registry)
        registry.put(ModelState(self.require_prepared))
        registry.put(OptimizerState(self.require_prepared))
        return registry
