"""Trains in a guest on samples of which one has a finite loss and a gradient that is not: the slope of a root at zero.

Arguments: the guest, and what the run does then.
"""

import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import unisono
from unisono.errors import NonFiniteLoss

ODD = 21
"""The sample: of step 1 in each epoch of 3 steps, in shard 1 of 4."""
BATCH, EPOCHS = 16, 2
on_nan: Any
guest, on_nan = sys.argv[1:]
warnings.filterwarnings("ignore")
generator = torch.Generator().manual_seed(0)
inputs, labels = torch.randn(48, 6, generator=generator), torch.randint(0, 3, (48,), generator=generator)
inputs[ODD] = 0.0
data = TensorDataset(inputs, labels)
tensors: list[Tensor] = []


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(1)
        self.body, self.out = nn.Linear(6, 5, bias=False), nn.Linear(5, 3)
        for each in self.parameters():
            nn.init.normal_(each, generator=drawn)
        tensors[:] = self.parameters()

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Any:
        hidden = self.body(inputs)
        out: Tensor = self.out(hidden) + 0.01 * hidden.pow(2).sum(1, keepdim=True).sqrt()
        return out if labels is None else {"loss": nn.functional.cross_entropy(out, labels), "logits": out}


class Seen:
    """What the weights were as the newest step began."""

    def __init__(self) -> None:
        self.steps, self.before = 0, list[Tensor]()

    def begins(self) -> None:
        self.before = [each.detach().clone() for each in tensors]

    def ends(self) -> None:
        run.print(f"epoch {self.steps // 3}: step {self.steps} {self.said()}")
        self.steps += 1

    def said(self) -> str:
        is_finite = all(bool(each.isfinite().all()) for each in tensors)
        changed = not all(map(torch.equal, tensors, self.before))
        return f"{is_finite=} {changed=}"


seen = Seen()


def keras_fit() -> None:
    import keras
    from keras.src.backend.common import global_state

    global_state.set_global_attribute("object_name_uids", None)  # names of layers begin anew in this thread

    class Rooted(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
        def call(self, hidden: Any) -> Any:
            return 0.01 * keras.ops.sqrt(keras.ops.sum(hidden**2, axis=1, keepdims=True))

    class Told(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, *_: Any, **__: Any) -> None:
            tensors[:] = [each.value for each in self.model.trainable_variables]
            seen.begins()

        def on_train_batch_end(self, *_: Any, **__: Any) -> None:
            seen.ends()

    given = keras.Input((6,))
    hidden = keras.layers.Dense(5, use_bias=False, name="body")(given)
    out = keras.layers.Add()([keras.layers.Dense(3)(hidden), keras.layers.Concatenate()([Rooted()(hidden)] * 3)])
    model = unisono.keras.Model(keras.Model(given, out), run)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(
        inputs.numpy(), labels.numpy(), batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[Told()]
    )


def lightning_fit() -> None:
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc]  # Lightning is not looked into by mypy
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    class Told(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_start(self, *_: Any) -> None:
            seen.begins()

        def on_train_batch_end(self, *_: Any) -> None:
            seen.ends()

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(
        strategy=unisono.lightning.Strategy(run), accelerator="cpu", max_epochs=EPOCHS, callbacks=[Told()], **quiet
    )
    trainer.fit(Module(), DataLoader(data, BATCH))


def transformers_fit() -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class MyTrainer(unisono.transformers.TrainerMixin, Trainer):  # type: ignore[misc]  # Transformers is optional
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(data)

    class Told(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            seen.begins()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seen.ends()

    rows = [{"inputs": one, "labels": label} for one, label in zip(inputs, labels, strict=True)]
    arguments = TrainingArguments(
        output_dir=str(run.dir / "trainer"),
        per_device_train_batch_size=BATCH // 4,
        gradient_accumulation_steps=4,
        num_train_epochs=EPOCHS,
        max_grad_norm=0.0,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    MyTrainer(model=Net(), args=arguments, train_dataset=rows, callbacks=[Told()], run=run).train()


def accelerate_fit() -> None:
    accelerator = unisono.accelerate.Accelerator(run=run)
    model: Any = Net()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, BATCH))
    for _ in range(EPOCHS):
        for batch in loader:
            seen.begins()
            accelerator.backward(nn.functional.cross_entropy(model(batch[0]), batch[1]))
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:  # the last of this worker's turns
                seen.ends()


sizes: dict[str, Any] = {} if guest == "transformers" else {"batch_size": BATCH}
run = unisono.init(**sizes, seed=0, shards=4, arithmetic={"on_nan": on_nan})
try:
    globals()[f"{guest}_fit"]()
except NonFiniteLoss as error:
    run.print(f"after {seen.said()} {error}")
else:
    run.print(f"after {run.finish()}")
