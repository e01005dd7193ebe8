"""Trains in float16 in a guest, told by the guest's own setting, on samples of which a few make gradients overflow.

Arguments: the guest.
"""

import math
import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset

import unisono

LARGE = slice(45, 48)
"""The samples whose gradients overflow: of step 2 in each epoch of 3 steps."""
BATCH, EPOCHS = 16, 4
[guest] = sys.argv[1:]
warnings.filterwarnings("ignore")
generator = torch.Generator().manual_seed(0)
inputs, labels = torch.randn(48, 6, generator=generator), torch.randint(0, 3, (48,), generator=generator)
inputs[LARGE] *= 3e3
data = TensorDataset(inputs, labels)
tensors: list[Tensor] = []
runs: list[unisono.Run] = []
settings: dict[str, Any] = {"seed": 0, "shards": 5}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(1)
        self.body, self.out = nn.Linear(6, 16), nn.Linear(16, 3)
        for each in self.parameters():
            nn.init.normal_(each, std=0.3, generator=drawn)
        tensors[:] = self.parameters()

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Any:
        hidden = self.body(inputs)
        assert hidden.dtype == torch.float16
        out = self.out(torch.relu(hidden))
        return out if labels is None else {"loss": nn.functional.cross_entropy(out, labels), "logits": out}


class Seen:
    """What the newest step has changed."""

    def __init__(self) -> None:
        self.before = list[Tensor]()

    def begins(self) -> None:
        self.before = [each.detach().clone() for each in tensors]

    def ends(self, step: int, rate: float, norm: float = 0.0) -> None:
        changed = not all(map(torch.equal, tensors, self.before))
        scale = runs[-1].inside.trained.loss_scale.value
        runs[-1].print(f"epoch 0: step {step} {changed=} {scale=} {rate=} {norm=}")


seen = Seen()


def keras_fit() -> None:
    import keras
    from keras.src.backend.common import global_state

    global_state.set_global_attribute("object_name_uids", None)  # names of layers begin anew in this thread
    keras.config.set_dtype_policy("mixed_float16")

    class Told(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
        steps = 0

        def on_train_batch_begin(self, *_: Any, **__: Any) -> None:
            tensors[:] = [each.value for each in self.model.trainable_variables]
            seen.begins()

        def on_train_batch_end(self, *_: Any, **__: Any) -> None:
            self.steps += 1
            seen.ends(self.steps, float(self.model.optimizer.iterations.value))

    given = keras.Input((6,))
    kinds = keras.initializers.RandomNormal(stddev=0.3, seed=1)
    hidden = keras.layers.Dense(16, "relu", kernel_initializer=kinds)(given)
    out = keras.layers.Dense(3, dtype="float32", kernel_initializer=kinds)(hidden)
    model = unisono.keras.Model(keras.Model(given, out), **settings)
    runs.append(model.run)
    optimizer = keras.optimizers.Adam(0.01, clipnorm=1.0)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    arrays = inputs.numpy(), labels.numpy()
    told = model.fit(*arrays, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[Told()])
    model.run.print(f"after {model.evaluate(*arrays, verbose=0)} {told.history}")
    keras.config.set_dtype_policy("float32")


def lightning_fit() -> None:
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc]  # Lightning is not looked into by mypy
        def __init__(self) -> None:
            super().__init__()
            self.net, self.norm = Net(), 0.0

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.log("validation", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.norm = float(lightning.pytorch.utilities.grad_norm(self, 2)["grad_2.0_norm_total"])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            schedule = {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}
            return [optimizer], [schedule]

    class Told(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_start(self, *_: Any) -> None:
            seen.begins()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            assert outputs["loss"].isfinite()
            seen.ends(trainer.global_step, trainer.optimizers[0].param_groups[0]["lr"], module.norm)

    half = lightning.pytorch.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    strategy = unisono.lightning.Strategy(precision_plugin=half, **settings)
    runs.append(strategy.run)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(
        strategy=strategy, accelerator="cpu", max_epochs=EPOCHS, callbacks=[Told()], gradient_clip_val=1.0, **quiet
    )
    trainer.fit(Module(), DataLoader(data, BATCH), DataLoader(data, BATCH))
    strategy.run.print(f"after {trainer.callback_metrics} {trainer.scaler.get_scale()}")


def transformers_fit() -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class MyTrainer(unisono.transformers.TrainerMixin, Trainer):  # type: ignore[misc]  # Transformers is optional
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(data)

    class Told(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            seen.begins()

        def on_step_end(self, _: Any, state: Any, __: Any, lr_scheduler: Any, **___: Any) -> None:
            seen.ends(state.global_step, lr_scheduler.get_last_lr()[0])

    rows = [{"inputs": one, "labels": label} for one, label in zip(inputs, labels, strict=True)]
    arguments = TrainingArguments(
        output_dir="trainer",
        per_device_train_batch_size=BATCH,
        num_train_epochs=EPOCHS,
        fp16=True,
        use_cpu=True,
        save_strategy="no",
        logging_steps=1,
        seed=0,
        report_to=[],
        disable_tqdm=True,
    )
    run = unisono.init(arithmetic={"precision": "fp16"}, **settings)
    runs.append(run)
    trainer = MyTrainer(model=Net(), args=arguments, train_dataset=rows, eval_dataset=rows, callbacks=[Told()], run=run)
    trainer.train()
    told = {name: value for name, value in trainer.evaluate().items() if name in ("eval_loss", "epoch")}
    lines = [[line.get(name) for name in ("loss", "grad_norm", "step")] for line in trainer.state.log_history]
    run.print(f"after {told} {lines}")


def accelerate_fit() -> None:
    accelerator = unisono.accelerate.Accelerator(mixed_precision="fp16", cpu=True, **settings)
    runs.append(accelerator.run)
    model: Any = Net()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, DataLoader(data, BATCH), schedule)
    for _ in range(EPOCHS):
        model.train()
        for batch in loader:
            seen.begins()
            accelerator.backward(nn.functional.cross_entropy(model(batch[0]), batch[1]))
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:  # the last of this worker's turns
                assert math.isfinite(accelerator.mean_loss)
                assert accelerator.optimizer_step_was_skipped == (not norm)
                seen.ends(accelerator.steps_done, schedule.get_last_lr()[0], float(norm))
    model.eval()
    with torch.no_grad():
        outs = torch.cat([accelerator.gather_for_metrics(model(batch[0])) for batch in loader])
    accelerator.run.print(f"after {float(outs.double().sum())} {accelerator.scaler.get_scale()}")


globals()[f"{guest}_fit"]()
runs[-1].finish()
