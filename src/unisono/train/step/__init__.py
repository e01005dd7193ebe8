"""One step under the exact strategy: gradients, their sum, the update.

Begin with step_engine.py (the order of a step) and part.py (what can take part in it); summed_gradients.py adds shards.
It may import `state` of `train`, and what lies below it.
"""
