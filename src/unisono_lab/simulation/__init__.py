"""A job in virtual time: the real coordinator's decisions and the real policies, on simulated hosts.

simulation.py runs many simulated_run.py; scenario.py reads what is to be simulated, calibration.py their times.
It may import `recorded`, `page`, `strategies`, `second_order` and what lies below them.
"""
