"""A trainer reads a stream, to train with and to evaluate."""

from collections.abc import Iterator
from typing import Any

import transformers
from torch.utils.data import IterableDataset, get_worker_info

import unisono

run = unisono.init(shards=6, checkpoints={"every": 2})


class Rows(IterableDataset[Any]):
    """Rows of numbers; each reader has some of them."""

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for row in range(first, 40, step):
            words = [(3 * row + 5 * place) % 60 + 2 for place in range(6)]
            yield {"input_ids": words, "labels": words}


transformers.set_seed(1)
config = transformers.GPT2Config(vocab_size=64, n_positions=8, n_embd=8, n_layer=1, n_head=2)
arguments = transformers.TrainingArguments(
    output_dir=str(run.dir / "trainer"),
    per_device_train_batch_size=2,
    gradient_accumulation_steps=6,
    max_steps=8,
    logging_steps=2,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
)
Streaming = type("Streaming", (unisono.transformers.TrainerMixin, transformers.Trainer), {})
trainer = Streaming(
    model=transformers.GPT2LMHeadModel(config), args=arguments, train_dataset=Rows(), eval_dataset=Rows(), run=run
)
trainer.train()
losses = [(line["loss"], line["epoch"]) for line in trainer.state.log_history if "loss" in line]
run.print("after training:", losses, trainer.state.global_step, round(trainer.evaluate()["eval_loss"], 5))
run.finish()
