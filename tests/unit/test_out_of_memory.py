"""Which ends of jobs mean that memory ran out."""

import os
import signal
from dataclasses import replace

import pytest

from unisono.host.machine import CgroupLimits, peak_mib, room_mib
from unisono.launch.failure import Failure
from unisono.launch.outcome import Outcome, WorkerExit
from unisono_lab.study.batch_search import ran_out_of_memory

pytestmark = pytest.mark.unit

DONE = WorkerExit(0, 0, 5.0)


def raised(kind: str, message: str) -> WorkerExit:
    return WorkerExit(1, 1, 2.0, Failure(1, "a", 101, kind, message, "Traceback …", consequence=False, time=1.9))


def words(*exits: WorkerExit, said: dict[int | str, list[str]] | None = None) -> str:
    return ran_out_of_memory(Outcome(exits, len(exits), "a", 1.0), said or {})


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 20.00 GiB."),
        ("RuntimeError", "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
        ("RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        ("MemoryError", ""),
        ("numpy._core._exceptions._ArrayMemoryError", "Unable to allocate 7.28 TiB for an array"),
        ("OSError", "[Errno 12] Cannot allocate memory"),
    ],
)
def test_exceptions_that_tell_of_memory_are_known(kind: str, message: str) -> None:
    assert kind in words(DONE, raised(kind, message))


@pytest.mark.parametrize(
    ("kind", "message"), [("ValueError", "boom"), ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied")]
)
def test_other_exceptions_are_the_scripts_own(kind: str, message: str) -> None:
    assert words(DONE, raised(kind, message)) == ""


def test_a_worker_that_the_kernel_ended_had_no_memory_left() -> None:
    assert "killed by SIGKILL" in words(DONE, WorkerExit(1, -9, 2.0))
    assert "killed by SIGBUS" in words(DONE, WorkerExit(1, -7, 2.0))
    assert words(DONE, WorkerExit(1, -11, 2.0)) == ""


def test_a_worker_that_the_launcher_ended_because_of_others_says_nothing_of_memory() -> None:
    assert words(WorkerExit(0, -9, 3.0, told_at=2.5), raised("ValueError", "boom")) == ""


def test_a_worker_above_its_limit_is_named_with_what_it_needed() -> None:
    over = WorkerExit(1, -9, 2.0, peak_mib=612.4, over_mib=500.0)
    assert words(DONE, over) == "rank 1 on host a was ended: it needed 612 MiB, more than its limit of 500"


def test_what_others_say_of_the_loss_hides_no_lack_of_memory() -> None:
    earlier = replace(raised("RuntimeError", "NCCL error: remote process exited"), rank=0, time=1.0)
    assert "OutOfMemoryError" in words(earlier, raised("torch.OutOfMemoryError", "CUDA out of memory."))


def test_native_code_that_gave_up_is_known_by_its_last_lines() -> None:
    gave_up = WorkerExit(1, -6, 2.0)
    assert "SIGABRT" in words(DONE, gave_up, said={1: ["terminate called", "  what():  std::bad_alloc"]})
    assert words(DONE, gave_up, said={1: ["assertion failed"]}) == ""


def test_a_job_that_ended_well_had_memory_whatever_its_workers_say() -> None:
    assert words(DONE, said={0: ["CUDA out of memory: trying again with less"]}) == ""


def test_room_is_what_a_container_has_left() -> None:
    assert room_mib(CgroupLimits(memory_bytes=8 << 20, free_bytes=3 << 20)) == 3.0
    assert room_mib(CgroupLimits()) > 3.0


def test_memory_is_the_largest_so_far_and_none_of_a_process_that_has_ended() -> None:
    before = peak_mib(os.getpid())
    held = bytearray(64 << 20)
    held[:: 1 << 12] = b"x" * len(held[:: 1 << 12])
    grown = peak_mib(os.getpid())
    del held
    assert grown >= before
    assert grown > 64
    assert peak_mib(os.getpid()) > grown - 1  # the kernel counts in batches
    assert peak_mib(2**22 + 1) == 0


def test_an_injected_kill_is_no_memory_that_ran_out() -> None:
    killed = WorkerExit(0, -signal.SIGKILL, 1.0)
    assert words(killed)
    assert words(replace(killed, fault="injected fault 7 (kill), at step 8")) == ""
