"""A GPT of 50 million parameters that is too large for one process of 1 GB, and not for four that hold it together.

    ulimit -d 1000000                                                             # kB that each process may have
    python examples/large_gpt.py                                                  # one device: out of memory
    unisono run -n 1 --devices-per-worker 4 --threads 1 examples/large_gpt.py     # four devices: it trains

By default each device holds a slice of every layer; with ``--cut stages``, some layers as a whole: then two devices of
1.3 GB (``ulimit -d 1300000``) train what one of them cannot. The weights are
those of one device that has the memory, to the last bit. The text is that of ``char_lm.py``.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import nn

import unisono
from char_lm import Block, NextByte, documents, library_texts, loss_fn

arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
arguments.add_argument("--cut", choices=("slices", "stages"), default="slices", help="what each device holds")
arguments.add_argument("--steps", type=int, default=3)
arguments.add_argument("--batch-size", type=int, default=8, help="documents, of all workers together")
arguments.add_argument("--shards", type=int, default=8)
arguments.add_argument("--layers", type=int, default=16)
arguments.add_argument("--width", type=int, default=512, help="a multiple of 32: the width of one attention head")
arguments.add_argument("--context", type=int, default=64, help="bytes")


class Read(nn.Module):
    """Bytes (documents, context), and their places, as vectors (documents, context, width)."""

    def __init__(self, width, context):
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(context, width)

    def forward(self, inputs):
        return self.bytes(inputs) + self.places(torch.arange(inputs.shape[1], device=inputs.device))


def gpt(layers, width, context):
    """Layers that are called one after the other, as stages want them."""
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))
    return nn.Sequential(Read(width, context), *[Block(width) for _ in range(layers)], head)


def spread(run, model, cut, layers):
    """Give each device of a worker its part of the model, which is on the meta device. One device gets all of it."""
    if cut == "stages":
        stages = min(layers, 4)
        return run.pipeline(model, cuts=[str(1 + layers * stage // stages) for stage in range(1, stages)])
    for layer in model:  # each gets memory, and gives all but a slice of it back, before the next one does
        run.fully_shard(layer)
    return run.fully_shard(model)


def main():
    args = arguments.parse_args()
    run = unisono.init(batch_size=args.batch_size, shards=args.shards, seed=0)
    texts = library_texts(Path(sysconfig.get_path("stdlib")))
    dataset = NextByte(documents(texts, longest=args.context), args.context)

    with torch.device("meta"):
        model = gpt(args.layers, args.width, args.context)
    run.print(f"{sum(each.numel() for each in model.parameters()) / 1e6:.1f} million parameters")
    model = spread(run, model, args.cut, args.layers)
    model, _ = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-4))

    for step in run.steps(dataset, epochs=1):
        loss = step.run(loss_fn, clip_norm=1.0)
        run.print(f"step {step.number}: loss {loss:.4f} nats a byte")
        if step.number + 1 == args.steps:
            break
    run.finish(model)


if __name__ == "__main__":
    main()
