"""What Unisono promises, checked on one GPU in at most eight minutes: ``make gpu-check``.

With a Python of one's own, from the repository's root: ``PYTHONPATH=src:tests/warm python -m benchmarks.gpu_check``.
Without a GPU, ``--simulated`` takes the accelerator of the tests, ``--device cpu`` the CPU; ``--small`` makes all of it
small.
"""
