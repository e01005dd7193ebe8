"""A Transformers Trainer, with a small Llama."""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

import unisono
from benchmarks.frameworks import UNISONO, Note

BATCHES = 64
ENDLESS = 10**6
LENGTH = 64


class OnRun(unisono.transformers.TrainerMixin, Trainer):  # type: ignore[misc]  # optional
    """The trainer, on a run."""


class Noting(TrainerCallback):  # type: ignore[misc]
    """Notes each step."""

    def __init__(self, note: Note) -> None:
        self._note = note

    def on_step_end(self, *_: object, **__: object) -> None:
        """A step is done."""
        self._note()


def train(way: str, batch_size: int, workers: int, note: Note) -> None:
    """Train until the process is stopped."""
    given = {"run": unisono.init(shards=workers)} if way == UNISONO else {}
    set_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, **sizes))
    rows = torch.randint(256, (BATCHES * batch_size, LENGTH))
    samples = [{"input_ids": row, "labels": row} for row in rows]
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(prefix="benchmark-"),
        per_device_train_batch_size=batch_size // workers,
        gradient_accumulation_steps=workers if way == UNISONO else 1,
        num_train_epochs=ENDLESS,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    kind = OnRun if way == UNISONO else Trainer
    kind(model=model, args=args, train_dataset=samples, callbacks=[Noting(note)], **given).train()
