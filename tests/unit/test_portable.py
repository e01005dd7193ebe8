"""Kernels that compute alike on every processor: right, and in torch's place only while a portable run is open."""

import math
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

import unisono
from unisono.errors import JobError
from unisono.host.machine import PORTABLE, missing_portable_variables, numerics_variables
from unisono.train.config.bits import KERNELS, LEAST_PRODUCT, require_portable

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")
FUNCTIONS = {"sqrt": torch.sqrt, "atan": torch.atan, "asin": torch.asin, "acos": torch.acos}
is_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="portable numerics are for x86 processors")


@pytest.fixture
def kernels() -> Iterator[None]:
    KERNELS.put(True)
    yield
    KERNELS.put(False)


def near_one(dtype: torch.dtype, count: int = 4099) -> Tensor:
    return torch.linspace(0.0001, 0.9999, count, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_roots_are_rounded_correctly(kernels: None, dtype: torch.dtype) -> None:
    x = torch.cat(
        [near_one(dtype), near_one(dtype) * 1e30, torch.tensor([0.0, -0.0, math.inf, math.nan, -1.0], dtype=dtype)]
    )
    exact = [math.sqrt(each) if each >= 0 else math.nan for each in x.tolist()]  # of float32, rounded twice: no matter
    assert x.sqrt().nan_to_num(7).tolist() == torch.tensor(exact, dtype=dtype).nan_to_num(7).tolist()
    assert torch.equal(x[:9].pow(0.5), x[:9].sqrt())
    assert torch.equal(torch._foreach_sqrt([x[:9]])[0], x[:9].sqrt())


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_each_function_is_as_near_to_the_truth_as_torchs_own_of_any_dtype(name: str, dtype: torch.dtype) -> None:
    x = near_one(torch.float64).to(dtype)
    own = FUNCTIONS[name](x)
    KERNELS.put(True)
    try:
        found, written = FUNCTIONS[name](x), torch.empty(0, dtype=dtype)
        FUNCTIONS[name](x, out=written)
        changed = getattr(x.clone(), f"{name}_")()
    finally:
        KERNELS.put(False)
    assert found.dtype == dtype
    torch.testing.assert_close(found, own)
    assert torch.equal(written, found)
    assert torch.equal(changed, found)


def test_whole_numbers_views_and_other_outputs_are_taken_as_torch_takes_them(kernels: None) -> None:
    assert torch.tensor([4, 9]).sqrt().tolist() == [2.0, 3.0]
    square = torch.arange(12.0).view(3, 4)
    assert torch.equal(square.t().sqrt(), square.sqrt().t())
    assert square.t().sqrt().stride() == square.t().stride()
    out = torch.empty(3, 4, dtype=torch.float64)
    assert torch.equal(torch.sqrt(square, out=out), square.sqrt().double())
    every_second = torch.arange(12.0)
    every_second[::2].sqrt_()
    assert torch.tensor(2.0).sqrt().shape == ()
    assert torch.empty(0).sqrt().shape == (0,)


def test_gradients_are_those_of_the_formulas(kernels: None) -> None:
    x = near_one(torch.float64, 7).requires_grad_()
    for function in (*FUNCTIONS.values(), lambda x: x**0.5, lambda x: x**2):
        assert torch.autograd.gradcheck(function, (x,))


SHAPES = [(128, 128, 128), (64, 400, 100), (1, 2048, 1024), (3, 2, 1), (0, 5, 4)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)], ids=str)
def test_products_are_torchs_whatever_their_layout(
    kernels: None, shape: tuple[int, int, int], turned: tuple[bool, bool]
) -> None:
    m, k, n = shape
    draw = torch.Generator().manual_seed(0)
    a = torch.randn(*((k, m) if turned[0] else (m, k)), generator=draw)
    b = torch.randn(*((n, k) if turned[1] else (k, n)), generator=draw)
    a, b, c = a.t() if turned[0] else a, b.t() if turned[1] else b, torch.randn(n, generator=draw)
    right = (a.double() @ b.double()).float()
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
    close(a @ b, right)
    close(torch.mm(a, b, out=torch.empty(0)), right)
    close(torch.addmm(c, a, b), right + c)
    close(torch.addmm(c, a, b, beta=0.5, alpha=2), 2 * right + c / 2)
    close(right.clone().addmm_(a, b), right + right)


