"""A worker that does one all-reduce with the others and checks the sum: whether a backend really works here."""

import faulthandler
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from unisono.device import choose_device
from unisono.membership.environment import Environment, recognise
from unisono.membership.rendezvous import Generation, form_group, open_store
from unisono.plan.split import Split

TIMEOUT_S = 30.0
LONGEST_S = 90.0


def main() -> None:
    """Do it with the backend that the first argument names.

    Raises:
        ValueError: an unknown backend.
        ArithmeticError: the sum is wrong.
    """
    faulthandler.dump_traceback_later(LONGEST_S, exit=True)  # a backend that hangs is a result too
    backend = sys.argv[1]
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"{backend}: the backends are gloo and nccl")
    environment = recognise(os.environ)
    device = choose_device("cpu" if backend == "gloo" else None, environment.local_rank)
    store: Any = open_store(environment, TIMEOUT_S) if environment.world_size > 1 else dist.HashStore()
    generation = Generation(1, environment.rank, Split.even(environment.world_size, environment.world_size))
    _all_reduce(form_group(store, generation, backend, TIMEOUT_S), environment, device)
    faulthandler.cancel_dump_traceback_later()


def _all_reduce(group: Any, environment: Environment, device: torch.device) -> None:
    tensor = torch.full((1024,), float(environment.rank + 1), device=device)
    group.allreduce([tensor]).wait()
    expected = sum(range(1, environment.world_size + 1))
    if not bool((tensor == expected).all()):
        raise ArithmeticError(f"the sum over {environment.world_size} workers is {tensor[0]}, not {expected}")


if __name__ == "__main__":
    main()
