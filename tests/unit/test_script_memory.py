"""What scripts see of shared memory stays where it is, and is looked at when it may have been written to."""

import pytest
import torch

from unisono.reduce.buckets import plan_buckets
from unisono.reduce.segment import Segment, created, sees_writes
from unisono.train.step.script_memory import LOOKS_EVERY, ScriptMemory, ShownState

pytestmark = [pytest.mark.unit, pytest.mark.skipif(not sees_writes(), reason="this system tells of no writes")]

SHAPES = [(300,), (5,), (40, 10), (), (0, 3), (9000,)]
BUCKETS = plan_buckets([torch.zeros(shape) for shape in SHAPES], 2048)
MOMENTUM = ("momentum_buffer", torch.float32)


def shown_with(segment_of: float) -> tuple[ShownState, Segment]:
    shown = ShownState(BUCKETS, [MOMENTUM])
    segment = Segment(created(shown.view.size), shown.view.size)
    segment.bytes.view(torch.float32).fill_(segment_of)
    shown.show(segment)
    return shown, segment


def body_without_faults(shown: ShownState) -> bool:
    """Whether the script was taken to have written nothing, when there was no page fault for once."""
    for _ in range(200):
        shown.body_begins()
        shown.body_ends()
        if not shown.is_found_written():
            return True
    return False


def test_tensors_have_their_shapes_and_storages_of_their_own() -> None:
    shown, _ = shown_with(1.0)
    for tensors in shown.tensors.values():
        assert [tuple(each.shape) for each in tensors] == SHAPES
        starts = {each.untyped_storage().data_ptr() for each in tensors if each.numel()}
        assert len(starts) == sum(bool(each.numel()) for each in tensors)


def test_a_reference_sees_what_is_shared_then_what_is_held_then_what_is_shared_again() -> None:
    shown, first = shown_with(1.0)
    weight = shown.tensors[None][0]
    first.bytes.view(torch.float32).fill_(2.0)
    assert weight.tolist() == [2.0] * 300
    shown.keep([tuple(torch.full_like(flat, 3.0) for flat in row) for row in shown.rows])
    first.bytes.view(torch.float32).fill_(4.0)
    assert weight.tolist() == [3.0] * 300
    second = Segment(created(shown.view.size), shown.view.size)
    shown.show(second)
    assert weight.tolist() == [0.0] * 300


def test_a_write_is_seen_by_the_writer_alone_and_is_found() -> None:
    shown, segment = shown_with(1.0)
    assert not shown.is_written()
    assert body_without_faults(shown)
    shown.body_begins()
    shown.tensors[None][5].data.mul_(5)
    shown.body_ends()
    assert shown.is_found_written()
    assert shown.is_written()
    assert segment.bytes.view(torch.float32).max() == 1.0


def test_a_write_outside_of_bodies_is_found_some_calls_later() -> None:
    shown, _ = shown_with(1.0)
    shown.body_begins()
    shown.body_ends()
    shown.tensors[None][5].data.mul_(5)
    found = []
    for _ in range(LOOKS_EVERY):
        shown.body_begins()
        shown.body_ends()
        found.append(shown.is_found_written())
    assert any(found)


def test_what_is_held_still_counts_as_written_until_something_else_is_shown() -> None:
    shown, segment = shown_with(1.0)
    shown.hold_still()
    segment.bytes.view(torch.float32).fill_(2.0)
    shown.body_begins()
    shown.body_ends()
    assert shown.is_found_written()
    assert shown.is_written()
    assert shown.tensors[None][0].tolist() == [1.0] * 300
    shown.show(segment)
    assert not shown.is_written()
    assert body_without_faults(shown)


def test_the_memory_of_a_layout_is_used_again_and_that_of_another_is_other_memory() -> None:
    memory = ScriptMemory()
    first = memory.laid_out(BUCKETS, [MOMENTUM])
    assert memory.laid_out(BUCKETS, [MOMENTUM]) is first
    assert memory.laid_out(BUCKETS, []) is not first
