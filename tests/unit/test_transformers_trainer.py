"""A Transformers Trainer with the mixin on one worker: beside a plain one, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from tqdm import tqdm
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import unisono

Start = Callable[..., unisono.Run]

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_worker"), pytest.mark.timeout(240)]

tqdm.monitor_interval = 0  # no thread of its own

ROWS = [[(place * (7 + row)) % 60 + 1 for place in range(6 + row % 5)] for row in range(36)]


class OnRun(unisono.transformers.TrainerMixin, Trainer):  # type: ignore[misc]  # Transformers is optional
    """As a script has it."""


def collate(samples: list[list[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, samples))
    rows = torch.tensor([sample + [0] * (longest - len(sample)) for sample in samples])
    return {"input_ids": rows, "attention_mask": (rows != 0).long(), "labels": rows.masked_fill(rows == 0, -100)}


def language_model(**settings: Any) -> nn.Module:
    set_seed(1)
    sizes = {"vocab_size": 64, "n_positions": 12, "n_embd": 16, "n_layer": 1, "n_head": 2}
    still = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
    model: nn.Module = GPT2LMHeadModel(GPT2Config(**sizes, **still, bos_token_id=0, eos_token_id=0, **settings))
    return model


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    usual: dict[str, Any] = {
        "per_device_train_batch_size": 6,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "remove_unused_columns": False,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return TrainingArguments(output_dir=str(folder), **{**usual, **settings})


def trainer(kind: Any, folder: Path, model: nn.Module | None = None, given: Any = None, **settings: Any) -> Any:
    args = arguments(folder, **settings)
    data = {"train_dataset": ROWS, "eval_dataset": ROWS[:10], "data_collator": collate}
    return kind(model=model or language_model(), args=args, **{**data, **(given or {})})


def untimed(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    timed = ("_runtime", "_per_second", "_time")
    return [{name: value for name, value in line.items() if not name.endswith(timed)} for line in history]


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"lr_scheduler_type": "cosine", "warmup_steps": 3, "max_grad_norm": 0.1, "weight_decay": 0.1},
        {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2, "max_steps": 5},
        {"bf16": True, "gradient_accumulation_steps": 2, "adam_beta2": 0.9},
        {"eval_strategy": "epoch", "per_device_eval_batch_size": 4, "optim": "sgd"},
        {"train_sampling_strategy": "sequential", "num_train_epochs": 1.5, "max_grad_norm": 0.0},
        {
            "lr_scheduler_type": "reduce_lr_on_plateau",
            "eval_strategy": "steps",
            "eval_steps": 2,
            "metric_for_best_model": "loss",
        },
    ],
)
def test_one_worker_ends_in_the_bits_of_the_plain_trainer(
    settings: dict[str, Any], start: Start, tmp_path: Path
) -> None:
    torch.set_num_threads(1)  # as the run does
    plain = trainer(Trainer, tmp_path, **settings)
    plain.train()
    run = start(shards=settings.get("gradient_accumulation_steps", 1), seed=7, batch_size=None)
    on_run = trainer(OnRun, tmp_path, given={"run": run}, **settings)
    on_run.train()
    assert same_weights(on_run.model, plain.model)
    told, expected = untimed(on_run.state.log_history), untimed(plain.state.log_history)
    assert [line.keys() for line in told] == [line.keys() for line in expected]
    for line, other in zip(told, expected, strict=True):
        assert line == pytest.approx(other, rel=1e-6)
    assert [value for line in told for name, value in line.items() if name != "loss" and name != "train_loss"] == [
        value for line in expected for name, value in line.items() if name != "loss" and name != "train_loss"
    ]
    assert on_run.state.total_flos == plain.state.total_flos
    assert untimed([on_run.evaluate()]) == untimed([plain.evaluate()])
    rows, others = on_run.predict(ROWS[3:14]), plain.predict(ROWS[3:14])
    assert (rows.predictions == others.predictions).all()
    assert (rows.label_ids == others.label_ids).all()
    on_run.end()
