"""Pieces of work of an update, each of which its owner does for all workers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.plan.split import owners_of
from unisono.train.group.workers import Workers
from unisono.train.model.shared_work import Piece, SharingOptimizer
from unisono.train.step.part import Attempt, Part
from unisono.train.step.tensor_trees import forms_of, row_of, size_of, tensors_in


class SharedPieces(Part):
    """Has the owner of each piece of work do it before anything changes, and sends all workers the results.

    Args:
        least: the number of multiplications in a step from which on sharing is worth its messages.
    """

    def __init__(self, workers: Workers, least: float) -> None:
        self._workers, self._least = workers, least
        self._results: dict[int, dict[int, Piece]] = {}

    @torch.no_grad()
    def work_out(self, attempt: Attempt) -> None:
        """Work out all pieces of the next step of the optimizers. Collective; changes nothing."""
        self._results = {}
        for number, optimizer in enumerate(attempt.call.optimizers if attempt.call.update is None else ()):
            if isinstance(optimizer, SharingOptimizer) and self._is_worth(costs := optimizer.pieces()):
                self._results[number] = self._exchanged(optimizer, owners_of(costs, self._workers.world_size))

    def apply(self, attempt: Attempt) -> None:
        """Give the optimizers the results, for the step that follows."""
        for number, optimizer in enumerate(attempt.call.optimizers if attempt.call.update is None else ()):
            if isinstance(optimizer, SharingOptimizer):
                optimizer.given = self._results.pop(number, {})

    def _is_worth(self, costs: Sequence[float]) -> bool:
        return self._workers.world_size > 1 and bool(costs) and sum(costs) >= self._least

    def _exchanged(self, optimizer: SharingOptimizer, owners: Sequence[int]) -> dict[int, Piece]:
        rank, ranks = self._workers.rank, range(self._workers.world_size)
        owned = [[piece for piece, owner in enumerate(owners) if owner == peer] for peer in ranks]
        # All workers know all forms, so that none has to be sent.
        forms = [[forms_of(optimizer.forms(piece)) for piece in pieces] for pieces in owned]
        size = max(sum(map(size_of, piece_forms)) for piece_forms in forms)
        own = {piece: optimizer.worked_out(piece) for piece in owned[rank]}
        device = next((tensor.device for result in own.values() for tensor in result), torch.device("cpu"))
        rows = self._workers.transport.all_gather(
            row_of([tensor for piece in own.values() for tensor in piece], size, device)
        )
        results = dict(own)
        for peer in ranks:
            if peer == rank:
                continue
            tensors = iter(tensors_in(rows[peer], [form for piece_forms in forms[peer] for form in piece_forms]))
            for piece, piece_forms in zip(owned[peer], forms[peer], strict=True):
                results[piece] = [next(tensors).clone() for _ in piece_forms]  # a view would keep all rows in memory
        return results
