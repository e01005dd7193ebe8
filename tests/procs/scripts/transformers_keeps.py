"""A trainer that counts the samples which it predicts."""

import os
from typing import Any

import transformers

import unisono

ROWS = [
    {"input_ids": (words := [(3 * row + 5 * place) % 60 + 2 for place in range(6)]), "labels": words}
    for row in range(24)
]


class Counting(unisono.transformers.TrainerMixin, transformers.Trainer):  # type: ignore[misc]
    """Counts."""

    seen = 0

    def prediction_step(self, model: Any, inputs: Any, *values: Any, **options: Any) -> Any:
        self.seen += len(inputs["input_ids"])
        return super().prediction_step(model, inputs, *values, **options)


transformers.set_seed(1)
config = transformers.GPT2Config(vocab_size=64, n_positions=8, n_embd=8, n_layer=1, n_head=2)
model = transformers.GPT2LMHeadModel(config)
arguments = transformers.TrainingArguments(
    output_dir=os.environ["OUTPUT"],
    per_device_train_batch_size=8,
    per_device_eval_batch_size=4,
    num_train_epochs=2,
    save_strategy="no",
    eval_strategy="epoch",
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
)
trainer = Counting(model=model, args=arguments, train_dataset=ROWS, eval_dataset=ROWS[:13], run=unisono.init(shards=6))
trainer.train()
loss = trainer.evaluate()["eval_loss"]
print(f"after {trainer.seen} {loss:.5f}", flush=True)
trainer.run.finish()
