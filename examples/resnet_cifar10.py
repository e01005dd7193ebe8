"""CIFAR-10, scaled to 128 by 128 pixels, with ResNet50V2 or ResNet152V2: a course's scaling study (docs/case-study.md).

    python examples/resnet_cifar10.py --model resnet50v2 --count                    parameters, bytes, operations
    unisono run -n 2 examples/resnet_cifar10.py --data-dir ~/data --workers 2       the published run, two workers

Small enough for a laptop, the same code:

    unisono run -n 2 examples/resnet_cifar10.py --image-size 32 --width 0.25 --synthetic --steps 20

and --plain in an ordinary PyTorch loop, without Unisono, to compare with.
"""

import argparse
import json
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

import unisono
from cifar10_images import Cifar10, SyntheticCifar10

BLOCKS = {"resnet50v2": (3, 4, 6, 3), "resnet152v2": (3, 8, 36, 3)}

arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
arguments.add_argument("--model", choices=BLOCKS, default="resnet50v2")
arguments.add_argument("--data-dir", help="cifar-10-batches-bin, or the folder it lies in (see cifar10.py)")
arguments.add_argument("--synthetic", action="store_true", help="made-up images of the same shape")
arguments.add_argument("--samples", type=int, default=50_000, help="how many images --synthetic makes")
arguments.add_argument("--epochs", type=int, default=5)
arguments.add_argument("--steps", type=int, help="stop after so many")
arguments.add_argument("--batch-size", type=int, default=256, help="per worker of --workers")
arguments.add_argument("--lr", type=float, default=0.01, help="per worker of --workers")
arguments.add_argument("--workers", type=int, default=1, help="what batch and rate are multiplied by")
arguments.add_argument("--shards", type=int, help="the largest number of workers this job can use")
arguments.add_argument("--image-size", type=int, default=128)
arguments.add_argument("--width", type=float, default=1.0, help="of all layers, as a share of the published one")
arguments.add_argument("--precision", choices=["float32", "bf16"], default="float32", help="bf16: mixed precision")
arguments.add_argument("--channels-last", action="store_true", help="pixels of all channels side by side in memory")
arguments.add_argument("--seed", type=int, default=0)
arguments.add_argument("--loader-workers", type=int, default=0, help="processes that load data, per worker")
arguments.add_argument("--plain", action="store_true", help="train in an ordinary PyTorch loop")
arguments.add_argument("--count", action="store_true", help="print the size of the model and do not train")


def norm(channels):
    # Keras' momentum of 0.99 is what PyTorch calls 0.01.
    return nn.BatchNorm2d(channels, eps=1.001e-5, momentum=0.01)


class Block(nn.Module):
    """A bottleneck that normalises and activates before each convolution, so that the shortcut stays free of both."""

    def __init__(self, inputs, width, stride=1, projects=False):
        super().__init__()
        self.stride = stride
        self.before = norm(inputs)
        self.shortcut = nn.Conv2d(inputs, 4 * width, 1, stride) if projects else None
        self.reduce = nn.Conv2d(inputs, width, 1, bias=False)
        self.reduce_norm = norm(width)
        self.look = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.look_norm = norm(width)
        self.expand = nn.Conv2d(width, 4 * width, 1)

    def forward(self, x):
        """(batch, inputs, height, width) → (batch, 4 · width, height / stride, width / stride)."""
        active = F.relu(self.before(x))
        shortcut = self.shortcut(active) if self.shortcut else x[:, :, :: self.stride, :: self.stride]
        active = F.relu(self.reduce_norm(self.reduce(active)))
        active = F.relu(self.look_norm(self.look(active)))
        return shortcut + self.expand(active)


def stack(inputs, width, blocks, stride):
    """As in Keras: the first block widens the shortcut, the last one halves the image (in the paper the first does)."""
    inner = [Block(4 * width, width) for _ in range(blocks - 2)]
    return [Block(inputs, width, projects=True), *inner, Block(4 * width, width, stride)]


class ResNetV2(nn.Module):
    """He et al., "Identity Mappings in Deep Residual Networks", 2016, in the form of keras.applications."""

    def __init__(self, blocks, width=1.0, image_size=128, classes=10):
        super().__init__()
        self.image_size = image_size
        widths = [max(1, round(size * width)) for size in (64, 64, 128, 256, 512)]
        self.stem = nn.Conv2d(3, widths[0], 7, stride=2, padding=3)
        inputs, stacks = widths[0], []
        for number, (size, count) in enumerate(zip(widths[1:], blocks, strict=True)):
            stacks += stack(inputs, size, count, stride=1 if number == 3 else 2)
            inputs = 4 * size
        self.blocks = nn.Sequential(*stacks)
        self.last_norm = norm(inputs)
        self.head = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(module.weight)  # what Keras begins with
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, images):
        """Bytes (batch, 3, 32, 32) → logits (batch, 10)."""
        # Images travel as bytes of 32 by 32 pixels, and are enlarged where they are used: 64 times less to move.
        x = images.float() / 127.5 - 1
        if x.shape[-1] != self.image_size:
            x = F.interpolate(x, size=(self.image_size, self.image_size), mode="bilinear")
        # Zeros at the border, as in Keras, and not PyTorch's minus infinity: nothing is activated yet.
        x = F.max_pool2d(F.pad(self.stem(x), [1, 1, 1, 1]), 3, stride=2)
        x = F.relu(self.last_norm(self.blocks(x)))
        return self.head(x.mean(dim=(2, 3)))


