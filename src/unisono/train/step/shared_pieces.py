"""The pieces of work of an update that one worker each does, for all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from unisono.plan.owners import owners_of
from unisono.train.group.workers import Workers
from unisono.train.model.shared_work import Piece, SharingOptimizer
from unisono.train.step.tensor_trees import forms_of, row_of, size_of, tensors_in


class SharedPieces:
    """Has each piece of work done by its owner, before anything changes, and given to all.

    Args:
        workers: the workers that share the work.
        least: the multiplications of a step from which on they do.
    """

    def __init__(self, workers: Workers, least: float) -> None:
        self._workers, self._least = workers, least
        self._found: dict[int, dict[int, Piece]] = {}

    @torch.no_grad()
    def work_out(self, optimizers: Sequence[Optimizer]) -> None:
        """Work out all pieces of the next step of these optimizers. Collective; changes nothing."""
        self._found = {}
        for number, one in enumerate(optimizers):
            if isinstance(one, SharingOptimizer) and self._is_worth(costs := one.pieces()):
                self._found[number] = self._exchanged(one, owners_of(costs, self._workers.world_size))

    def give(self, optimizers: Sequence[Optimizer]) -> None:
        """Let the optimizers have what was worked out, for the step that follows."""
        for number, one in enumerate(optimizers):
            if isinstance(one, SharingOptimizer):
                one.given = self._found.pop(number, {})

    def _is_worth(self, costs: Sequence[float]) -> bool:
        return self._workers.world_size > 1 and bool(costs) and sum(costs) >= self._least

    def _exchanged(self, optimizer: SharingOptimizer, owners: Sequence[int]) -> dict[int, Piece]:
        rank, ranks = self._workers.rank, range(self._workers.world_size)
        owned = [[piece for piece, owner in enumerate(owners) if owner == each] for each in ranks]
        # All know what has which form, so nobody has to tell.
        forms = [[forms_of(optimizer.forms(piece)) for piece in listed] for listed in owned]
        size = max(sum(map(size_of, listed)) for listed in forms)
        own = {piece: optimizer.worked_out(piece) for piece in owned[rank]}
        device = next((one.device for made in own.values() for one in made), torch.device("cpu"))
        rows = self._workers.transport.all_gather(row_of([one for made in own.values() for one in made], size, device))
        found = dict(own)
        for each in ranks:
            if each == rank:
                continue
            tensors = iter(tensors_in(rows[each], [form for listed in forms[each] for form in listed]))
            for piece, listed in zip(owned[each], forms[each], strict=True):
                found[piece] = [next(tensors).clone() for _ in listed]  # or each would keep all rows in memory
        return found
