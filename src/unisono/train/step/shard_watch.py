"""Finds state that the passes of shards change, and that nothing keeps: it would depend on the number of workers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum
from functools import partial

import torch
from torch import Tensor, nn

from unisono.changes import Changed, Look, Memento, enlarge
from unisono.job import SAMPLES_PER_SHARD
from unisono.reachable import Place
from unisono.train.model.places import BufferPlace
from unisono.train.model.prepared import Prepared
from unisono.train.state.unnamed import UnnamedStates
from unisono.train.step.part import Attempt, EngineBase, Part

FIRST, EVERY = 3, 64
"""Shards are watched in the first three calls, and in every 64th after them."""

DEPENDS = (
    "{path} changes while shards are computed, and {how}: each worker changes its own, once for each of its shards, so "
    "the weights would depend on the number of workers, and a worker that joins or resumes begins with another value"
)

NORMALISED = re.compile(r"running_(mean|var)|num_batches_tracked|moving_(mean|variance)|norm", re.IGNORECASE)
"""Names of buffers and of modules whose statistics are averaged."""


class Effect(Enum):
    """What is known of places that shards have changed."""

    DECIDES = "a gradient goes by them"
    NOTHING = "no gradient goes by them"
    UNKNOWN = "they cannot be put back"
    TWO_ANSWERS = "they are put back, and the gradient of a shard is another one all the same"
    LATER = "they are put back in the next call that is watched"


def _is_quiet(changed: Changed) -> bool:
    """Whether a place looks as if it decides nothing."""
    return changed.kind == "record" or changed.is_known


class ShardWatch(Part):
    """Compares what can be reached from models, loss function and data before and after a call's shards.

    What has changed is put back, and a shard is computed again: if its gradient is another one then, the state decides
    bits. So is it with numbers that are far larger, since a counter may decide later. What decides nothing (a map of
    attention that is kept to be shown, a counter of log lines) is passed over.
    """

    def __init__(self, states: UnnamedStates) -> None:
        self._states, self._calls = states, 0
        self._prepared: Prepared | None = None
        self._before: Look | None = None
        self._suspected: frozenset[str] = frozenset()
        self._places: list[Place] = []
        self._memento: Memento | None = None
        self._buffers_told = False
        self._unkept: set[str] = set()

    def join(self, base: EngineBase) -> None:
        """Begin a generation, or another model."""
        if base.prepared is not self._prepared:
            self._calls, self._prepared = 0, base.prepared
        self._base = base
        self._has_one_device = self._can_repeat = base.workers.devices.count == 1

    def attempt(self, attempt: Attempt) -> None:
        """Look at the state before the shards, if this call is watched."""
        self._before = self._memento = None
        # Where a shard is a turn of the script's own loop, its body would run more often than the script has asked.
        self._can_repeat = self._has_one_device and not getattr(attempt.call.loss_fn, "runs_body", False)
        if self._calls < FIRST or self._calls % EVERY == 0:
            self._before = self._states.look()
            if self._places and self._is_tested():
                self._memento = Memento(self._places)

    def computed(self, attempt: Attempt) -> None:
        """Look at the state after the shards, and tell what has changed.

        Raises:
            UnnamedState: something has, and the run is strict.
        """
        self._calls += 1
        if self._before is None or not any(shard.samples for shard in attempt.shards):
            return
        before, self._before = self._before, None
        changes = list(before.changed_until(self._states.look()))
        if changes:
            effect = self._tested(attempt, changes)
            for changed in changes:
                self._tell(changed, effect, is_only=all(map(_is_quiet, changes)))
        self._memento = None
        self._places, self._suspected = [changed.place for changed in changes], frozenset(c.path for c in changes)
        self._states.by_shards.update(self._suspected)
        if not self._buffers_told and attempt.call.batch.shards > 1:
            self._tell_of_buffers(attempt)

    def gradient(self, attempt: Attempt) -> None:
        """Warn of a gradient that is zero everywhere, which shards of few samples may explain."""
        if self._calls > FIRST:
            return
        sizes = [len(attempt.call.batch.shard(number)) for number in range(attempt.call.batch.shards)]
        shards, samples = sum(map(bool, sizes)), sizes[0]
        if shards == 1 or samples >= SAMPLES_PER_SHARD:
            return
        gradients = [parameter.grad for parameter in self._base.prepared.parameters.values()]
        if not any(gradient is not None and bool(torch.count_nonzero(gradient)) for gradient in gradients):
            self._states.tell("gradient", NO_GRADIENT.format(shards=shards, samples=samples), SHARDS, breaks=False)

    def _tell(self, changed: Changed, effect: Effect, *, is_only: bool) -> None:
        """Tell of a place that decides bits, or may."""
        path = changed.path
        if self._states.is_combined(path):
            self._tell_of_combined(path, effect)
        elif effect is Effect.DECIDES and (is_only or not _is_quiet(changed)):
            self._states.tell(path, DEPENDS.format(path=path, how="the gradient goes by it"))
        elif effect is Effect.TWO_ANSWERS and (is_only or not _is_quiet(changed)):
            self._states.tell(
                path, DEPENDS.format(path=path, how="a shard that is computed again has another gradient")
            )
        elif not _is_quiet(changed) and self._is_lost(changed, effect):
            kind = "a random generator" if changed.kind == "generator" else "an iterator"
            self._states.tell(path, DEPENDS.format(path=path, how=f"it is {kind} of its own"), DRAW)
        elif effect is Effect.UNKNOWN and not _is_quiet(changed) and self._may_decide(changed):
            self._states.tell(path, DEPENDS.format(path=path, how="what they compute may go by it"))

    def _may_decide(self, changed: Changed) -> bool:
        return changed.kind in ("number", "text") and not changed.is_first and changed.place.is_script

    def _tell_of_combined(self, path: str, effect: Effect) -> None:
        if effect is Effect.DECIDES:
            self._states.tell(path, AS_BEGUN.format(path=path), KNOW, breaks=False)

    def _is_lost(self, changed: Changed, effect: Effect) -> bool:
        """Whether a place cannot be put back, and what it gives is drawn from."""
        is_unkept = effect is Effect.UNKNOWN or changed.path in self._unkept
        return changed.kind == "position" or (changed.kind == "generator" and is_unkept)

    def _is_tested(self) -> bool:
        """Whether a call that is watched repeats a shard: the first ones, and ever fewer behind them."""
        rounds = self._calls // EVERY
        return self._can_repeat and rounds & (rounds - 1) == 0

    def _tested(self, attempt: Attempt, changes: Sequence[Changed]) -> Effect:
        """Whether a shard has another gradient when what has changed is as it was, or when numbers are far larger."""
        new = [changed for changed in changes if changed.path not in self._suspected]
        if not self._can_repeat:
            return Effect.UNKNOWN
        if not self._is_tested() or not all(changed.can_be_undone for changed in new):
            return Effect.LATER
        after = Memento(changed.place for changed in changes)
        own = [shard.number for shard in attempt.shards if shard.samples][-1]  # the first one may have set something up
        digests: list[str | None] = []
        with self._states.trying():
            for prepare in (after.restore, partial(self._put_back, new), partial(enlarge, changes), after.restore):
                after.restore()
                try:
                    prepare()
                    digests.append(attempt.again(own))
                except Exception:  # noqa: BLE001 (the script's own code, with values that it did not expect)
                    digests.append(None)
        after.restore()
        self._unkept = after.unkept
        if digests[0] is None:
            return Effect.UNKNOWN
        if digests[0] != digests[3]:
            return Effect.TWO_ANSWERS
        return Effect.DECIDES if len(set(digests)) > 1 else Effect.NOTHING

    def _put_back(self, new: Sequence[Changed]) -> None:
        """Put back what was there before the call."""
        if self._memento is not None:
            self._memento.restore()
        for changed in new:
            changed.undo()

    def _tell_of_buffers(self, attempt: Attempt) -> None:
        """Tell of buffers that shards write differently, and that are averaged though they are no statistics."""
        self._buffers_told = True
        for number, place in enumerate(self._base.buffers.places):
            results = [self._result(shard.number, number) for shard in attempt.shards if shard.samples]
            written = [result for result in results if result is not None]
            if written and place.chosen is None and place.rule == "mean" and not self._is_statistic(place):
                if len(written) > 1 and all(torch.equal(written[0], other) for other in written[1:]):
                    continue
                name = place.name.removeprefix("state ").removesuffix("._value")
                self._states.tell(name, BUFFER.format(name=name), RULES, breaks=False)

    def _result(self, shard: int, number: int) -> Tensor | None:
        results = self._base.buffers.result(shard)
        return results[number] if results else None

    def _is_statistic(self, place: BufferPlace) -> bool:
        """Whether a buffer belongs to a normalisation."""
        return bool(NORMALISED.search(place.name)) or any(
            module._buffers is place.registry and NORMALISED.search(type(module).__name__)
            for module in _modules(self._base.prepared.modules)
        )


NO_GRADIENT = (
    "the gradient is zero in all parameters. Each of {shards} shards computes its loss from {samples} of the batch's "
    "samples, which leaves nothing of a loss over pairs of samples (contrastive ones, say)"
)

SHARDS = "With shards=1 one worker computes the loss over the whole batch"

AS_BEGUN = (
    "{path} changes while shards are computed, and the gradient goes by it: all shards of a step find it as it was "
    "when the step began, and their changes are made behind it"
)

KNOW = "In the framework alone each batch finds what the one before it has left"

DRAW = (
    "Draw from the global generators of torch, NumPy or Python, which are seeded for each shard and each sample; or "
    'run.register("{name}", …)'
)

BUFFER = (
    "the buffer {name} is written by shards, each of which begins with the same value, and becomes the mean of what "
    "they have made of it"
)

RULES = (
    'Say which rule it needs: run.prepare(…, state={{"{name}": (module, {{"{name}": "last"}})}}) with "first", "last", '
    '"sum", "max", "min" or "cat", or "mean", if that is meant; or have one shard alone (shards=1)'
)


def _modules(modules: Sequence[nn.Module]) -> list[nn.Module]:
    return [module for root in modules for module in root.modules()]
