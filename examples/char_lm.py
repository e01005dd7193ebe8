"""A small GPT that reads bytes, trained on the source text of Python's own standard library.

    python examples/char_lm.py                              one worker, a few minutes on one core
    unisono run -n 2 examples/char_lm.py --steps 100        two workers, the same weights to the last bit

The text is that of the Python at hand: another version of Python gives another text, and so other weights.
The digest of the text is printed first. Compare weights only where it is the same.
"""

import argparse
import hashlib
import math
import re
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, Subset

import unisono

# A fixed list, so that it does not matter what else is installed. Of each module the beginning.
MODULES = (
    "argparse", "ast", "base64", "calendar", "configparser", "contextlib", "copy", "csv", "dataclasses",
    "difflib", "enum", "fractions", "functools", "heapq", "inspect", "ipaddress", "random", "shutil",
    "statistics", "subprocess", "tarfile", "textwrap", "tokenize", "traceback", "typing", "uuid",
)  # fmt: skip
BYTES_PER_MODULE = 40_000

BOUNDARY = 0  # the byte before and after a document; it occurs in no source text
PADDING = -100  # a target that is none: what F.cross_entropy ignores by default

arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
arguments.add_argument("--epochs", type=int, default=4)
arguments.add_argument("--steps", type=int, help="stop after so many steps; the schedule ends there too")
arguments.add_argument("--batch-size", type=int, default=64, help="documents, of all workers together")
arguments.add_argument("--lr", type=float, default=6e-3)
arguments.add_argument("--layers", type=int, default=2)
arguments.add_argument("--width", type=int, default=64, help="a multiple of 32: the width of one attention head")
arguments.add_argument("--context", type=int, default=128, help="bytes")
arguments.add_argument("--seed", type=int, default=0)


def library_texts(folder):
    """The beginning of each module in ``MODULES``, as bytes."""
    missing = [name for name in MODULES if not (folder / f"{name}.py").is_file()]
    if missing:
        raise SystemExit(f"{folder} has no source text of {', '.join(missing)}: use a Python that has its library.")
    return [(folder / f"{name}.py").read_bytes()[:BYTES_PER_MODULE] for name in MODULES]


def documents(texts, longest):
    """The texts' blocks between blank lines, and what is longer than ``longest`` bytes in pieces."""
    blocks = [block for text in texts for block in re.split(rb"\n\s*\n", text) if block.strip()]
    return [block[at : at + longest] for block in blocks for at in range(0, len(block), longest)]


class NextByte(Dataset):
    """``dataset[i]`` is (inputs, targets), int64 of shape (context,): predict each byte from those before.

    A document ends with the boundary where there is room for it; the rest of the targets is padding.
    """

    def __init__(self, documents, context):
        self.documents = documents
        self.context = context

    def __len__(self):
        return len(self.documents)

    def __getitem__(self, index):
        text = [BOUNDARY, *self.documents[index], BOUNDARY][: self.context + 1]
        inputs = torch.full((self.context,), BOUNDARY)
        targets = torch.full((self.context,), PADDING)
        inputs[: len(text) - 1] = torch.tensor(text[:-1])
        targets[: len(text) - 1] = torch.tensor(text[1:])
        return inputs, targets


class Block(nn.Module):
    """Attention to the bytes before, then two layers for each byte alone; both are added to what comes in."""

    def __init__(self, width):
        super().__init__()
        self.heads = width // 32
        self.attention_norm, self.attention_in = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.layers_norm, self.layers_in = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.layers_out = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.05)

    def forward(self, x):
        """(documents, context, width) → the same shape."""
        # Padding follows the text, so causal attention alone keeps it out of sight.
        query, key, value = (
            part.unflatten(2, (self.heads, 32)).transpose(1, 2)
            for part in self.attention_in(self.attention_norm(x)).chunk(3, dim=2)
        )
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.attention_out(seen.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.layers_out(F.gelu(self.layers_in(self.layers_norm(x)))))


class Gpt(nn.Module):
    """Embeddings, blocks, and a head that shares its weights with the embedding."""

    def __init__(self, layers, width, context):
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.08)
        self.head.weight = self.bytes.weight  # tied: one parameter, which gets the gradients of both uses

    def forward(self, inputs):
        """Bytes (documents, context) → logits (documents, context, 256)."""
        places = self.places.weight[: inputs.shape[1]]
        return self.head(self.norm(self.blocks(self.bytes(inputs) + places)))


def loss_fn(model, batch):
    """The mean over the shard's real bytes, and how many they are.

    Documents differ in length, so shards differ in their number of bytes. In the mean of the shards' means
    a byte would count more in a shard of short documents than in one of long ones. The weight undoes that.
    """
    inputs, targets = batch
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=PADDING)
    return unisono.Weighted(loss, (targets != PADDING).sum())


def metrics(model, batch):
    """The same mean on held-out text; its weight makes it one over all bytes, not over documents."""
    return {"nats": loss_fn(model, batch)}


def weight_decay_groups(model, decay=0.1):
    """Matrices decay; biases and the gains of norms do not."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    return [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]


def warm_up_then_cosine(total, warm_up):
    """The learning rate's factor at each step: up to 1 in ``warm_up`` steps, then down to 0.1 at the end."""

    def factor(step):
        if step < warm_up:
            return (step + 1) / warm_up
        progress = min(1.0, (step - warm_up) / max(1, total - warm_up))
        return 0.55 + 0.45 * math.cos(math.pi * progress)

    return factor


def main():
    args = arguments.parse_args()
    run = unisono.init(batch_size=args.batch_size, seed=args.seed)

    texts = library_texts(Path(sysconfig.get_path("stdlib")))
    run.print(f"text sha256 {hashlib.sha256(b''.join(texts)).hexdigest()} ({sum(map(len, texts))} bytes)")
    dataset = NextByte(documents(texts, longest=args.context), args.context)
    training = Subset(dataset, [index for index in range(len(dataset)) if index % 20])
    held_out = Subset(dataset, range(0, len(dataset), 20))

    model = Gpt(args.layers, args.width, args.context)
    optimizer = torch.optim.AdamW(weight_decay_groups(model), lr=args.lr, betas=(0.9, 0.95))
    model, optimizer = run.prepare(model, optimizer)

    total = args.epochs * math.ceil(len(training) / args.batch_size)
    total = min(total, args.steps or total)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_then_cosine(total, warm_up=total // 10))
    run.register("scheduler", scheduler)  # part of every checkpoint

    for step in run.steps(training, epochs=args.epochs):
        loss = step.run(loss_fn, clip_norm=1.0)
        scheduler.step()
        if step.number % 10 == 0:
            run.print(f"step {step.number}: loss {loss:.4f} nats a byte")
        if step.is_last_in_epoch or step.number + 1 == total:
            perplexity = math.exp(run.evaluate(held_out, metrics)["nats"])
            run.log("perplexity", perplexity)  # to metrics.jsonl
            run.print(f"epoch {step.epoch}: perplexity {perplexity:.3f} a byte on held-out text")
        if step.number + 1 == total:
            break

    run.finish(model)


if __name__ == "__main__":
    main()
