"""Frameworks that can be guests of a run: each module trains one model, with the framework alone and with Unisono."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol

Note = Callable[[], None]
"""Is called on each worker behind each of its steps."""


class Train(Protocol):
    """How a module of this package trains."""

    def __call__(self, way: str, batch_size: int, workers: int, note: Note) -> None:
        """Train until the process is stopped.

        Args:
            way: one of those that are compared.
            batch_size: the samples of a global batch, over all workers.
            workers: how many train together; Unisono gets as many shards.
            note: to be called behind each step.
        """


@dataclass(frozen=True, slots=True)
class Comparison:
    """A framework, alone and with Unisono; for models on several devices beside the plain loop as well.

    Attributes:
        title: for people.
        framework: a module of this package.
        package: what has to be installed.
        workers: how many train together.
        alone: the way that Unisono is compared with: the framework by itself, on one worker or on several.
        is_beside_plain: whether a loop of torch alone is measured, too, in one process with as many threads as workers.
    """

    title: str
    framework: str
    package: str
    workers: int = 1
    alone: str = "alone"
    is_beside_plain: bool = False

    @property
    def is_installed(self) -> bool:
        """Whether it can be measured here."""
        return find_spec(self.package) is not None

    @property
    def ways(self) -> tuple[str, ...]:
        """What is compared; the second beside the first, and beside the third if there is one."""
        return (self.alone, UNISONO, PLAIN) if self.is_beside_plain else (self.alone, UNISONO)


UNISONO, PLAIN = "unisono", "plain"

COMPARISONS = {
    "accelerate": Comparison("accelerate 1, a Llama, one worker", "accelerate", "accelerate"),
    "accelerate-ddp": Comparison(
        "accelerate 1, a Llama, two workers beside DDP", "accelerate", "accelerate", workers=2, alone="ddp"
    ),
    "fsdp": Comparison(
        "FSDP2, a transformer in slices on two devices", "fsdp", "torch", 2, "fsdp2", is_beside_plain=True
    ),
    "keras": Comparison("Keras 3, a ConvNet, one worker", "keras", "keras"),
    "lightning": Comparison("Lightning, a ConvNet, one worker", "lightning", "lightning"),
    "lightning-ddp": Comparison("Lightning, a ConvNet, two workers", "lightning", "lightning", 2, "ddp"),
    "own-loop": Comparison("a loop of the script's beside step.run, one worker", "own_loop", "torch", alone="step.run"),
    "own-loop-two": Comparison(
        "a loop of the script's beside step.run, two workers", "own_loop", "torch", workers=2, alone="step.run"
    ),
    "stages": Comparison(
        "1F1B, a transformer in stages on two devices", "stages", "torch", 2, "1f1b", is_beside_plain=True
    ),
    "transformers": Comparison("Transformers 5, a Llama, one worker", "transformers", "transformers"),
    "transformers-ddp": Comparison(
        "Transformers 5, a Llama, two workers beside DDP", "transformers", "transformers", workers=2, alone="ddp"
    ),
}
"""By name; one for each framework, and one more where it has a DDP of its own."""


def train_of(framework: str) -> Train:
    """How a framework trains. Imports only what that one needs."""
    train: Train = import_module(f"benchmarks.frameworks.{framework}").train
    return train
