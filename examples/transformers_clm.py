"""A causal language model, trained by Transformers' Trainer in the shape of its run_clm.py.

    python examples/transformers_clm.py                   one worker
    unisono run -n 3 examples/transformers_clm.py         three workers, the same weights to the last bit

The text is Python's own source, in bytes; the model is a small Llama with random weights. Options are those of
TrainingArguments: --max_steps 20, --resume_from_checkpoint clm/checkpoint-16. Needs pip install '.[transformers]' in a
clone.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

from transformers import (
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

import unisono


class MyTrainer(unisono.transformers.TrainerMixin, Trainer):
    """The trainer, on any number of workers."""


@dataclass
class DataTrainingArguments:
    """What to train on."""

    block_size: int = field(default=64, metadata={"help": "The number of characters in a sample."})
    samples: int = field(default=360, metadata={"help": "The number of samples."})
    layers: int = field(default=2, metadata={"help": "The number of layers of the model."})


def group_texts(text, block_size):
    """Blocks of one size, as run_clm.py makes them."""
    total = len(text) // block_size * block_size
    blocks = [list(text[start : start + block_size]) for start in range(0, total, block_size)]
    return [{"input_ids": block, "labels": block} for block in blocks]


def main():
    parser = HfArgumentParser((DataTrainingArguments, TrainingArguments))
    parser.set_defaults(
        output_dir="clm",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        num_train_epochs=2,
        learning_rate=3e-3,
        warmup_steps=4,
        lr_scheduler_type="cosine",
        logging_steps=4,
        eval_strategy="steps",
        eval_steps=8,
        save_steps=8,
        save_total_limit=2,
        report_to=[],
    )
    data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)

    text = b"".join(path.read_bytes() for path in sorted(Path(json.__file__).parent.glob("*.py")))
    lm_datasets = group_texts(text, data_args.block_size)[: data_args.samples]
    train_dataset, eval_dataset = lm_datasets[:-40], lm_datasets[-40:]

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=data_args.layers,
        num_attention_heads=4,
        max_position_embeddings=data_args.block_size,
        attention_dropout=0.1,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config)

    def preprocess_logits_for_metrics(logits, labels):
        return logits.argmax(dim=-1)

    def compute_metrics(eval_preds):
        preds, labels = eval_preds
        return {"accuracy": float((preds[:, :-1] == labels[:, 1:]).mean())}

    trainer = MyTrainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        data_collator=default_data_collator,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics,
    )

    train_result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    metrics = train_result.metrics
    metrics["train_samples"] = len(train_dataset)
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()

    metrics = trainer.evaluate()
    metrics["perplexity"] = math.exp(metrics["eval_loss"])
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
