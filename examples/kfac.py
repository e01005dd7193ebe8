"""K-FAC (experimental) on handwritten digits: a ConvNet with BatchNorm, which no rule of K-FAC knows.

    python examples/kfac.py                      one worker
    unisono run -n 1:3 examples/kfac.py          one to three workers that come and go, the same weights to the last bit

Needs scikit-learn: pip install '.[examples]' in a clone.
"""

import argparse

import unisono
import unisono_lab
from digits import conv_net, load, loss_fn, metrics

arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
arguments.add_argument("--epochs", type=int, default=3)
arguments.add_argument("--lr", type=float, default=0.03)
arguments.add_argument("--damping", type=float, default=0.1)
arguments.add_argument("--run-dir", help="where metrics, checkpoints and the result go")


def main():
    args = arguments.parse_args()
    run = unisono.init(batch_size=128, seed=0, run_dir=args.run_dir)
    training, held_out = load()
    model = conv_net()
    optimizer = unisono_lab.KFAC(model, lr=args.lr, damping=args.damping)
    model, optimizer = run.prepare(model, optimizer)
    for step in run.steps(training, epochs=args.epochs):
        step.run(loss_fn)
        if step.is_last_in_epoch:
            run.print(f"epoch {step.epoch}: accuracy {run.evaluate(held_out, metrics)['accuracy']:.2%}")
    run.finish(model)


if __name__ == "__main__":
    main()
