"""The watches see what they are for. Each test cleans up by itself, or it would be its own culprit."""

import mmap
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import leaks
from torch_settings import TORCH_SWITCHES, TorchSettings

pytestmark = pytest.mark.unit


@dataclass
class Scripted:
    """A watch that sees what it is told, the last entry for ever."""

    sights: Sequence[leaks.Seen]
    noun: str = "thing"
    looks: Iterator[leaks.Seen] = field(init=False)

    def __post_init__(self) -> None:
        self.looks = iter(self.sights)

    def look(self) -> leaks.Seen:
        return next(self.looks, self.sights[-1])

    def ours(self, leftover: leaks.Seen) -> leaks.Seen:
        return leftover


def seen_during(watch: leaks.Watch, before: leaks.Seen) -> list[str]:
    return list(watch.ours(leaks.appeared(before, watch.look())).values())


def test_what_goes_away_by_itself_is_waited_for() -> None:
    watch = Scripted([{1: "ending"}, {1: "ending"}, {}])

    assert leaks.left_after(watch, before={}, patience_s=60) == {}


def test_what_stays_is_a_leak_once_patience_is_over() -> None:
    watch = Scripted([{0: "old", 1: "staying"}])

    assert leaks.left_after(watch, before={0: "old"}, patience_s=0.05) == {1: "staying"}


def test_what_only_a_reference_cycle_keeps_is_no_leak() -> None:
    before = leaks.Sockets().look()
    first, second = socket.socketpair()
    descriptors = (first.detach(), second.detach())  # closed by an object that only itself refers to

    class Owner:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            for descriptor in descriptors:
                os.close(descriptor)

    assert len(seen_during(leaks.Sockets(), before)) == 2
    Owner()

    assert leaks.left_after(leaks.Sockets(), before, patience_s=0.5) == {}


def test_a_socket_on_a_reused_descriptor_is_still_seen() -> None:
    watch = leaks.Sockets()
    with socket.socket() as old:
        descriptor, before = old.fileno(), watch.look()
    with socket.socket() as new:
        assert new.fileno() == descriptor
        assert len(seen_during(watch, before)) == 1


def test_a_segment_that_a_stranger_has_mapped_is_not_ours(tmp_path: Path) -> None:
    strangers, orphaned = tmp_path / "psm_strangers", tmp_path / "psm_orphaned"
    strangers.touch()
    orphaned.touch()
    watch = leaks.SharedMemory(tmp_path, maps=lambda _: f"7f00-7f01 rw-s 0 00:19 9   {strangers}\n")

    assert seen_during(watch, {}) == [str(orphaned)]


def test_a_mapped_file_is_found_in_the_maps_of_its_process(tmp_path: Path) -> None:
    segment = tmp_path / "psm_mapped"
    segment.write_bytes(b"x" * mmap.PAGESIZE)
    with segment.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        assert str(segment) in leaks.mapped_by([os.getpid()])
    assert str(segment) not in leaks.mapped_by([os.getpid()])


def test_torch_is_not_loaded_to_look_at_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    settings = TorchSettings()

    assert settings.look()["default dtype"] == "torch.float32"
    settings.restore(settings.look())
    assert "torch" not in sys.modules


def test_a_test_that_is_the_first_to_load_torch_is_compared_with_a_new_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = TorchSettings()
    with monkeypatch.context() as without:
        without.delitem(sys.modules, "torch", raising=False)
        before = settings.look()

    assert leaks.changed(before, settings.look()) == []


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("number of threads", 3),
        ("deterministic algorithms", "warn"),
        ("deterministic algorithms", "on"),
        ("fill of uninitialized memory", False),
        ("default dtype", "torch.float64"),
        ("precision of float32 products", "high"),
        ("cudnn.deterministic", True),
        ("cudnn.benchmark", True),
        ("gradients", False),
    ],
)
def test_each_setting_of_torch_is_seen_and_put_back(name: str, other: Any) -> None:
    settings = TorchSettings()
    before = settings.look()
    TORCH_SWITCHES[name].write(torch, other)

    differences = leaks.changed(before, settings.look())
    settings.restore(before)

    assert differences == [f"{name}: was {before[name]!r}, now {other!r}"]
    assert leaks.changed(before, settings.look()) == []
