"""A Transformers Trainer with the mixin on one worker: beside a plain one, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from tqdm import tqdm
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

import unisono
from unisono.errors import UnisonoError

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


SETTINGS = [
    {},
    {"gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1, "max_steps": 5, "warmup_steps": 2},
    {"lr_scheduler_type": "cosine", "warmup_steps": 3, "max_grad_norm": 0.1, "weight_decay": 0.1},
    {"bf16": True, "gradient_accumulation_steps": 2, "adam_beta2": 0.9},
    {"eval_strategy": "epoch", "per_device_eval_batch_size": 4, "optim": "sgd"},
    {"train_sampling_strategy": "sequential", "num_train_epochs": 1.5, "max_grad_norm": 0.0},
    {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "eval_strategy": "steps",
        "eval_steps": 2,
        "metric_for_best_model": "loss",
    },
]


@pytest.mark.parametrize(
    "settings",
    [each if number == 1 else pytest.param(each, marks=pytest.mark.slow) for number, each in enumerate(SETTINGS)],
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


def test_float16_is_the_runs_and_goes_on_from_the_trainers_checkpoints(start: Start, tmp_path: Path) -> None:
    def made(name: str) -> Any:
        run = start(shards=2, arithmetic={"precision": "fp16"}, batch_size=None, run_dir=tmp_path / name)
        settings: dict[str, Any] = {"fp16": True, "save_strategy": "steps", "save_steps": 4}
        return trainer(OnRun, tmp_path, given={"run": run}, **settings)

    whole = made("whole")
    whole.train()
    scaler = whole.accelerator.scaler
    assert 1 < scaler.get_scale() < 2**16
    assert whole.state.global_step == 2 * len(whole.get_train_dataloader())  # skipped steps count
    again = made("again")
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert same_weights(again.model, whole.model)
    assert again.accelerator.scaler.state_dict() == scaler.state_dict()
    assert untimed(again.state.log_history)[:-1] == untimed(whole.state.log_history)[:-1]


def test_a_run_that_a_trainer_begins_has_its_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = trainer(OnRun, tmp_path, fp16=True)
    assert made.run.job.precision == "fp16"
    made.run.close()


class Impatient(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_epoch_stop = True


@pytest.mark.parametrize(
    ("settings", "given", "message"),
    [
        (
            {"fp16_full_eval": True},
            {},
            "(fp16|bf16)_full_eval=True: it rounds the weights for good; use bf16=True or fp16=True",
        ),
        (
            {"fp16": True},
            {},
            "fp16=True: losses are scaled by .* say arithmetic={'precision': 'fp16'} where it begins",
        ),
        ({"torch_compile": True}, {}, "torch_compile=True: compiled steps have bits .* leave it out"),
        ({"auto_find_batch_size": True}, {}, "auto_find_batch_size=True: .* unisono batch-size"),
        ({"enable_jit_checkpoint": True}, {}, "enable_jit_checkpoint=True: a run checkpoints by itself"),
        ({"batch_eval_metrics": True}, {}, "batch_eval_metrics=True: .* leave it out"),
        ({"train_sampling_strategy": "batch_rebalance"}, {}, "'batch_rebalance': .* use 'group_by_length'"),
        ({"optim": "lomo"}, {}, "optim='lomo': it updates weights in the middle of the backward pass"),
        ({}, {"callbacks": [Impatient()]}, "should_epoch_stop, and the epochs of a run are whole: .*training_stop"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_the_cure(
    settings: dict[str, Any], given: dict[str, Any], message: str, start: Start, tmp_path: Path
) -> None:
    run = start(shards=2, batch_size=None)
    with pytest.raises(UnisonoError, match=message):
        trainer(OnRun, tmp_path, given={**given, "run": run}, **settings).train()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("deepspeed", "zero.json", "deepspeed: Unisono distributes the work itself, .* leave it out"),
        ("fsdp", True, "fsdp=True: Unisono distributes the work itself, .* leave it out"),
        ("parallelism_config", object(), "parallelism_config: Unisono distributes .* leave it out"),
    ],
)
def test_what_this_machine_cannot_even_set_up_is_refused_before_the_training(
    name: str, value: Any, message: str, start: Start, tmp_path: Path
) -> None:
    made = trainer(OnRun, tmp_path, given={"run": start(shards=2, batch_size=None)})
    setattr(made.args, name, value)
    with pytest.raises(UnisonoError, match=message):
        made.train()


class Failing(OnRun):
    """Fails once."""

    def training_step(self, *values: Any, **options: Any) -> Any:
        if self.state.global_step == 2:
            raise ValueError("once")
        return super().training_step(*values, **options)


def test_a_script_may_catch_what_a_training_raises_and_train_again(start: Start, tmp_path: Path) -> None:
    run = start(batch_size=None, shards=1, seed=42)
    with pytest.raises(ValueError, match="once"):
        trainer(Failing, tmp_path, given={"run": run}).train()
    again = trainer(OnRun, tmp_path, given={"run": run})
    again.train()
    plain = trainer(Trainer, tmp_path)
    plain.train()
    assert same_weights(again.model, plain.model)


def test_trials_of_hyperparameters_are_refused(start: Start, tmp_path: Path) -> None:
    made = trainer(OnRun, tmp_path, given={"run": start(shards=2, batch_size=None)})
    with pytest.raises(UnisonoError, match="hyperparameter_search: each trial is a job of its own"):
        made.hyperparameter_search()


def test_arguments_that_have_formed_a_process_group_are_refused(start: Start, tmp_path: Path) -> None:
    class Group:
        num_processes = 2

    args = arguments(tmp_path)
    args.distributed_state = Group()
    with pytest.raises(UnisonoError, match=r"formed a process group of 2 .* call run = unisono.init\(\) before"):
        OnRun(model=language_model(), args=args, run=start(shards=2, batch_size=None))


def test_arguments_stay_those_of_the_script_and_are_saved_as_what_they_were(start: Start, tmp_path: Path) -> None:
    made = trainer(OnRun, tmp_path, given={"run": start(shards=2, batch_size=None)})
    assert isinstance(made.args, TrainingArguments)
    assert (made.args.should_save, made.args.world_size, made.args.n_gpu) == (True, 1, 0)
    made.save_model()
    with torch.serialization.safe_globals([]):
        loaded = torch.load(tmp_path / "training_args.bin", weights_only=False)
    assert type(loaded) is TrainingArguments
    assert loaded.learning_rate == made.args.learning_rate


class OwnStep(OnRun):
    """A training step that goes backward by itself, in two pieces."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        model.train()
        loss: torch.Tensor = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        (loss / 2).backward(retain_graph=True)
        (loss / 2).backward()
        return loss.detach()


