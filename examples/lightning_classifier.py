"""Lightning's image classifier, in its shape, on handwritten digits: one line is Unisono's besides its import.

    python examples/lightning_classifier.py                      one worker
    unisono run -n 3 examples/lightning_classifier.py            three workers, the same weights and metrics.csv

It has dropout, a scheduler, metrics of torchmetrics, early stopping and Lightning's checkpoints. Nothing is downloaded:
the 1797 digits of scikit-learn stand for MNIST's. Needs pip install '.[examples,lightning]' in a clone.
"""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from torchmetrics.classification import Accuracy

import unisono


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, 1)
        self.conv2 = nn.Conv2d(16, 32, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(128, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.max_pool2d(x, 2)
        x = torch.flatten(self.dropout1(x), 1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


class ImageClassifier(L.LightningModule):
    def __init__(self, model, lr=1.0, gamma=0.7):
        super().__init__()
        self.save_hyperparameters(ignore="model")
        self.model = model
        self.val_acc = Accuracy(task="multiclass", num_classes=10)
        self.test_acc = Accuracy(task="multiclass", num_classes=10)

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.nll_loss(self(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.val_acc(logits, y)
        self.log("val_acc", self.val_acc)
        self.log("val_loss", F.nll_loss(logits, y))

    def test_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.test_acc(logits, y)
        self.log("test_acc", self.test_acc)
        self.log("test_loss", F.nll_loss(logits, y))

    def configure_optimizers(self):
        optimizer = torch.optim.Adadelta(self.model.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=self.hparams.gamma)]


class DigitsDataModule(L.LightningDataModule):
    def __init__(self, batch_size=64):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
        dataset = TensorDataset(images, torch.tensor(digits.target))
        self.train, self.val, self.test = (
            Subset(dataset, range(*part)) for part in ((0, 1200), (1200, 1500), (1500, 1797))
        )

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=100)

    def test_dataloader(self):
        return DataLoader(self.test, batch_size=100)


L.seed_everything(0)
model = ImageClassifier(Net())
trainer = L.Trainer(
    max_epochs=4,
    gradient_clip_val=1.0,
    log_every_n_steps=5,
    logger=CSVLogger("lightning_logs"),
    callbacks=[EarlyStopping("val_loss", patience=2), ModelCheckpoint(monitor="val_acc", mode="max")],
    enable_progress_bar=False,
    strategy=unisono.lightning.Strategy(),
)
datamodule = DigitsDataModule()
trainer.fit(model, datamodule)
trainer.test(model, datamodule)
