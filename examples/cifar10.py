"""CIFAR-10 with a ResNet-20 (0.27 M parameters), SGD with momentum and a cosine schedule.

    python examples/cifar10.py --synthetic --max-steps 20        no data needed: images of the same shape
    unisono run -n 4 examples/cifar10.py --data-dir ~/data       the real images, in the binary version

The real images:
    curl -O https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz && tar xf cifar-10-binary.tar.gz -C ~/data
"""

import argparse
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import unisono
from cifar10_images import Cifar10, SyntheticCifar10

arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
source = arguments.add_mutually_exclusive_group(required=True)
source.add_argument("--data-dir", help="cifar-10-batches-bin, or the folder it lies in")
source.add_argument("--synthetic", action="store_true", help="made-up images of the same shape")
arguments.add_argument("--samples", type=int, default=10_000, help="how many images --synthetic makes")
arguments.add_argument("--epochs", type=int, default=30)
arguments.add_argument("--batch-size", type=int, default=128, help="of all workers together")
arguments.add_argument("--lr", type=float, default=0.1)
arguments.add_argument("--seed", type=int, default=0)
arguments.add_argument("--precision", choices=["float32", "bf16"], default="float32")
arguments.add_argument("--loader-workers", type=int, default=0, help="processes that load data, per worker")
arguments.add_argument("--max-steps", type=int, help="stop after so many steps, for a first try")
arguments.add_argument("--checkpoint-every", type=int, default=200, help="steps")
arguments.add_argument("--run-dir", help="a new folder, or that of a run to go on with, on any number of workers")


class Augmented(Dataset):
    """Random crop and flip.

    Drawn from torch's ordinary generator: Unisono gives each (seed, epoch, sample) a random stream of its own
    while the sample is loaded, so neither the worker nor the loader process that loads it matters.
    """

    def __init__(self, images, padding=4):
        self.images = images
        self.padding = padding

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image, label = self.images[index]
        padded = F.pad(image, [self.padding] * 4)
        top, left = torch.randint(2 * self.padding + 1, (2,)).tolist()
        image = padded[:, top : top + image.shape[1], left : left + image.shape[2]]
        return (image.flip(2) if torch.rand(()) < 0.5 else image.clone()), label


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.stride, self.more_channels = stride, outputs - inputs

    def forward(self, x):
        """(batch, inputs, height, width) → (batch, outputs, height / stride, width / stride)."""
        # The shortcut has no parameters: every other pixel, and empty channels where there are more of them.
        shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], [0, 0, 0, 0, 0, self.more_channels])
        x = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(x)) + shortcut)


class ResNet20(nn.Module):
    """Three stages of three blocks, as in the paper that introduced residual networks (He et al., 2015)."""

    def __init__(self):
        super().__init__()
        widths = [16] * 4 + [32] * 3 + [64] * 3
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.blocks = nn.Sequential(*[Block(i, o, stride=o // i) for i, o in pairwise(widths)])
        self.head = nn.Linear(64, 10)
        # Buffers move to the device with the model. These never change, so they are not part of its state.
        self.register_buffer("mean", torch.tensor([125.3, 123.0, 113.9]).view(3, 1, 1), persistent=False)
        self.register_buffer("deviation", torch.tensor([63.0, 62.1, 66.7]).view(3, 1, 1), persistent=False)

    def forward(self, images):
        """Bytes (batch, 3, 32, 32) → logits (batch, 10)."""
        # Images travel as bytes, a quarter of the size of floats, and become numbers here.
        x = self.blocks(self.stem((images.float() - self.mean) / self.deviation))
        return self.head(x.mean(dim=(2, 3)))


def loss_fn(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def metrics(model, batch):
    images, labels = batch
    logits = model(images)
    return {"loss": F.cross_entropy(logits, labels), "accuracy": (logits.argmax(1) == labels).float().mean()}


def main():
    args = arguments.parse_args()
    if args.synthetic:
        training, held_out = SyntheticCifar10(args.samples, seed=0), SyntheticCifar10(1000, seed=1)
    else:
        training, held_out = Cifar10(args.data_dir, train=True), Cifar10(args.data_dir, train=False)

    run = unisono.init(
        batch_size=args.batch_size,
        seed=args.seed,
        arithmetic={"precision": args.precision},
        checkpoints={"every": args.checkpoint_every},
        run_dir=args.run_dir,
    )
    model = ResNet20()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
    model, optimizer = run.prepare(model, optimizer)

    # Counted in steps of the global batch, so the schedule is the same for any number of workers.
    total_steps = args.epochs * -(-len(training) // args.batch_size)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total_steps)
    run.register("scheduler", scheduler)  # part of every checkpoint

    losses = []
    for step in run.steps(Augmented(training), epochs=args.epochs, loader_workers=args.loader_workers):
        losses.append(step.run(loss_fn))
        scheduler.step()
        last = args.max_steps is not None and step.number + 1 >= args.max_steps
        if step.is_last_in_epoch or last:
            scores = run.evaluate(held_out, metrics)
            run.print(
                f"epoch {step.epoch}: loss {sum(losses) / len(losses):.4f}, "
                f"held-out loss {scores['loss']:.4f}, accuracy {scores['accuracy']:.2%}"
            )
            losses.clear()
        if last:
            break

    run.finish(model)


if __name__ == "__main__":  # the loader's processes may import this file
    main()
