"""The networks of the case study are the published ones."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytestmark = pytest.mark.unit

EXAMPLE = Path(__file__).parents[2] / "examples" / "resnet_cifar10.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("resnet_cifar10_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLE.parent)  # where a script finds what lies beside it
        spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "without_head", "millions"), [("resnet50v2", 23_564_800, 23.59), ("resnet152v2", 58_331_648, 58.35)]
)
def test_a_network_has_as_many_parameters_as_keras_says(
    example: ModuleType, name: str, without_head: int, millions: float
) -> None:
    with torch.device("meta"):
        model = example.ResNetV2(example.BLOCKS[name])
    statistics = sum(buffer.numel() for buffer in model.buffers() if buffer.is_floating_point())
    total = sum(parameter.numel() for parameter in model.parameters()) + statistics
    assert total == without_head + 2048 * 10 + 10
    assert round(total / 1e6, 2) == millions


def test_what_a_step_computes_keeps_and_sends_is_counted(example: ModuleType) -> None:
    counted = example.count("resnet50v2", 0.125, 32)
    assert counted["tensors with a gradient"] == 174
    assert counted["parameters and statistics"] == counted["parameters"] + counted["running statistics"]
    assert counted["bytes of gradients per step"] == 4 * counted["parameters"]
    forward, both = (counted[f"operations per image, forward{more}"] for more in ("", " and backward"))
    assert 2 < both / forward < 3  # the image needs no gradient
    assert counted["bytes kept per image for the backward pass"] > 4 * 16 * 16 * 8  # what the first layer puts out


def test_a_stack_halves_the_image_in_its_last_block_and_the_last_stack_does_not(example: ModuleType) -> None:
    with torch.device("meta"):
        model = example.ResNetV2(example.BLOCKS["resnet50v2"])
        x = torch.zeros(1, 64, 32, 32)  # of an image of 128 by 128, behind the first pooling
    sizes = []
    for block in model.blocks:
        x = block(x)
        sizes.append((x.shape[1], x.shape[2]))
    assert sizes == [
        *[(256, 32)] * 2, (256, 16),
        *[(512, 16)] * 3, (512, 8),
        *[(1024, 8)] * 5, (1024, 4),
        *[(2048, 4)] * 3,
    ]  # fmt: skip


def test_images_are_enlarged_and_classified_at_any_width(example: ModuleType) -> None:
    images = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
    for image_size in (32, 64):
        model = example.ResNetV2(example.BLOCKS["resnet50v2"], width=0.125, image_size=image_size)
        assert model(images).shape == (2, 10)
