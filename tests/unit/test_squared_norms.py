import pytest
import torch
from torch import Tensor

from unisono.adapt.squared_norms import BLOCK, PIECE, SMALL, SquaredNorms, squares_of

pytestmark = pytest.mark.unit


def gradient(seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = [(3,), (BLOCK,), (70, 130), (257, 401), (0, 4)]
    return [torch.randn(shape, generator=draw) for shape in shapes]


def norm_of(tensors: list[Tensor], one_in: int = 1, offset: int = 0) -> float:
    norms = SquaredNorms(len(tensors), one_in)
    norms.offset = offset
    for number, tensor in enumerate(tensors):
        norms.take(number, tensor)
    return norms.total()


def exact(tensors: list[Tensor]) -> float:
    return float(sum(tensor.double().square().sum() for tensor in tensors))


def test_it_is_the_sum_of_all_squares() -> None:
    assert norm_of(gradient()) == pytest.approx(exact(gradient()), rel=1e-6)


def test_neither_the_order_of_tensors_nor_their_place_in_memory_decides_a_bit() -> None:
    tensors = gradient()
    expected = norm_of(tensors)
    norms = SquaredNorms(len(tensors))
    for number in (3, 0, 4, 2, 1):
        memory = torch.empty(tensors[number].numel() + 5)[5:]
        norms.take(number, memory.copy_(tensors[number].reshape(-1)).view(tensors[number].shape))
    assert norms.total() == expected


def test_what_is_absent_counts_nothing_and_nothing_is_kept_for_the_next_gradient() -> None:
    norms = SquaredNorms(2)
    norms.take(0, torch.full((3,), 2.0))
    norms.take(1, None)
    assert norms.total() == pytest.approx(12.0)
    norms.begin()
    assert norms.total() == 0.0


def test_blocks_that_are_read_stand_for_the_others_and_all_come_by() -> None:
    tensors = gradient()
    found = [norm_of(tensors, one_in=4, offset=offset) for offset in range(8)]
    assert len(set(found[:4])) == 4
    assert found[:4] == found[4:]
    assert sum(found[:4]) / 4 == pytest.approx(exact(tensors), rel=0.01)


def test_small_tensors_are_always_read() -> None:
    tensors = [*gradient()[:2], torch.randn(SMALL, generator=torch.Generator().manual_seed(1))]
    assert norm_of(tensors, one_in=8, offset=5) == pytest.approx(exact(tensors), rel=1e-6)


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_pieces_shared_out_among_workers_have_the_bits_of_one_worker(workers: int) -> None:
    draw = torch.Generator().manual_seed(0)
    tensors = [torch.randn(numel, generator=draw) for numel in (3 * PIECE + 64, 0, 192, PIECE)]
    alone = squares_of([*tensors, None], 0, 1)
    rows = torch.stack([squares_of([*tensors, None], rank, workers) for rank in range(workers)])
    assert alone.shape == (6,)
    assert torch.equal(rows.sum(0), alone)
    assert [int((row != 0).sum()) for row in rows] == [len(range(rank, 6, workers)) for rank in range(workers)]
    assert float(alone.sum()) == pytest.approx(exact(tensors), rel=1e-6)
