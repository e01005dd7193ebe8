"""Parameters and optimizer state in the memory of a host: this worker's part of them, and what the script sees."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.checkpoint.quick_digest import flipped_bits
from unisono.reduce.segment import sees_writes
from unisono.train.model.at_rest import MOST_FLIPPED
from unisono.train.model.tensors import Untouched, is_held_elsewhere
from unisono.train.step.host_state import CopiedPiece, HostState
from unisono.train.step.parts import Parts, elements_of, kinds_of, laid_out_like
from unisono.train.step.pieces import Slice
from unisono.train.step.script_memory import Places, Rows, ShownState
from unisono.words import MODULUS, Words


class SharedState:
    """What is shared, and this worker's part of it.

    Args:
        state: the memory.
        optimizers: the script's optimizers.
        parameters: the parameters that they update, by number.
        looks: whether to look for flipped bits.

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
        self._kept: list[tuple[Optimizer, Tensor, str, Tensor]] = []
        self._grouped = _grouping(optimizers)

    @property
    def shown(self) -> ShownState:
        """What the script sees."""
        return self.state.shown

    def places(self, rows: Rows) -> Places:
        """For the weights (None) and each kind, a tensor per parameter in these buffers."""
        return dict(zip([None, *self.state.kinds], self.state.views(rows), strict=True))

    def require_unwritten(self) -> None:
        """Where nobody can know by the memory, go by what torch has counted.

        Raises:
            ModelError: the script has changed weights.
        """
        if not sees_writes():
            self.untouched.require()

    def seen(self) -> Rows:
        """What the script sees, with all that it has written, in memory of this worker's own."""
        return [tuple(flat.clone() for flat in row) for row in self.shown.rows]

    def show(self) -> None:
        """Let the modules and the script's optimizers hold what is shared."""
        self.state.show()
        for _, tensor, place in _moving(self.shown, self._parameters, self._optimizers):
            tensor.data = place
        self.parts.publish()
        self._kept = [
            (optimizer, parameter, name, value)
            for optimizer in self._optimizers
            for parameter in self._parameters
            for name, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        ]
        self.untouched = Untouched(
            self._parameters,
            "With shard_optimizer=True the workers of a host share them, so that each would change them once more",
        )

    def is_current(self) -> bool:
        """Whether modules and optimizers still hold what is shared, and the script has put nothing in its place."""
        is_same = self._grouped == _grouping(self._optimizers)
        return (
            is_same
            and not any(_moving(self.shown, self._parameters, self._optimizers))
            and all(
                optimizer.state.get(parameter, {}).get(name) is value
                for optimizer, parameter, name, value in self._kept
            )
        )

    def keep(self, rows: Rows) -> None:
        """Let the modules and the script's optimizers hold these values from now on, which no other worker sees."""
        self.shown.keep(rows)

    def in_memory(self, tensor: Tensor) -> Tensor:
        """A tensor that the script sees, where all workers of this host have it; any other as it is."""
        for kind, shown in self.shown.tensors.items():
            for number, each in enumerate(shown):
                if each.data_ptr() == tensor.data_ptr():
                    return self._places[kind][number]
        return tensor

    def update(self, number: int, optimizers: Sequence[Optimizer]) -> None:
        """Update this worker's pieces."""

        def change(piece: int) -> int:
            self.parts.update(optimizers, piece)
            return self.parts.words(piece)

        self.state.update(number, change)
        self.parts.update(optimizers, self._pieces)

    def copied(self, number: int) -> "CopiedState":
        """All that is shared in memory of this worker's own, after an update or in the middle of one."""
        rows, pieces = self.state.copied(number)
        return CopiedState(rows, self.places(rows), pieces)

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
            elements_of(whole, part).copy_(elements_of(laid_out_like(whole, value), part))


@dataclass(frozen=True, slots=True)
class CopiedState:
    """What was shared, in memory of this worker's own.

    Attributes:
        rows: flat buffers.
        places: the tensors in them.
        pieces: its pieces.
    """

    rows: Rows
    places: Places
    pieces: Sequence[CopiedPiece]

    def has_flipped(self) -> bool:
        """Whether a bit is another one than its worker has left. A larger difference is a write of the script."""
        now = [sum(map(self._words, each.piece.slices)) % MODULUS for each in self.pieces]
        return any(
            0 < flipped_bits([each.words], [words]) <= MOST_FLIPPED
            for each, words in zip(self.pieces, now, strict=True)
        )

    def _words(self, part: Slice) -> int:
        return sum(Words(elements_of(tensors[part.number], part)).sum() for tensors in self.places.values())


NOBODY = -1
"""No parameter's number."""


def why_whole_by_state(
    shown: ShownState, parameters: Sequence[Tensor], optimizers: Sequence[Optimizer], names: Sequence[str]
) -> str:
    """Why tensors of the script cannot lie in the memory that is shown; empty if they can."""
    for number, parameter in enumerate(parameters):
        if parameter.numel() and parameter.stride() != shown.tensors[None][number].stride():
            return f"{names[number]} has gaps between its elements, or other strides than before"
        for state in (optimizer.state.get(parameter, {}) for optimizer in optimizers):
            if odd := next((name for name, _ in kinds_of(state) if state[name].shape != parameter.shape), ""):
                return f"an optimizer keeps {odd} of {names[number]} in another shape than that"
    for number, tensor, _ in _moving(shown, parameters, optimizers):
        if tensor.is_shared() or is_held_elsewhere(tensor):
            return (
                f"something else than the model holds the memory of {names[number]}, or what an optimizer keeps of it: "
                f"a state_dict(), .data, a NumPy array, another process, or a loss with its graph"
            )
    return ""


def _moving(
    shown: ShownState, parameters: Sequence[Tensor], optimizers: Sequence[Optimizer]
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Tensors of the script that lie elsewhere: the parameter's number, the tensor, and where it is to lie."""
    for number, parameter in enumerate(parameters):
        states = (optimizer.state[parameter] for optimizer in optimizers if parameter in optimizer.state)
        kept = ((kind, state[kind[0]]) for state in states for kind in kinds_of(state))
        for kind, tensor in chain([(None, parameter)], kept):
            place = shown.tensors[kind][number] if kind in shown.tensors else _NOWHERE
            if tensor.data_ptr() != place.data_ptr() or (tensor.numel() and tensor.stride() != place.stride()):
                yield number, tensor, place


_NOWHERE = torch.empty(0)
"""The place of what an optimizer did not keep when memory was laid out."""


def _grouping(optimizers: Sequence[Optimizer]) -> list[list[list[int]]]:
    return [[[id(one) for one in group["params"]] for group in optimizer.param_groups] for optimizer in optimizers]
