"""The update split between the workers of one host: they share their parameters, and each updates a part of them."""

import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.checkpoint.quick_digest import Summing, combined
from unisono.errors import WorkerLost
from unisono.failpoints import failpoint
from unisono.host.cgroup import read_limits
from unisono.host.memory import MIB, room_mib
from unisono.reduce.buckets import plan_buckets
from unisono.reduce.transport import Transport
from unisono.train.model.at_rest import kept_by
from unisono.train.model.prepared import Prepared
from unisono.train.model.update import tell_schedulers
from unisono.train.step.host_state import HostState, kinds_in
from unisono.train.step.parts import Parts, kinds_of
from unisono.train.step.pieces import Slice
from unisono.train.step.script_memory import Kind, ScriptMemory, ShownState
from unisono.train.step.shared_state import NOBODY, CopiedState, SharedState, why_whole_by_state
from unisono.train.step.why_whole import why_whole_by_optimizers

Settings = tuple[tuple[str, bool], ...]
"""Which of a group's settings are on: by them optimizers decide what they keep."""


class ShardedUpdate:
    """Keeps parameters and optimizer state once per host, and updates this worker's part of every tensor.

    Optimizers that go element by element give the same bits on a part as on the whole, if it is cut at multiples of
    64 elements from the tensor's start: there their vector loops and scalar tails fall on the same elements.
    What ``optimizer.state`` and the modules hold is whole at all times, so a checkpoint needs nothing gathered.

    Every worker begins with a state of its own, and makes whole updates until the optimizers have made all that they
    keep; then the workers of the host share it. An update begins when all are able to finish it. So whoever loses the
    others in it finishes it by itself, in memory of its own again: an update is made whole or not at all.

    Args:
        prepared: models and optimizers; their parameters move into memory that the workers share, and back.
        transport: the transport between the workers.
        bucket_bytes: the size of a group of parameters that lie together, in bytes.
        memory: the memory in which the script sees what is shared.
        moves: a function that is called before parameters and optimizer state may move to other memory: nothing is to
            hold the present one any more.
        moved: a function that is called when they lie in other memory, or are shared or no longer so.
        stays_whole: a function that gets the reason for which updates stay whole for now.
        looks: whether to look for flipped bits in what is shared.
        survives: whether this worker goes on when others are lost. If not, nothing is done so that it could finish an
            update alone.

    Attributes:
        has_flipped: whether a bit of what is shared was another one than the update before had left, when the next one
            was made: too late for that.
    """

    def __init__(
        self,
        prepared: Prepared,
        transport: Transport,
        bucket_bytes: int,
        memory: ScriptMemory,
        *,
        moves: Callable[[], None] = lambda: None,
        moved: Callable[[], None] = lambda: None,
        stays_whole: Callable[[str], None] = lambda why: None,
        looks: bool = False,
        survives: bool = True,
    ) -> None:
        self.has_flipped, self._looks, self._survives = False, looks, survives
        self._transport, self._optimizers, self._memory = transport, prepared.optimizers, memory
        self._moves, self._moved, self._stays_whole = moves, moved, stays_whole
        self._names, self._parameters = list(prepared.parameters), tuple(prepared.parameters.values())
        self._numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        self._buckets = plan_buckets(self._parameters, bucket_bytes)
        self._made: dict[Settings, set[int]] = {}
        self._waits, self._patience = 1, 1
        self._shared: SharedState | None = None
        self._updates = 0  # since it is shared
        self._active: Sequence[Optimizer] = ()
        self._torn = False
        self._left: Mapping[int, Sequence[Kind]] = {}  # kept when the whole update before it is shared was done

    @property
    def bytes_shared(self) -> int:
        """What parameters and optimizer state take, once for all workers of this host; 0 while each has its own."""
        return 0 if self._shared is None else self._shared.state.nbytes

    @property
    def is_shared(self) -> bool:
        """Whether parameters and optimizer state lie in memory that the workers of this host share."""
        return self._shared is not None

    @property
    def parts(self) -> list[tuple[Tensor, Tensor]]:
        """Parameters, each with elements that this worker updates; several of one, or none."""
        if self._shared is None:
            return []
        return [(self._parameters[number], tensor) for number, tensor in self._shared.parts.tensors]

    def kept(self) -> list[Tensor]:
        """This worker's part of what optimizers keep; all of it as long as it is not shared."""
        return kept_by(self._optimizers) if self._shared is None else self._shared.parts.kept()

    def sums(self) -> list[int] | None:
        """Of the words of :attr:`parts` and :meth:`kept`, as the update has left them; None if they are to be read."""
        return None if self._shared is None or not self._looks else self._shared.parts.sums()

    def require_whole(self) -> None:
        """Refuse weights that an error has left half updated.

        Raises:
            WorkerLost: says how to go on.
        """
        if self._torn:
            raise WorkerLost(
                "an update has stopped in the middle, and the weights that the workers of this host share are half "
                "updated: start the job again, it goes on from its newest checkpoint"
            )

    def begin(self, is_right: Callable[[], bool]) -> None:
        """A step begins. Collective.

        Args:
            is_right: whether nothing is known against what this worker holds.

        Raises:
            WorkerLost: the weights are half updated, or another worker is gone.
            ModelError: the script has changed weights, and they are the other workers' as well.
        """
        self.require_whole()
        if self._shared is not None:
            self._shared.shown.body_ends()
            self._shared.require_unwritten()
        elif not self._waits:
            self._share(is_right)

    def work_out(self, optimizers: Sequence[Optimizer]) -> None:
        """Each worker's part is worked out where it lies."""

    @torch.no_grad()
    def apply(self, optimizers: Sequence[Optimizer]) -> None:
        """Update this worker's part, or all. The weights are half updated until ``finish``."""
        if self._shared is not None and not self._have_made(optimizers):
            self._part()
        if self._shared is None:
            self._update_whole(optimizers)
            return
        self._torn, self._active = True, optimizers
        self._updates += 1
        self._shared.parts.begin(optimizers)
        if not self._survives or self._meets():  # all have what they need to finish this update alone
            failpoint("update begins")
            self._shared.update(self._updates, optimizers)
            self.has_flipped |= self._shared.parts.has_flipped
            tell_schedulers(optimizers)

    def finish(self) -> None:
        """Wait until all workers have updated their parts; or make the whole update, if one is gone.

        As soon as the others go on, this worker's part may be read, or hit by a fault.

        Raises:
            WorkerLost: another worker is gone, and with it its part of the update; of a worker that does not survive
                that.
        """
        if self._torn:
            self._meets()
        self._torn = False
        if self._shared is not None:
            self._shared.shown.body_begins()

    def in_memory(self, tensor: Tensor) -> Tensor:
        """A tensor of the script where it really lies, for all workers of this host, if it is shared."""
        return tensor if self._shared is None else self._shared.in_memory(tensor)

    def must_part(self) -> bool:
        """Whether this worker cannot go on sharing: its script has written to the state, replaced it, or hooks in."""
        if self._shared is None:
            return False
        is_written = self._shared.shown.is_found_written()
        return is_written or not self._shared.is_current() or bool(why_whole_by_optimizers(self._optimizers))

    def part(self) -> None:
        """From now on each worker goes on with what its script sees, in memory of its own."""
        if self._shared is not None:
            self._part()

    def close(self) -> None:
        """From now on this worker has parameters and optimizer state of its own."""
        if self._shared is not None and not self._torn:
            self._part()
        # Else whoever has given these functions, and all that hangs on it, would wait for the collector of cycles.
        self._moves = self._moved = _nothing

    def _meets(self) -> bool:
        """Whether all workers are here; if not, this one makes the update alone."""
        if self._shared is None:
            return False
        try:
            self._transport.all_gather(torch.zeros(1, dtype=torch.uint8))
        except WorkerLost:
            if not self._survives:
                raise
            self._transport.abort()  # the others need not wait until this one is done
            self._finish_alone(self._shared)
            return False
        return True

    @torch.no_grad()
    def _finish_alone(self, shared: SharedState) -> None:
        failpoint("update left alone")
        copied = self._copied(shared)
        every = [Slice(number) for number in range(len(self._parameters))]
        pieces = [every, *(each.piece.slices for each in copied.pieces if not each.is_done)]
        shared.keep(copied.rows)
        parts = Parts(self._optimizers, self._parameters, pieces, shared.shown.tensors, shared.parts.old)
        parts.begin(self._active)
        for number in range(len(pieces)):
            parts.update(self._active, number)
        parts.publish()
        tell_schedulers(self._active)
        self._shared = None
        self._moved()
        failpoint("update made alone")

    def _update_whole(self, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:
            optimizer.step()
        for settings, numbers in self._needed(optimizers):
            self._made.setdefault(settings, set()).update(numbers)
        self._waits = max(0, self._waits - 1)
        if not self._waits:
            self._left = self._held()

    def _have_made(self, optimizers: Sequence[Optimizer]) -> bool:
        """Whether these optimizers have made before what they keep of all that they now update."""
        return all(
            NOBODY not in numbers and numbers <= self._made.get(settings, set())
            for settings, numbers in self._needed(optimizers)
        )

    def _needed(self, optimizers: Sequence[Optimizer]) -> Iterator[tuple[Settings, set[int]]]:
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            settings = tuple((name, _is_on(value)) for name, value in group.items() if name != "params")
            yield settings, {self._numbers.get(id(one), NOBODY) for one in group["params"] if one.grad is not None}

    @torch.no_grad()
    def _share(self, is_right: Callable[[], bool]) -> None:
        """Move into shared memory what all workers hold alike, each its part. Collective."""
        held = self._held()
        shown = self._memory.laid_out(self._buckets, kinds_in(held))
        self._moves()
        why = "a bit of its memory has flipped" if not is_right() else self._why_whole_now(held, shown)
        told = torch.tensor([self._digest(), int(not why)])
        everybody = self._transport.all_gather(told).tolist()
        if any(row != [everybody[0][0], 1] for row in everybody):
            self._stays_whole(why or "another worker cannot share its memory for now, or holds other values")
            self._wait_longer()
            return
        state = HostState(self._buckets, held, self._transport, shown, keeps=self._survives)
        shared = SharedState(state, self._optimizers, self._parameters, looks=self._looks)
        self._transport.all_gather(torch.zeros(1, dtype=torch.uint8))
        shared.show()
        self._shared, self._updates = shared, 0
        self._moved()

    def _part(self) -> None:
        """Go on in memory of this worker's own, while nobody updates what is shared."""
        assert self._shared is not None, "there is something to part with"
        rows = self._copied(self._shared).rows
        self._shared.keep(self._shared.seen() if self._shared.shown.is_written() else rows)
        self._shared = None
        self._wait_longer()
        self._moved()

    def _copied(self, shared: SharedState) -> CopiedState:
        copied = shared.copied(self._updates)
        self.has_flipped |= self._looks and copied.has_flipped()
        return copied

    def _wait_longer(self) -> None:
        self._waits, self._patience = self._patience, 2 * self._patience

    def _why_whole_now(self, held: Mapping[int, Sequence[Kind]], shown: ShownState) -> str:
        """Why the state cannot be shared as it is now; empty if it can."""
        if why := why_whole_by_optimizers(self._optimizers):
            return why
        if held != self._left:
            return "the script has changed what the optimizers keep"
        if (why := why_whole_by_state(shown, self._parameters, self._optimizers, self._names)) or self._has_room(held):
            return why
        return "there is too little memory to share it"

    def _held(self) -> dict[int, list[Kind]]:
        """What is kept of each parameter, by its number."""
        return {number: self._kinds_of(number) for number in range(len(self._parameters))}

    def _kinds_of(self, number: int) -> list[Kind]:
        parameter = self._parameters[number]
        return [kind for one in self._optimizers if parameter in one.state for kind in kinds_of(one.state[parameter])]

    def _digest(self) -> int:
        return combined(Summing()([*self._parameters, *kept_by(self._optimizers)])) >> 1  # fits a signed word

    def _has_room(self, held: Mapping[int, Sequence[Kind]]) -> bool:
        sizes = (
            parameter.numel() * (parameter.itemsize + sum(dtype.itemsize for _, dtype in held[number]))
            for number, parameter in enumerate(self._parameters)
        )
        needed = sum(sizes)
        most, _ = resource.getrlimit(resource.RLIMIT_AS)
        if most != resource.RLIM_INFINITY and psutil.Process().memory_info().vms + MAPPED * needed > most:
            return False
        return needed / MIB < room_mib(read_limits())


MAPPED = 4
"""How often a worker maps what is shared, at most: to update it, to see it, and twice while that changes."""


def _is_on(value: Any) -> bool:
    return value.numel() > 1 or bool(value) if isinstance(value, Tensor) else bool(value)


def _nothing() -> None:
    return None