def test_a_training_step_may_go_backward_by_itself(start: Start, tmp_path: Path) -> None:
    weights = []
    for kind in (OnRun, OwnStep):
        run = start(shards=4, batch_size=None, run_dir=tmp_path / kind.__name__)
        made = trainer(kind, tmp_path, given={"run": run}, gradient_accumulation_steps=4, per_device_train_batch_size=3)
        made.train()
        weights.append(torch.cat([one.detach().reshape(-1) for one in made.model.parameters()]))
        run.finish()
    assert torch.allclose(weights[0], weights[1], atol=1e-5)


class OwnLoss(OnRun):
    """A loss of the script's own, over tokens or over samples."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        logits, labels = outputs.logits[:, :-1].transpose(1, 2), inputs["labels"][:, 1:]
        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        loss = losses.sum() / num_items_in_batch if num_items_in_batch is not None else losses.sum(1).mean()
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize("is_by_tokens", [True, False])
def test_the_loss_is_the_mean_over_the_whole_global_batch(
    is_by_tokens: bool, accumulated: int, start: Start, tmp_path: Path
) -> None:
    run, samples = start(shards=3, batch_size=None), 15 if accumulated == 3 else 13
    model = language_model()
    before: Any = deepcopy(model)
    settings = {"per_device_train_batch_size": samples // accumulated, "gradient_accumulation_steps": accumulated}
    still = {"max_grad_norm": 0.0, "optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant"}
    in_order = {"train_sampling_strategy": "sequential", "max_steps": 1}
    made = trainer(OwnLoss, tmp_path, model, {"run": run}, **settings, **still, **in_order)
    made.model_accepts_loss_kwargs = is_by_tokens
    made.train()
    whole = collate(ROWS[:samples])
    logits = before(input_ids=whole["input_ids"], attention_mask=whole["attention_mask"]).logits[:, :-1]
    each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), whole["labels"][:, 1:], reduction="none")
    items = made._get_num_items_in_batch([whole], whole["labels"].device)
    loss = each.sum() / items if is_by_tokens else each.sum(1).mean()
    loss.backward()
    assert made.state.log_history[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    for parameter, old in zip(model.parameters(), before.parameters(), strict=True):
        assert old.grad is not None
        assert torch.allclose(parameter, old - old.grad, atol=1e-5)


class Summed:
    """A loss of the script's own: a sum over the samples."""

    seen = 0

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        self.seen += len(inputs["input_ids"])
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        loss = (outputs.logits.logsumexp(-1) * inputs["attention_mask"]).sum()
        return (loss, outputs) if return_outputs else loss


@pytest.mark.filterwarnings("ignore:trainer.seen changes")
def test_a_loss_that_sums_over_the_batch_stays_the_sum_over_the_global_batch(start: Start, tmp_path: Path) -> None:
    plain = trainer(type("Plain", (Summed, Trainer), {}), tmp_path)
    plain.train()
    on_run = trainer(type("OurOwn", (Summed, OnRun), {}), tmp_path, given={"run": start(shards=3, batch_size=None)})
    on_run.train()
    ours, theirs = ([line["loss"] for line in each.state.log_history if "loss" in line] for each in (on_run, plain))
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert on_run.seen == plain.seen == 2 * len(ROWS)
