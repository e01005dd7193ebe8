"""What torch's compilers make of a program does not depend on what a process met before."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from unisono.errors import JobError
from unisono.job import Job
from unisono.train.config.numerics import MOST_SHAPES, Compilers, apply_numerics
from unisono.train.step.loss import explain

pytestmark = pytest.mark.unit

JOB = Job(batch_size=32, seed=0, shards=2)


@pytest.fixture(autouse=True)
def in_a_run(torch_settings_restored: None) -> Iterator[None]:
    before = apply_numerics(JOB, torch.device("cpu"))
    yield
    before.apply()
    torch._dynamo.reset()


class Graphs:
    """A compiler that notes the sizes for which it was called, a symbol as its name, and compiles nothing."""

    def __init__(self) -> None:
        self.sizes: list[str] = []

    def __call__(self, graph: Any, _: Any) -> Any:
        given = [each.meta["example_value"] for each in graph.graph.find_nodes(op="placeholder")]
        self.sizes.append(", ".join(str(size) for each in given if isinstance(each, Tensor) for size in each.shape))
        return graph.forward


def double(x: Tensor) -> Tensor:
    return x * 2


def test_each_shape_is_compiled_for_itself_whichever_comes_first() -> None:
    graphs = Graphs()
    compiled = torch.compile(double, backend=graphs)

    for size in (22, 64, 22, 48, 64):
        compiled(torch.ones(size, 3))

    assert graphs.sizes == ["22, 3", "64, 3", "48, 3"]


def test_numbers_are_compiled_each_for_itself_too() -> None:
    graphs = Graphs()
    compiled = torch.compile(lambda x, k: x[:k] * k, backend=graphs)

    for number in (2, 3, 4):
        assert compiled(torch.ones(8), number).tolist() == [number] * number

    assert graphs.sizes == ["8"] * 3


@pytest.mark.parametrize("way", ["dynamic=True", "mark_dynamic", "maybe_mark_dynamic"])
def test_a_kernel_for_several_shapes_is_refused(way: str) -> None:
    compiled = torch.compile(double, backend="eager", dynamic=True if way == "dynamic=True" else None)
    batch = torch.ones(22, 3)
    if way != "dynamic=True":
        getattr(torch._dynamo, way)(batch, 0)

    with pytest.raises(JobError, match="is to be compiled for several shapes .* leave it out") as refused:
        compiled(batch)

    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    "stance",
    [
        {"stance": "eager_on_recompile"},
        {"stance": "eager_then_compile"},
        {"stance": "default", "skip_guard_eval_unsafe": True},
    ],
)
def test_a_stance_by_which_the_first_shapes_decide_is_refused(stance: dict[str, Any]) -> None:
    compiled = torch.compile(double, backend="eager")

    with (
        torch.compiler.set_stance(**stance),
        pytest.raises(JobError, match=r"torch.compiler.set_stance\('.*leave it out"),
    ):
        compiled(torch.ones(22, 3))

    assert compiled(torch.ones(22, 3)).sum() == 132


@pytest.mark.parametrize("stance", ["force_eager", "fail_on_recompile"])
def test_other_stances_are_the_scripts_own_affair(stance: str) -> None:
    graphs = Graphs()
    compiled = torch.compile(double, backend=graphs)
    compiled(torch.ones(22, 3))

    with torch.compiler.set_stance(stance):
        assert compiled(torch.ones(22, 3)).sum() == 132

    assert graphs.sizes == ["22, 3"]


def test_what_is_compiled_without_a_first_shape_is_allowed() -> None:
    batch = torch.ones(22, 3)
    torch._dynamo.decorators.mark_unbacked(batch, 0)

    assert torch.compile(double, backend="eager")(batch).shape == (22, 3)


def test_a_model_is_exported_for_several_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)  # else its thread stays
    rows = {"x": {0: torch.export.Dim("rows")}}

    exported = torch.export.export(_Double(), (torch.ones(22, 3),), dynamic_shapes=rows, strict=True)

    assert exported.module()(torch.ones(7, 3)).shape == (7, 3)


class _Double(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def test_beyond_the_limit_of_shapes_nothing_falls_back_to_computing_without_compiler() -> None:
    torch._dynamo.config.recompile_limit = 2
    compiled = torch.compile(double, backend=Graphs())
    for size in (1, 2):
        compiled(torch.ones(size))

    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit) as refused:
        compiled(torch.ones(3))
    with pytest.raises(JobError, match=r"torch.compile has come to the limit .*recompile_limit \(now 2\)"):
        explain(refused.value)


def test_the_limit_of_shapes_is_raised_and_a_scripts_own_higher_one_stays() -> None:
    assert torch._dynamo.config.recompile_limit == MOST_SHAPES
    torch._dynamo.config.recompile_limit = 1000
    before = apply_numerics(JOB, torch.device("cpu"))
    assert torch._dynamo.config.recompile_limit == 1000
    before.apply()


def test_all_is_put_back_when_a_run_ends() -> None:
    within = Compilers.current()
    before = apply_numerics(JOB, torch.device("cpu"))
    Compilers({"automatic_dynamic_shapes": True}, {"deterministic": False}, profiles=True, refuses=False).apply()
    graphs = Graphs()
    compiled = torch.compile(lambda x: x + 1, backend=graphs)
    for size in (22, 64):
        compiled(torch.ones(size))
    before.apply()

    assert graphs.sizes == ["22", "s77"]
    assert Compilers.current() == within


def activation(x: Tensor, w: Tensor) -> Tensor:
    hidden = torch.nn.functional.layer_norm(torch.nn.functional.linear(x, w), [33])
    hidden = torch.tanh(hidden) * torch.sigmoid(hidden) + torch.nn.functional.gelu(hidden)
    return (hidden / (1.0 + hidden * hidden)).std() + torch.erf(hidden).sum()


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script.*:DeprecationWarning", "ignore:.*torch.jit.script.*:FutureWarning"
)
def test_torch_script_computes_its_first_run_like_all_others() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(16, 20, generator=generator), torch.randn(33, 20, generator=generator)

    def gradient(function: Callable[..., Tensor]) -> bytes:
        trained = w.clone().requires_grad_()
        function(x, trained).backward()
        assert trained.grad is not None
        return trained.grad.numpy().tobytes()

    script = torch.jit.script(activation)
    assert {gradient(script) for _ in range(4)} == {gradient(activation)}
