"""Two models and two optimizers on one batch: a small GAN that learns to draw digits of 8 by 8 pixels.

python examples/gan.py
unisono run -n 2 examples/gan.py           both models have the same weights, to the last bit
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import unisono

NOISE = 16

arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
arguments.add_argument("--epochs", type=int, default=60)
arguments.add_argument("--batch-size", type=int, default=64, help="of all workers together")
arguments.add_argument("--seed", type=int, default=0)


def drawn(generator, count):
    # Each shard has a random stream of its own, so the noise does not depend on the worker that computes it.
    device = next(generator.parameters()).device
    return generator(torch.randn(count, NOISE, device=device))


def discriminator_loss(models, batch):
    """With several models the loss function gets the list that was given to prepare."""
    generator, discriminator = models
    (images,) = batch
    fakes = drawn(generator, len(images)).detach()  # this loss is not the generator's business
    return F.softplus(-discriminator(images)).mean() + F.softplus(discriminator(fakes)).mean()


def generator_loss(models, batch):
    generator, discriminator = models
    (images,) = batch
    return F.softplus(-discriminator(drawn(generator, len(images)))).mean()


def picture(image):
    """An image in -1 … 1 as eight lines of characters."""
    shades = " .:-=+*#%@"
    return "\n".join("".join(2 * shades[int((value + 1) * 4.99)] for value in row) for row in image.view(8, 8).tolist())


def main():
    args = arguments.parse_args()
    run = unisono.init(batch_size=args.batch_size, seed=args.seed)
    dataset = TensorDataset(torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1)

    generator = nn.Sequential(nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, 64), nn.Tanh())
    discriminator = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.99))
    run.prepare([generator, discriminator], [optimizer_g, optimizer_d])

    for step in run.steps(dataset, epochs=args.epochs, drop_last=True):
        # Two updates in one step, on one batch: each names the optimizer whose parameters it changes.
        loss_d = step.run(discriminator_loss, optimizer=optimizer_d)
        loss_g = step.run(generator_loss, optimizer=optimizer_g)
        if step.is_last_in_epoch and step.epoch % 10 == 0:
            run.print(f"epoch {step.epoch}: discriminator {loss_d:.3f}, generator {loss_g:.3f}")

    with torch.no_grad():
        run.print(picture(drawn(generator, 1).cpu()))
    run.finish()  # of everything that was prepared


if __name__ == "__main__":
    main()
