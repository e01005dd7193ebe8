"""Evaluation and prediction, distributed among the workers, and put together by the trainer's own loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers.trainer_pt_utils import find_batch_size

Outcome = tuple[int, Any, Any, Any, Any]
"""Of one batch: the number of its samples, loss, logits, labels, and inputs where metrics ask for them."""


@dataclass(frozen=True)
class BatchPrediction:
    """What the trainer's ``prediction_step`` makes of a batch.

    Attributes:
        trainer: the trainer.
        model: the model, as the trainer evaluates it.
        loss_only: whether nothing but the loss is wanted.
        ignored: the names of outputs that are left out.
    """

    trainer: Any
    model: Any
    loss_only: bool
    ignored: Sequence[str] | None

    def __call__(self, _: Any, inputs: Any) -> Outcome:
        """Predict a batch; logits are preprocessed for metrics here, as that makes them small."""
        trainer = self.trainer
        main = inputs[self.main_input] if "inputs" in trainer.args.include_for_metrics else None
        rows = int(find_batch_size(inputs) or 0)
        loss, logits, labels = trainer.prediction_step(self.model, inputs, self.loss_only, ignore_keys=self.ignored)
        if logits is not None and trainer.preprocess_logits_for_metrics is not None:
            logits = trainer.preprocess_logits_for_metrics(logits, labels)
        return rows, loss, logits, labels, main

    @property
    def main_input(self) -> str:
        """The name of the input that stands for a sample."""
        return str(getattr(self.trainer.model, "main_input_name", "input_ids"))


class Predicted:
    """What all workers have predicted, batch by batch, for the trainer's own evaluation loop.

    Args:
        outcomes: the outcome of each batch, in their order.
        loader: the loader that they came from.
        main_input: the name of the input that stands for a sample.
    """

    def __init__(self, outcomes: Sequence[Outcome], loader: DataLoader[Any], main_input: str) -> None:
        self._outcomes, self._main_input = outcomes, main_input
        self.dataset = loader.dataset
        self._at = 0  # the number of the present batch

    def __len__(self) -> int:
        """The number of batches."""
        return len(self._outcomes)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """As many samples as each batch has, and the inputs where they are asked for."""
        for number, (rows, *_, inputs) in enumerate(self._outcomes):
            self._at = number
            yield {self._main_input: torch.empty(rows) if inputs is None else inputs}

    def prediction_step(self, *_: Any, **__: Any) -> tuple[Any, Any, Any]:
        """What the present batch came to."""
        outcome = self._outcomes[self._at]
        return outcome[1], outcome[2], outcome[3]

    def gathered(self, rows: Any, **_: Any) -> Any:
        """No more rows than the batch has samples: a loss is repeated for each."""
        if isinstance(rows, Tensor):
            return rows[: self._outcomes[self._at][0]]
        if isinstance(rows, dict):
            return type(rows)({name: self.gathered(one) for name, one in rows.items()})
        return type(rows)(self.gathered(one) for one in rows) if isinstance(rows, list | tuple) else rows
