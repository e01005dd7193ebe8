"""What workers' devices and libraries must have in common, and what their libraries are told."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from unisono.device import bits_of_device, variables_for
from unisono.errors import JobError
from unisono.job import Job
from unisono.train.config.numerics import fingerprint

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")
BACKENDS: Any = torch.backends


@pytest.fixture(autouse=True)
def precisions_restored() -> Iterator[None]:
    """Of both backends, whichever switch a test sets."""
    backends = (BACKENDS.cuda.matmul, BACKENDS.mkldnn.matmul)
    before = [each.fp32_precision for each in backends]
    yield
    for each, precision in zip(backends, before, strict=True):
        each.fp32_precision = precision


def test_after_torchs_new_switches_a_run_begins_all_the_same() -> None:
    BACKENDS.cuda.matmul.fp32_precision = "tf32"
    assert fingerprint(Job.create(batch_size=8), CPU)["device"] == "cpu"


def test_how_exact_float32_is_and_which_attention_torch_may_choose_are_compared() -> None:
    math, fused = torch.nn.attention.SDPBackend.MATH, torch.nn.attention.SDPBackend.FLASH_ATTENTION
    BACKENDS.mkldnn.matmul.fp32_precision = "ieee"
    with torch.nn.attention.sdpa_kernel([math, fused]):
        before = bits_of_device(CPU)
    BACKENDS.mkldnn.matmul.fp32_precision = "bf16"
    with torch.nn.attention.sdpa_kernel(math):
        after = bits_of_device(CPU)
    assert {name for name in before if before[name] != after[name]} == {"float32 precision", "attention kernels"}


@pytest.mark.parametrize("value", [None, ":4096:8", ":16:8"])
def test_cublas_gets_a_workspace_with_which_its_bits_are_the_same_each_time(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if value is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", value)
    assert variables_for("cuda", deterministic=True)["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_a_workspace_that_allows_other_bits_is_refused_unless_nobody_wants_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(JobError, match="CUBLAS_WORKSPACE_CONFIG=':0:0' lets cuBLAS give other bits"):
        variables_for("cuda", deterministic=True)
    assert "CUBLAS_WORKSPACE_CONFIG" not in variables_for("cuda", deterministic=False)


def test_other_kinds_of_accelerators_are_told_nothing() -> None:
    assert variables_for("xpu", deterministic=True) == {}
