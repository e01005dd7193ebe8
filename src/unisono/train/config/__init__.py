"""The configuration of a run before it starts: variables of the launcher, batch scaling, torch's switches.

run_config.py makes one frozen value of arguments and environment; numerics.py sets torch's switches.
It may import nothing else of `train`.
"""
