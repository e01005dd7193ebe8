"""The reduction of gradients: buckets, partial sums, and the transports between workers.

Begin with reducer.py; transport.py is the protocol of shared memory, sockets and process groups.
It may import `plan` and what lies below it; it knows nothing of models.
"""
