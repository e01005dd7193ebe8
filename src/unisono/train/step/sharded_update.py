"""The update split between the workers of one host: they share their parameters, and each updates a part of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.checkpoint.quick_digest import Summing, combined, flipped_bits
from unisono.errors import JobError, WorkerLost
from unisono.failpoints import failpoint
from unisono.host.cgroup import read_limits
from unisono.host.memory import MIB, room_mib
from unisono.reduce.buckets import plan_buckets
from unisono.reduce.host_memory import sees_writes
from unisono.reduce.transport import Transport
from unisono.train.config.run_config import Execution
from unisono.train.group.workers import Workers
from unisono.train.model.at_rest import MOST_FLIPPED, kept_by
from unisono.train.model.prepared import Prepared
from unisono.train.model.tensors import Untouched
from unisono.train.model.update import READERS, may_change_gradients, tell_schedulers
from unisono.train.step.host_state import CopiedPiece, HostState, Kind, Rows
from unisono.train.step.parts import Parts, kinds_of, laid_out_like, slice_of
from unisono.train.step.pieces import Slice
from unisono.words import MODULUS, Words

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
        moved: a function that is called when parameters and optimizer state lie in other memory.
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
        moved: Callable[[], None] = lambda: None,
        *,
        looks: bool = False,
        survives: bool = True,
    ) -> None:
        self.has_flipped, self._looks, self._survives = False, looks, survives
        self._transport, self._optimizers, self._moved = transport, prepared.optimizers, moved
        self._parameters = tuple(prepared.parameters.values())
        self._numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        self._buckets = plan_buckets(self._parameters, bucket_bytes)
        self._made: dict[Settings, set[int]] = {}
        self._waits, self._patience = 1, 1
        self._shared: _Shared | None = None
        self._updates = 0  # since it is shared
        self._active: Sequence[Optimizer] = ()
        self._torn = False

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
            self._shared.require_unwritten()
        elif not self._waits:
            self._share(is_right)

    @torch.no_grad()
    def apply(self, optimizers: Sequence[Optimizer]) -> None:
        """Update this worker's part, or all. The weights are half updated until ``finish``."""
        if self._shared is not None and not (self._shared.is_current() and self._have_made(optimizers)):
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

    def is_written(self) -> bool:
        """Whether the script has written to parameters or optimizer state, which it sees by itself alone."""
        return self._shared is not None and self._shared.is_written()

    def part(self) -> None:
        """Scripts have written to what they see: from now on each worker goes on with that, in memory of its own."""
        if self._shared is not None:
            self._part()

    def close(self) -> None:
        """From now on this worker has parameters and optimizer state of its own."""
        if self._shared is not None and not self._torn:
            self._part()

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
    def _finish_alone(self, shared: "_Shared") -> None:
        failpoint("update left alone")
        copied = self._copied(shared)
        every = [Slice(number) for number in range(len(self._parameters))]
        pieces = [every, *(each.piece.slices for each in copied.pieces if not each.is_done)]
        places = copied.places
        shared.point_to(places)
        parts = Parts(self._optimizers, self._parameters, pieces, places, shared.parts.old)
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

    def _have_made(self, optimizers: Sequence[Optimizer]) -> bool:
        """Whether these optimizers have made before what they keep of all that they now update."""
        return all(numbers <= self._made.get(settings, set()) for settings, numbers in self._needed(optimizers))

    def _needed(self, optimizers: Sequence[Optimizer]) -> Iterator[tuple[Settings, set[int]]]:
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            settings = tuple((name, bool(value)) for name, value in group.items() if name != "params")
            yield settings, {self._numbers[id(one)] for one in group["params"] if one.grad is not None}

    @torch.no_grad()
    def _share(self, is_right: Callable[[], bool]) -> None:
        """Move into shared memory what all workers hold alike, each its part. Collective."""
        held = {number: self._kinds_of(number) for number in range(len(self._parameters))}
        told = [self._digest(), int(is_right() and self._has_room(held))]
        if not _all_say(self._transport, told):
            self._wait_longer()
            return
        state = HostState(self._buckets, held, self._transport, keeps=self._survives)
        shared = _Shared(state, self._optimizers, self._parameters, looks=self._looks)
        self._transport.all_gather(torch.zeros(1, dtype=torch.uint8))
        shared.show()
        self._shared, self._updates = shared, 0
        self._moved()

    def _part(self) -> None:
        """Go on in memory of this worker's own, while nobody updates what is shared."""
        assert self._shared is not None, "there is something to part with"
        copied = self._copied(self._shared).places
        if self._shared.is_written():
            copied = self._shared.seen()
        self._shared.point_to(copied)
        self._shared = None
        self._wait_longer()
        self._moved()

    def _copied(self, shared: "_Shared") -> "_Copied":
        copied = shared.copied(self._updates)
        self.has_flipped |= self._looks and copied.has_flipped()
        return copied

    def _wait_longer(self) -> None:
        self._waits, self._patience = self._patience, 2 * self._patience

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
        return sum(sizes) / MIB < room_mib(read_limits())


