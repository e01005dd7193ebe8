"""The workers that train together: who they are, how they connect, and their collective calls.

Begin with workers.py (this worker and the others), collectives.py (their calls) and elastic.py (losses).
It may import `model` and `config` of `train`.
"""
