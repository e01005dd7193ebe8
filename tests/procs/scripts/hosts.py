"""Trains jobs of ``exact_jobs.py`` on hosts with several workers each: ``hosts.py HOSTS WORKERS JOB…``.

Groups of processes stand for hosts. Torch is loaded once for all of them: they are forked.
"""

import multiprocessing
import os
import socket
import sys

import exact_jobs  # type: ignore[import-not-found]  # it stands beside this file; loads torch

import unisono.train.start  # noqa: F401 (once, and not in each worker)


def work(rank: int, variables: dict[str, str]) -> None:
    """Be a worker, as ``torchrun`` would tell it."""
    os.environ.update(variables, RANK=str(rank), LOCAL_RANK=str(rank % int(variables["LOCAL_WORLD_SIZE"])))
    exact_jobs.main()


def main() -> None:
    """Start all of them, and wait."""
    hosts, local = int(sys.argv.pop(1)), int(sys.argv.pop(1))
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    world = {"WORLD_SIZE": str(hosts * local), "LOCAL_WORLD_SIZE": str(local)}
    variables = {**world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=work, args=(rank, variables)) for rank in range(hosts * local)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    sys.exit(max(abs(worker.exitcode or 0) for worker in workers))


if __name__ == "__main__":
    main()
