"""Lightning's own autoencoder example on real handwritten digits: one line is Unisono's besides its import.

    python examples/lightning_autoencoder.py                      one worker
    unisono run -n 3 examples/lightning_autoencoder.py            three workers, the same weights to the last bit

Nothing is downloaded: the 1797 digits of scikit-learn stand for MNIST's. Needs pip install '.[examples,lightning]' in
a clone.
"""

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn, optim, utils

import unisono

L.seed_everything(0)

# define any number of nn.Modules (or use your current ones)
encoder = nn.Sequential(nn.Linear(8 * 8, 64), nn.ReLU(), nn.Linear(64, 3))
decoder = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 8 * 8))


# define the LightningModule
class LitAutoEncoder(L.LightningModule):
    def __init__(self, encoder, decoder):
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder

    def training_step(self, batch, batch_idx):
        # training_step defines the train loop.
        # it is independent of forward
        x, _ = batch
        x = x.view(x.size(0), -1)
        z = self.encoder(x)
        x_hat = self.decoder(z)
        loss = nn.functional.mse_loss(x_hat, x)
        # Logging to TensorBoard (if installed) by default
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return optim.Adam(self.parameters(), lr=1e-3)


# init the autoencoder
autoencoder = LitAutoEncoder(encoder, decoder)

# setup data
digits = load_digits()
dataset = utils.data.TensorDataset(torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target))
train_loader = utils.data.DataLoader(dataset, batch_size=32, shuffle=True)

# train the model (hint: here are some helpful Trainer arguments for rapid idea iteration)
trainer = L.Trainer(
    limit_train_batches=40,
    max_epochs=2,
    enable_progress_bar=False,
    strategy=unisono.lightning.Strategy(),
)
trainer.fit(model=autoencoder, train_dataloaders=train_loader)

# embed 4 images
encoder = autoencoder.encoder.eval()
embeddings = encoder(torch.tensor(digits.data[:4], dtype=torch.float32) / 16)
if trainer.is_global_zero:
    print("Predictions (4 image embeddings):\n", embeddings.tolist())