class _Shared:
    """What is shared, and this worker's part of it.

    Attributes:
        state: the memory.
        parts: optimizers of this worker's slices.
        untouched: a guard of the parameters.
    """

    untouched: Untouched

    def __init__(
        self, state: HostState, optimizers: Sequence[Optimizer], parameters: Sequence[Tensor], *, looks: bool
    ) -> None:
        self.state, self._optimizers, self._parameters = state, optimizers, parameters
        self._places = self.places(state.rows)
        pieces = [piece.slices for piece in state.pieces]
        there = {part.number for part in chain.from_iterable(pieces)}
        rest = tuple(Slice(number) for number in range(len(parameters)) if number not in there)
        for part in chain.from_iterable(pieces):
            self._fill(part)
        self.parts = Parts(optimizers, parameters, [*pieces, rest], self._places, looks=looks)
        state.begin([self.parts.words(place) for place in range(len(pieces))])
        self._pieces = len(pieces)
        self._shown: list[tuple[Optimizer, Tensor, str, Tensor]] = []
        self._addresses: list[int] = []

    def places(self, rows: Rows) -> dict[Kind | None, tuple[Tensor, ...]]:
        """For the weights (None) and each kind, a tensor per parameter in these buffers."""
        return dict(zip([None, *self.state.kinds], self.state.views(rows), strict=True))

    def is_written(self) -> bool:
        """Whether the script has written to what it sees of it."""
        return self.state.is_written is not None and self.state.is_written()

    def require_unwritten(self) -> None:
        """Where nobody can know by the memory, go by what torch has counted.

        Raises:
            ModelError: the script has changed weights.
        """
        if self.state.is_written is None:
            self.untouched.require()

    def seen(self) -> dict[Kind | None, tuple[Tensor, ...]]:
        """What the script sees, with all that it has written, in memory of this worker's own."""
        return self.places([tuple(flat.clone() for flat in row) for row in self.state.shown])

    def show(self) -> None:
        """Let the modules and the script's optimizers hold what is shared."""
        self.point_to(self.places(self.state.shown))
        self.parts.publish()
        self._shown = [
            (optimizer, parameter, name, value)
            for optimizer in self._optimizers
            for parameter in self._parameters
            for name, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        ]
        self._addresses = [parameter.data_ptr() for parameter in self._parameters]
        self.untouched = Untouched(
            self._parameters,
            "With shard_optimizer=True the workers of a host share them, so that each would change them once more",
        )

    def is_current(self) -> bool:
        """Whether modules and optimizers still hold what is shared, and the script has put nothing in its place."""
        return self._addresses == [parameter.data_ptr() for parameter in self._parameters] and all(
            optimizer.state.get(parameter, {}).get(name) is value for optimizer, parameter, name, value in self._shown
        )

    def point_to(self, places: Mapping[Kind | None, Sequence[Tensor]]) -> None:
        """Let the modules and the script's optimizers hold these tensors, save where the script has put others."""
        shown = {id(value) for *_, value in self._shown}
        addresses = self._addresses or [parameter.data_ptr() for parameter in self._parameters]
        for number, parameter in enumerate(self._parameters):
            if parameter.data_ptr() == addresses[number]:
                parameter.data = places[None][number]
            for optimizer in self._optimizers:
                kept: Any = optimizer.state.get(parameter, {})
                for kind in kinds_of(kept):
                    if not self._shown or id(kept[kind[0]]) in shown:
                        kept[kind[0]] = places[kind][number]

    def update(self, number: int, optimizers: Sequence[Optimizer]) -> None:
        """Update this worker's pieces."""

        def change(piece: int) -> int:
            self.parts.update(optimizers, piece)
            return self.parts.words(piece)

        self.state.update(number, change)
        self.parts.update(optimizers, self._pieces)

    def copied(self, number: int) -> "_Copied":
        """All that is shared in memory of this worker's own, after an update or in the middle of one."""
        rows, pieces = self.state.copied(number)
        return _Copied(self.places(rows), pieces)

    def _fill(self, part: Slice) -> None:
        """Copy a slice of the parameter, and of what is kept of it."""
        parameter = self._parameters[part.number]
        kept = [
            (kind, optimizer.state[parameter][kind[0]])
            for optimizer in self._optimizers
            for kind in kinds_of(optimizer.state.get(parameter, {}))
        ]
        for kind, value in [(None, parameter.detach()), *kept]:
            whole = self._places[kind][part.number]
            slice_of(whole, part).copy_(slice_of(laid_out_like(whole, value), part))


