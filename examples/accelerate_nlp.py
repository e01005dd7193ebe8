"""Pairs of sentences, in the shape of accelerate's nlp_example.py, with its gradient accumulation.

    python examples/accelerate_nlp.py                one worker
    unisono run -n 3 examples/accelerate_nlp.py      three workers, the same weights to the last bit

Tokens are drawn, and the model is a small BERT with random weights. Needs pip install '.[accelerate,transformers]' in a
clone.
"""

import argparse

import torch
from accelerate.utils import set_seed
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

import unisono

WORDS = 50
SEPARATOR = 1


def pairs(count):
    """Two sentences behind each other; the second one says the same as the first in every other pair."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for number in range(count):
        length = int(torch.randint(3, 9, (), generator=draw))
        first, other = torch.randint(2, WORDS, (2, length), generator=draw).tolist()
        same = number % 2
        found.append({"input_ids": [*first, SEPARATOR, *(first if same else other)], "labels": same})
    return found


def collate_fn(examples):
    """Pad to the longest."""
    longest = max(len(one["input_ids"]) for one in examples)
    ids = torch.tensor([one["input_ids"] + [0] * (longest - len(one["input_ids"])) for one in examples])
    labels = torch.tensor([one["labels"] for one in examples])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


def get_dataloaders(batch_size):
    """Pairs to train on, and held-out ones."""
    samples = pairs(300)
    train_dataloader = DataLoader(samples[:240], shuffle=True, collate_fn=collate_fn, batch_size=batch_size)
    eval_dataloader = DataLoader(samples[240:], shuffle=False, collate_fn=collate_fn, batch_size=8)
    return train_dataloader, eval_dataloader


def training_function(args):
    accelerator = unisono.accelerate.Accelerator(
        mixed_precision=args.mixed_precision, gradient_accumulation_steps=args.gradient_accumulation_steps
    )
    set_seed(42)
    train_dataloader, eval_dataloader = get_dataloaders(batch_size=16)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model = BertForSequenceClassification(BertConfig(vocab_size=WORDS, max_position_embeddings=32, **sizes))
    optimizer = AdamW(params=model.parameters(), lr=2e-3)
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer=optimizer,
        num_warmup_steps=10,
        num_training_steps=(len(train_dataloader) * args.epochs) // args.gradient_accumulation_steps,
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    for epoch in range(args.epochs):
        model.train()
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                outputs = model(**batch)
                loss = outputs.loss
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()

        model.eval()
        right, samples = 0, 0
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            predictions = outputs.logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            right += int((predictions == references).sum())
            samples += len(references)
        accelerator.print(f"epoch {epoch}: loss {accelerator.mean_loss:.4f}, {right} of {samples} are right")
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixed_precision", default=None, choices=["no", "bf16"])
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=3)
    training_function(parser.parse_args())


if __name__ == "__main__":
    main()
