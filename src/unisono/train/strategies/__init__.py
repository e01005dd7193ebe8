"""The strategies whose workers have weights of their own between synchronisations, at work.

Begin with exact_steps.py; local_training.py trains each worker by itself.
It may import `loop` of `train`, and what lies below it.
"""
