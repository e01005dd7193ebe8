"""The bits that a machine computes: alike on one machine, and otherwise where anything computes otherwise."""

import os
import subprocess
import sys

import pytest
import torch
from torch.optim import Optimizer

from unisono.train.config.bits import OPERATIONS, bits_of

pytestmark = pytest.mark.unit

PROGRAM = """
import json, torch
from unisono.train.config.bits import bits_of
torch.set_num_threads(1)
print(json.dumps(dict(bits_of(torch.device("cpu")))))
"""


def elsewhere(**variables: str) -> str:
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.run(command, env={**os.environ, **variables}, check=True, capture_output=True, text=True).stdout


def test_each_operation_has_a_digest_and_leaves_the_scripts_generator_alone() -> None:
    before, enabled = torch.get_rng_state(), torch.is_grad_enabled()
    found = bits_of(torch.device("cpu"))
    assert list(found) == list(OPERATIONS)
    assert all(len(digest) == 12 for digest in found.values())
    assert len(set(found.values())) == len(found)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.is_grad_enabled() is enabled


def test_every_optimizer_of_torch_that_takes_dense_gradients_takes_a_step() -> None:
    """A job's optimizer is known later than its bits are compared, so all are."""
    kinds = [one for one in vars(torch.optim).values() if isinstance(one, type) and issubclass(one, Optimizer)]
    left_out = {Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam}
    assert {f"a step of {kind.__name__}" for kind in kinds if kind not in left_out} <= set(OPERATIONS)


@pytest.mark.slow
def test_two_processes_of_one_machine_compute_alike_and_another_matrix_library_is_noticed() -> None:
    here = elsewhere()
    assert elsewhere() == here
    assert elsewhere(MKL_CBWR="COMPATIBLE", ONEDNN_MAX_CPU_ISA="SSE41") != here
