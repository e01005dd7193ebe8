"""The models and optimizers that are trained, as tensors with names, and how they are updated."""
