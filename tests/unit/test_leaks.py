"""The watches see what they are for. Each test cleans up by itself, or it would be its own culprit."""

import mmap
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
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


def test_only_what_was_not_there_before_has_appeared() -> None:
    assert leaks.appeared({1: "old", 2: "gone"}, {1: "old", 3: "new"}) == {3: "new"}


def test_a_change_is_told_with_both_values_and_an_unset_variable_is_no_empty_one() -> None:
    before = {"kept": "1", "changed": "a", "removed": ""}
    after = {"kept": "1", "changed": "b", "added": "x"}

    assert leaks.changed(before, after) == [
        "added: was not set, now 'x'",
        "changed: was 'a', now 'b'",
        "removed: was '', now not set",
    ]


def test_a_long_value_is_cut_in_the_message() -> None:
    (line,) = leaks.changed({}, {"PATH": "x" * 500})

    assert len(line) < 250
    assert line.endswith("...")


def test_what_goes_away_by_itself_is_waited_for() -> None:
    watch = Scripted([{1: "ending"}, {1: "ending"}, {}])

    assert leaks.left_after(watch, before={}, patience_s=60) == {}


def test_what_stays_is_a_leak_once_patience_is_over() -> None:
    watch = Scripted([{0: "old", 1: "staying"}])

    assert leaks.left_after(watch, before={0: "old"}, patience_s=0.05) == {1: "staying"}


def test_nothing_left_means_no_second_look() -> None:
    watch = Scripted([{}, {1: "somebody else's"}])

    assert leaks.left_after(watch, before={}, patience_s=60) == {}


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


@pytest.mark.parametrize("daemon", [True, False])
def test_a_running_thread_is_seen_by_its_name(daemon: bool) -> None:
    watch, release = leaks.Threads(), threading.Event()
    before = watch.look()
    thread = threading.Thread(target=release.wait, name="left-behind", daemon=daemon)
    thread.start()

    found = seen_during(watch, before)
    release.set()
    thread.join()

    assert found == ["'left-behind' (daemon)" if daemon else "'left-behind'"]
    assert seen_during(watch, before) == []


def test_the_timer_of_the_timeout_plugin_is_no_leak() -> None:
    watch, release = leaks.Threads(), threading.Event()
    before = watch.look()
    thread = threading.Thread(target=release.wait, name="pytest_timeout tests/x.py::test_y")
    thread.start()

    found = seen_during(watch, before)
    release.set()
    thread.join()

    assert found == []


def test_an_open_socket_is_seen_with_its_address() -> None:
    watch = leaks.Sockets()
    before = watch.look()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (found,) = seen_during(watch, before)

    assert f"127.0.0.1:{port} LISTEN" in found
    assert seen_during(watch, before) == []


def test_a_socket_on_a_reused_descriptor_is_still_seen() -> None:
    watch = leaks.Sockets()
    with socket.socket() as old:
        descriptor, before = old.fileno(), watch.look()
    with socket.socket() as new:
        assert new.fileno() == descriptor
        assert len(seen_during(watch, before)) == 1


@pytest.mark.parametrize(
    ("here", "there", "status", "words"),
    [
        (("127.0.0.1", 80), ("127.0.0.1", 9), "ESTABLISHED", "127.0.0.1:80 -> 127.0.0.1:9 ESTABLISHED"),
        (("::1", 80), (), "LISTEN", "::1:80 LISTEN"),
        ("agent.sock", "", "NONE", "agent.sock"),
        ("", "", "NONE", "not bound"),
    ],
)
def test_a_connection_is_told_in_words(here: Any, there: Any, status: str, words: str) -> None:
    assert leaks.describe_connection(SimpleNamespace(laddr=here, raddr=there, status=status)) == words


def test_a_segment_of_ours_is_seen_and_other_names_are_not(tmp_path: Path) -> None:
    watch = leaks.SharedMemory(folder=tmp_path)
    before = watch.look()
    for name in ("unisono-1-grad", "torch_12_34_0", "psm_ab12", "somebody-elses"):
        (tmp_path / name).touch()

    assert sorted(Path(path).name for path in seen_during(watch, before)) == [
        "psm_ab12",
        "torch_12_34_0",
        "unisono-1-grad",
    ]


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


def test_a_machine_without_shared_memory_has_no_leaks_there(tmp_path: Path) -> None:
    assert leaks.SharedMemory(folder=tmp_path / "missing").look() == {}


def test_a_forgotten_temporary_file_is_seen_and_pytests_own_folder_is_not() -> None:
    watch = leaks.TemporaryFiles()
    before = watch.look()
    folder = Path(tempfile.gettempdir())
    forgotten, kept = folder / "forgotten", folder / "pytest-of-me"
    forgotten.touch()
    kept.mkdir()

    found = seen_during(watch, before)
    forgotten.unlink()
    kept.rmdir()

    assert found == [str(forgotten)]


def test_the_run_has_a_folder_for_temporary_files_of_its_own() -> None:
    assert Path(tempfile.gettempdir()).name.startswith("unisono-")
    assert os.environ["TMPDIR"] == tempfile.gettempdir()


def test_the_environment_is_put_back_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_KEPT", "1")
    monkeypatch.setenv("UNISONO_REMOVED", "2")
    environment = leaks.Environment()
    before = environment.look()
    os.environ["UNISONO_KEPT"] = "changed"
    os.environ["UNISONO_ADDED"] = "3"
    del os.environ["UNISONO_REMOVED"]

    differences = leaks.changed(before, environment.look())
    environment.restore(before)

    assert differences == [
        "UNISONO_ADDED: was not set, now '3'",
        "UNISONO_KEPT: was '1', now 'changed'",
        "UNISONO_REMOVED: was '2', now not set",
    ]
    assert leaks.changed(before, environment.look()) == []


def test_variables_that_pytest_itself_sets_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = leaks.Environment().look()
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "another phase")

    assert leaks.changed(before, leaks.Environment().look()) == []


def test_the_working_folder_is_put_back_even_when_the_new_one_is_gone(tmp_path: Path) -> None:
    folder = leaks.WorkingFolder()
    before = folder.look()
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()

    (difference,) = leaks.changed(before, folder.look())
    folder.restore(before)

    assert difference.endswith("now 'a folder that is gone'")
    assert leaks.changed(before, folder.look()) == []


def test_a_signal_handler_is_put_back() -> None:
    handlers = leaks.SignalHandlers()
    before = handlers.look()
    signal.signal(signal.SIGTERM, lambda *_: None)

    (difference,) = leaks.changed(before, handlers.look())
    handlers.restore(before)

    assert difference.startswith("SIGTERM: was ")
    assert leaks.changed(before, handlers.look()) == []


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


def test_a_report_names_the_culprit_first_and_then_each_leak() -> None:
    report = leaks.Leaks("tests/x.py::test_y", ("thread 'a'", "socket 127.0.0.1:1"))

    assert str(report) == "tests/x.py::test_y left behind:\n  thread 'a'\n  socket 127.0.0.1:1"


def test_a_test_that_leaves_nothing_has_an_empty_report() -> None:
    assert leaks.Guard.now().leaks("tests/x.py::test_y").lines == ()
