"""Second-order methods: K-FAC, and measurements of curvature.

curvature_meter.py measures at a checkpoint, kfac.py is an optimizer.
It may import the core, `faults` and `journal_events`.
"""
