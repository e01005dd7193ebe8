"""The models and optimizers that are trained, as tensors with names, and how they are updated.

Begin with prepared.py (what run.prepare got) and update.py; slices.py and stages.py are models on several devices.
It may import `config` of `train`.
"""
