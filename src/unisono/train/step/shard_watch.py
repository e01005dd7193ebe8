"""Finds state that the passes of shards change, and that nothing keeps: it would depend on the number of workers."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from unisono.changes import Changed, Look, Memento, UnkeptError
from unisono.job import SAMPLES_PER_SHARD
from unisono.train.model.places import BufferPlace
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


class ShardWatch(Part):
    """Compares what can be reached from models, loss function and data before and after a call's shards.

    What has changed is put back and a shard is computed again, in the next call that is watched: if its gradient is
    another one then, the state decides bits. Tensors that decide nothing (a map of attention that is kept to be shown)
    are passed over; numbers are not: a counter may decide later.
    """

    def __init__(self, states: UnnamedStates) -> None:
        self._states, self._calls = states, 0
        self._before: Look | None = None
        self._suspected: dict[str, Changed] = {}
        self._memento: Memento | None = None
        self._buffers_told = False

    def join(self, base: EngineBase) -> None:
        """Begin a generation."""
        self._base = base
        self._can_repeat = base.workers.devices.count == 1

    def attempt(self, attempt: Attempt) -> None:
        """Look at the state before the shards, if this call is watched."""
        self._before = self._memento = None
        if self._calls < FIRST or self._calls % EVERY == 0:
            self._before = self._states.look()
            if self._suspected and self._can_repeat:
                try:
                    self._memento = Memento(changed.place for changed in self._suspected.values())
                except UnkeptError:
                    self._memento = None

    def computed(self, attempt: Attempt) -> None:
        """Look at the state after the shards, and tell what has changed.

        Raises:
            UnnamedState: something has, and the run is strict.
        """
        self._calls += 1
        if self._before is None or not any(shard.samples for shard in attempt.shards):
            return
        before, self._before = self._before, None
        changes = [
            changed
            for changed in before.changed_until(self._states.look())
            if changed.kind != "record" and not changed.is_known
        ]
        is_tested = self._memento is not None and {changed.path for changed in changes} <= set(self._suspected)
        decides = is_tested and self._decides(attempt)
        for changed in changes:
            self._tell(changed, decides if is_tested else None)
        self._memento = None
        self._suspected = {changed.path: changed for changed in changes}
        self._states.by_shards.update(self._suspected)
        if not self._buffers_told and attempt.call.batch.shards > 1:
            self._tell_of_buffers(attempt)

    def gradient(self, attempt: Attempt) -> None:
        """Warn of a gradient that is zero everywhere, which shards of few samples may explain."""
        if self._calls > FIRST:
            return
        shards, samples = attempt.call.batch.shards, len(attempt.call.batch.shard(0))
        if shards == 1 or samples >= SAMPLES_PER_SHARD:
            return
        gradients = [parameter.grad for parameter in self._base.prepared.parameters.values()]
        if not any(gradient is not None and bool(torch.count_nonzero(gradient)) for gradient in gradients):
            self._states.tell("gradient", NO_GRADIENT.format(shards=shards, samples=samples), SHARDS, breaks=False)

    def _tell(self, changed: Changed, decides: bool | None) -> None:
        """Tell of a place; ``decides`` says whether a gradient goes by it, as far as that is known."""
        if changed.kind in ("generator", "position"):
            kind = "random generator" if changed.kind == "generator" else "iterator"
            self._states.tell(changed.path, DEPENDS.format(path=changed.path, how=f"it is a {kind} of its own"), DRAW)
        elif decides:
            self._states.tell(changed.path, DEPENDS.format(path=changed.path, how="the gradient goes by it"))
        elif changed.kind in ("number", "text") and not changed.is_first and changed.place.is_script:
            self._states.tell(changed.path, DEPENDS.format(path=changed.path, how="what they compute may go by it"))

    def _decides(self, attempt: Attempt) -> bool:
        """Whether a shard has another gradient when the suspected state is as it was before the call."""
        own = next(shard.number for shard in attempt.shards if shard.samples)
        assert self._memento is not None, "there is something to put back"
        try:
            after = Memento(changed.place for changed in self._suspected.values())
        except UnkeptError:
            return False
        digests = []
        for state in (after, self._memento, after):
            state.restore()
            digests.append(attempt.again(own))
        after.restore()
        return digests[0] == digests[2] != digests[1]

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
