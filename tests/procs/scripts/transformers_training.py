"""A small GPT-2 on Python's own source, by a Trainer with all that decides: evaluation, callbacks, the best model."""

import json
import sys
from collections import defaultdict
from json import decoder
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import (
    EarlyStoppingCallback,
    EvalPrediction,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.utils import logging

import unisono

tqdm.monitor_interval = 0  # no thread of its own
logging.disable_progress_bar()
run = unisono.init(seed=3, shards=6, checkpoints={"every": 3})
text = Path(decoder.__file__).read_bytes()
lengths = [9 + number * 7 % 16 for number in range(64)]  # batches are padded
rows = [list(text[number * 25 : number * 25 + length]) for number, length in enumerate(lengths)]
TIMES = ("_runtime", "_per_second", "_time")


class MyTrainer(unisono.transformers.TrainerMixin, Trainer):  # type: ignore[misc]  # Transformers is optional
    """Logs what it keeps of its batches, as trainers of other packages do."""

    tokens = 0

    def __init__(self, *values: Any, **options: Any) -> None:
        self.kept: dict[str, list[float]] = defaultdict(list)
        super().__init__(*values, **options)

    def compute_loss(self, model: Any, inputs: Any, *values: Any, **options: Any) -> Any:
        """Keep the number of tokens so far, and the size of the logits."""
        if not model.training:
            return super().compute_loss(model, inputs, *values, **options)
        self.tokens += int(self.accelerator.gather_for_metrics(inputs["attention_mask"].sum()).item())
        self.kept["tokens"] = [self.tokens]
        loss, outputs = super().compute_loss(model, inputs, True, **options)
        self.kept["size"].append(float(outputs.logits.detach().abs().mean()))
        return loss

    def log(self, logs: dict[str, float], *values: Any) -> None:
        """Log the means of what was kept."""
        logs |= {name: sum(kept) / len(kept) for name, kept in self.kept.items()}
        self.kept.clear()
        super().log(logs, *values)


class Counting(TrainerCallback):  # type: ignore[misc]
    """Counts steps, and has the learning rate fall by them."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self.steps += 1
        if self.steps == 5:
            parts["lr_scheduler"].base_lrs[0] *= 0.5


def collate(samples: list[list[int]]) -> dict[str, torch.Tensor]:
    """Pad to the longest."""
    longest = max(map(len, samples))
    rows = torch.tensor([sample + [0] * (longest - len(sample)) for sample in samples])
    return {"input_ids": rows, "attention_mask": (rows != 0).long(), "labels": rows.masked_fill(rows == 0, -100)}


def right(predicted: EvalPrediction) -> dict[str, float]:
    """The share of characters that are foreseen."""
    told, wanted = predicted.predictions[:, :-1], predicted.label_ids[:, 1:]
    return {"right": float((told == wanted)[wanted != -100].mean())}


set_seed(1)
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=256, n_positions=25, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
)
arguments = TrainingArguments(
    output_dir=str(run.dir / "trainer"),
    per_device_train_batch_size=2,
    gradient_accumulation_steps=6,
    num_train_epochs=2.5,
    learning_rate=1e-2,
    warmup_steps=2,
    max_grad_norm=0.5,
    logging_steps=2,
    eval_strategy="steps",
    eval_steps=4,
    eval_on_start=True,
    save_strategy="steps",
    save_steps=4,
    save_total_limit=1,
    load_best_model_at_end=True,
    metric_for_best_model="right",
    greater_is_better=True,
    include_num_input_tokens_seen="non_padding",
    remove_unused_columns=False,
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
)
counting = Counting()
trainer = MyTrainer(
    model=model,
    args=arguments,
    data_collator=collate,
    train_dataset=rows[:50],
    eval_dataset=rows[50:],
    compute_metrics=right,
    preprocess_logits_for_metrics=lambda logits, _: logits.argmax(-1),
    callbacks=[EarlyStoppingCallback(3), counting],
    run=run,
)
taken_up = next((value for value in sys.argv if "checkpoint-" in value), None)
done = trainer.train(resume_from_checkpoint=taken_up)


def untimed(values: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on how long it took."""
    return {name: value for name, value in values.items() if not name.endswith(TIMES)}


history = [untimed(line) for line in trainer.state.log_history]
run.print("after fit:", json.dumps(history), counting.steps, trainer.state.total_flos, done.training_loss)
values = untimed(trainer.evaluate(rows[40:], metric_key_prefix="last"))
run.print("after evaluation:", json.dumps(values))
predicted = trainer.predict(rows[45:])
run.print("after prediction:", predicted.predictions.shape, int(predicted.predictions.astype(int).sum()))
trainer.end()
