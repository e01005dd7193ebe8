"""Fault injection: fault plans, the injection of faults, and the check of the result.

faults.py reads fault plans, injector.py carries them out in a worker, samples.py checks which samples were used.
It may import the core, and nothing else of the lab.
"""
