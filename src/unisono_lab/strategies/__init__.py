"""Strategies whose workers ask servers, a central model or each other: as values, and as a worker's part in them.

parameter_server.py, averaging.py and asynchronous_server.py are strategies by name; replicas.py is a worker's part.
It may import the core, `faults` and `journal_events`.
"""
