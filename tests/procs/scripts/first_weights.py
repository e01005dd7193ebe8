"""The first weights of a model that is built after the script's own seed: by a guest, or by its framework alone."""

import hashlib
import sys
from collections.abc import Callable
from typing import Any

import unisono

guest, is_alone = sys.argv[1], "alone" in sys.argv


def torch_layer() -> list[Any]:
    from torch import nn

    return [one.detach().numpy() for one in nn.Linear(5, 3).parameters()]


def keras() -> list[Any]:
    import keras

    keras.utils.set_random_seed(0)
    if not is_alone:
        unisono.keras.Model(keras.Sequential([keras.Input((2,)), keras.layers.Flatten()]))
    return list(keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)]).get_weights())


def lightning() -> list[Any]:
    import lightning as L

    L.seed_everything(0)
    if not is_alone:
        unisono.lightning.Strategy()
    return torch_layer()


def accelerate() -> list[Any]:
    from accelerate.utils import set_seed

    set_seed(0)
    if not is_alone:
        unisono.accelerate.Accelerator()
    return torch_layer()


def transformers() -> list[Any]:
    from torch import nn
    from transformers import Trainer, TrainingArguments, set_seed

    class Ours(unisono.transformers.TrainerMixin, Trainer):  # type: ignore[misc]
        pass

    found: list[Any] = []

    def model() -> nn.Module:
        found[:] = torch_layer()
        return nn.Linear(5, 3)

    set_seed(0)
    kind: Any = Trainer if is_alone else Ours
    kind(model_init=model, args=TrainingArguments("out", use_cpu=True, report_to=[]))
    return found + torch_layer()


guests: dict[str, Callable[[], list[Any]]] = {
    "keras": keras,
    "lightning": lightning,
    "accelerate": accelerate,
    "transformers": transformers,
}
print("FIRST", hashlib.sha256(b"".join(one.tobytes() for one in guests[guest]())).hexdigest(), flush=True)
