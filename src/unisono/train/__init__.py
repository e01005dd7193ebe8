"""The run inside a worker: the loops over data, their steps, recovery and records.

Begin with run.py (what a script holds), assembly.py (what a run is made of) and step/step_engine.py (a step).
It may import `adapt`, `sync`, `checkpoint`, `data`, `reduce`, `membership`, `loggers` and below.
"""
