"""PyTorch Lightning: ``Trainer(strategy=unisono.lightning.Strategy())`` trains on any number of workers."""

from unisono.integrations.lightning.strategy import LightningStrategy as Strategy

__all__ = ["Strategy"]