@dataclass(frozen=True, slots=True)
class _Copied:
    """What was shared, in memory of this worker's own.

    Attributes:
        places: a tensor per parameter, of the weights (None) and of each kind.
        pieces: its pieces.
    """

    places: Mapping[Kind | None, Sequence[Tensor]]
    pieces: Sequence[CopiedPiece]

    def has_flipped(self) -> bool:
        """Whether a bit is another one than its worker has left. A larger difference is a write of the script."""
        now = [sum(map(self._words, each.piece.slices)) % MODULUS for each in self.pieces]
        return any(
            0 < flipped_bits([each.words], [words]) <= MOST_FLIPPED
            for each, words in zip(self.pieces, now, strict=True)
        )

    def _words(self, part: Slice) -> int:
        return sum(Words(slice_of(tensors[part.number], part)).sum() for tensors in self.places.values())


def _all_say(transport: Transport, numbers: Sequence[int]) -> bool:
    """Whether all workers have the same numbers, the last of which is not 0. Collective."""
    rows = transport.all_gather(torch.tensor(numbers)).tolist()
    return all(row == list(numbers) for row in rows) and bool(numbers[-1])


def why_whole(prepared: Prepared, workers: Workers, execution: Execution) -> str:
    """Why each worker makes whole updates; empty if the workers of this host split them.

    Args:
        prepared: models and optimizers.
        workers: the workers of the generation. If workers come and go, those of the next may share memory or not.
        execution: the settings of the computation.

    Raises:
        JobError: updates are to be split, and an optimizer needs whole tensors, or the workers never share memory.
    """
    wanted, seat = execution.shard_optimizer, workers.transport.seat
    if not wanted:
        return "nobody has asked to split them"
    why = _why_unfit(prepared.optimizers)
    if why and wanted is True:
        raise JobError(f"shard_optimizer=True {why}")
    if seat is None or any(one.device.type != "cpu" for one in prepared.parameters.values()):
        if wanted is True and not execution.is_elastic:
            raise JobError(
                "shard_optimizer=True needs workers that share memory: on CPUs, exact, and not with "
                "transport='process_group'"
            )
        return "the workers share no memory"
    if wanted == "auto" and not sees_writes():
        return "this system does not say which memory a script has written"
    if seat[1] == 1 and (wanted == "auto" or execution.is_elastic):
        return "a worker is alone on its host"
    return why or ("some workers only serve" if workers.servers else "")


def _why_unfit(optimizers: Sequence[Optimizer]) -> str:
    owned = [id(one) for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]]
    if len(owned) != len(set(owned)):
        return "cannot split the update of parameters that several optimizers update"
    for optimizer in optimizers:
        if type(optimizer) not in READERS:
            names = ", ".join(kind.__name__ for kind in READERS)
            return f"cannot split {type(optimizer).__name__}: it splits optimizers that go element by element ({names})"
        if may_change_gradients(optimizer):
            return "leaves no room for hooks on an optimizer's step: remove them, or go without"
    return ""