def test_large_products_do_not_depend_on_where_their_operands_lie(kernels: None) -> None:
    a, b = torch.randn(128, 128), torch.randn(128, 128)
    assert a.numel() * 128 >= LEAST_PRODUCT
    first = a @ b
    for offset in range(1, 17):
        room = torch.zeros(128 * 128 + 32)
        moved = room[offset : offset + 128 * 128].view(128, 128).copy_(a)
        assert torch.equal(moved @ b, first)


def test_a_large_layer_learns(kernels: None) -> None:
    x, w, b = (torch.randn(*shape, dtype=torch.float32, requires_grad=True) for shape in ((128, 96), (100, 96), (100,)))
    torch.nn.functional.linear(x, w, b).square().sum().backward()
    mine = [each.grad for each in (x, w, b)]
    wide = [each.detach().double().requires_grad_() for each in (x, w, b)]
    torch.nn.functional.linear(*wide).square().sum().backward()
    for one, other in zip(mine, wide, strict=True):
        assert one is not None
        assert other.grad is not None
        torch.testing.assert_close(one, other.grad.float(), rtol=1e-3, atol=1e-3)


def test_an_lstm_is_torchs_own_and_onednn_is_on_again_behind_it(kernels: None) -> None:
    lstm, x = torch.nn.LSTM(12, 10), torch.randn(4, 3, 12)
    found = lstm(x)[0]
    assert torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        assert torch.equal(lstm(x)[0], found)
    finally:
        torch._C._set_mkldnn_enabled(True)
    found.sum().backward()
    assert all(each.grad is not None for each in lstm.parameters())


def test_torchs_own_kernels_are_back_when_the_last_run_is_over() -> None:
    x = near_one(torch.float32)
    before = x.atan()
    KERNELS.put(True)
    KERNELS.put(True)
    assert KERNELS.are_in_place
    KERNELS.put(False)
    KERNELS.put(False)
    assert torch.equal(x.atan(), before)


def test_variables_belong_to_the_portable_level_alone() -> None:
    assert numerics_variables(None) == {}
    assert missing_portable_variables(PORTABLE) == []
    assert missing_portable_variables({**PORTABLE, "MKL_CBWR": "AVX2"}) == ["MKL_CBWR is AVX2"]
    assert len(missing_portable_variables({})) == len(PORTABLE)


def test_a_portable_run_on_a_gpu_is_refused_with_the_reason() -> None:
    with pytest.raises(JobError, match="this run computes on cuda: what a GPU computes depends on its kind"):
        require_portable(torch.device("cuda", 0), PORTABLE)


@is_x86
def test_a_process_that_has_loaded_torch_otherwise_is_told_what_to_do(one_worker: None, tmp_path: Path) -> None:
    with pytest.raises(
        JobError, match=r"MKL_CBWR is not set.*unisono run --numerics portable.*export ATEN_CPU_CAPABILITY=avx2"
    ):
        require_portable(CPU, {name: value for name, value in PORTABLE.items() if name != "MKL_CBWR"})
    with pytest.raises(JobError, match="others in this process"):
        unisono.init(batch_size=32, arithmetic={"numerics": "portable"}, run_dir=tmp_path / "run")
    assert not KERNELS.are_in_place
    assert not (tmp_path / "run").exists()


@is_x86
def test_variables_that_are_set_after_torch_was_loaded_are_noticed() -> None:
    program = """
import torch, os
torch.ones(64, 64) @ torch.ones(64, 64)
from unisono.host.machine import PORTABLE
os.environ.update(PORTABLE)
from unisono.train.config.bits import require_portable
require_portable(torch.device("cpu"))
"""
    own = {name: value for name, value in os.environ.items() if name not in PORTABLE}
    ended = subprocess.run([sys.executable, "-c", program], env=own, capture_output=True, text=True, check=False)
    assert "set after torch was loaded" in ended.stderr