def count(name, width, image_size, images=2):
    """What a step has to compute, keep and send, from the layers themselves; on no device, so nothing is computed."""
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()  # once, however often it is used
        return tensor

    with torch.device("meta"):
        model = ResNetV2(BLOCKS[name], width, image_size)
        with FlopCounterMode(display=False) as both, torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept):
            with FlopCounterMode(display=False) as forward:
                loss = model(torch.zeros(images, 3, 32, 32)).sum()
            loss.backward()
    for parameter in model.parameters():  # they are there anyway
        kept.pop(parameter.untyped_storage()._cdata, None)
    trained = sum(parameter.numel() for parameter in model.parameters())
    # What BatchNorm has seen on average is not trained and has no gradient, but Keras counts it.
    seen = sum(buffer.numel() for buffer in model.buffers() if buffer.is_floating_point())
    operations = both.get_total_flops() // images
    return {
        "convolutions and dense layers": sum(isinstance(module, nn.Conv2d | nn.Linear) for module in model.modules()),
        "tensors with a gradient": len(list(model.parameters())),
        "parameters": trained,
        "running statistics": seen,
        "parameters and statistics": trained + seen,
        "bytes of gradients per step": 4 * trained,
        "operations per image, forward": forward.get_total_flops() // images,
        "operations per image, forward and backward": operations,
        "bytes kept per image for the backward pass": sum(kept.values()) // images,
        "operations per image and byte of gradients": round(operations / (4 * trained), 1),
    }


def loss_fn(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def metrics(model, batch):
    images, labels = batch
    logits = model(images)
    return {"loss": F.cross_entropy(logits, labels), "accuracy": (logits.argmax(1) == labels).float().mean()}


def build(args):
    model = ResNetV2(BLOCKS[args.model], args.width, args.image_size)
    if args.channels_last:  # what tensor cores want: for GPUs, with bf16. On CPUs it makes no difference
        model = model.to(memory_format=torch.channels_last)
    return model, torch.optim.SGD(model.parameters(), lr=args.lr * args.workers)


def plain(args, training):
    """The same training without Unisono, on one device: what a scaling study compares with. It takes batches whole."""
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, optimizer = build(args)
    model.to(device)
    loader = DataLoader(training, args.batch_size * args.workers, shuffle=True, num_workers=args.loader_workers)
    steps = 0
    for epoch in range(args.epochs):
        losses, samples, begun = [], 0, time.perf_counter()
        for batch in loader:
            images, labels = (each.to(device) for each in batch)
            with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
                loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            samples += len(labels)
            steps += 1
            if steps == args.steps:
                break
        loss = torch.stack(losses).mean().item()  # waits for the GPU, too
        seconds = time.perf_counter() - begun
        print(json.dumps({"epoch": epoch, "seconds": seconds, "samples": samples, "loss": loss}), flush=True)
        if steps == args.steps:
            break


def train(args, training, held_out):
    # The published rule: each worker brings a batch of 256 and a rate of 0.01. Both are numbers of the job, taken from
    # --workers, never from how many workers there are: however many train it, the weights are the same, bit for bit.
    run = unisono.init(
        batch_size=args.batch_size * args.workers,
        shards=args.shards,
        seed=args.seed,
        arithmetic={"precision": args.precision},
    )
    model, _ = run.prepare(*build(args))

    losses, begun = [], time.perf_counter()
    for step in run.steps(training, epochs=args.epochs, loader_workers=args.loader_workers):
        losses.append(step.run(loss_fn))
        last = args.steps is not None and step.number + 1 >= args.steps
        if step.is_last_in_epoch or last:
            seconds = time.perf_counter() - begun  # the first epoch also warms up: leave it out when you compare
            scores = run.evaluate(held_out, metrics)
            run.print(
                f"epoch {step.epoch + 1}: {seconds:.1f} s, loss {sum(losses) / len(losses):.4f}, "
                f"held-out loss {scores['loss']:.4f}, accuracy {scores['accuracy']:.2%}"
            )
            losses, begun = [], time.perf_counter()
        if last:
            break
    run.finish(model)


def main():
    args = arguments.parse_args()
    if args.count:
        for name, value in count(args.model, args.width, args.image_size).items():
            print(f"{name:>44} {value:>16,}")
        return
    if args.synthetic:
        training, held_out = SyntheticCifar10(args.samples, seed=0), SyntheticCifar10(1000, seed=1)
    elif args.data_dir:
        training, held_out = Cifar10(args.data_dir, train=True), Cifar10(args.data_dir, train=False)
    else:
        arguments.error("--data-dir FOLDER for the images, or --synthetic for made-up ones")

    if args.plain:
        plain(args, training)
    else:
        train(args, training, held_out)


if __name__ == "__main__":  # the loader's processes may import this file
    main()
