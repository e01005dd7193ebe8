"""A loop that stays the script's beside the same training with ``step.run``, with a small Llama of torch alone."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import unisono
from benchmarks.frameworks import UNISONO, Note

BATCHES, LENGTH, WIDTH, SHARDS = 64, 64, 128, 2
EPOCHS = 10**6


def train(way: str, batch_size: int, workers: int, note: Note) -> None:
    """Train until the process is stopped."""
    run = unisono.init(batch_size=batch_size, shards=SHARDS, seed=0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(256, WIDTH), nn.TransformerEncoder(layer, 2), nn.Linear(WIDTH, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(torch.randint(256, (BATCHES * batch_size, LENGTH))), batch_size=batch_size)

    def loss_of(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return F.cross_entropy(model(batch[0][:, :-1]).flatten(0, 1), batch[0][:, 1:].flatten())

    if way != UNISONO:
        run.prepare(model, optimizer)
        for step in run.steps(loader, epochs=EPOCHS):
            step.run(loss_of)
            note()
        return
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for _ in run.epochs(EPOCHS, loader):
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            if run.sync_gradients:
                note()
