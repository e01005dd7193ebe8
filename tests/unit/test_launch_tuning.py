"""Which variables of the memory allocator workers get, and which are left as the person set them."""

import pytest

from unisono.launch.tuning import assignments, tune

pytestmark = pytest.mark.unit

MMAP, TRIM, ARENAS, TUNABLES = "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES"
ALL = {MMAP, TRIM, ARENAS, TUNABLES}


def test_workers_keep_their_memory_share_one_heap_and_use_huge_pages() -> None:
    tuning = tune({"HOME": "/h"}, "glibc")
    assert tuning.variables[MMAP] == "0"
    assert int(tuning.variables[TRIM]) >= 2**33
    assert tuning.variables[ARENAS] == "1"
    assert tuning.variables[TUNABLES] == "glibc.malloc.hugetlb=1"
    assert (set(tuning.variables), tuning.kept, tuning.missing) == (ALL, {}, None)


def test_workers_of_several_devices_give_their_memory_back() -> None:
    tuning = tune({"HOME": "/h"}, "glibc", devices=2)
    assert set(tuning.variables) == ALL - {MMAP} | {"MALLOC_MMAP_THRESHOLD_"}
    assert int(tuning.variables["MALLOC_MMAP_THRESHOLD_"]) < int(tuning.variables[TRIM]) < 2**30
    assert set(tune({MMAP: "0"}, "glibc", devices=2).variables) == {ARENAS, TUNABLES}


@pytest.mark.parametrize(
    ("environ", "still_set"),
    [
        ({ARENAS: "4"}, ALL - {ARENAS}),
        ({TRIM: "1000"}, ALL - {TRIM, MMAP}),
        ({"MALLOC_MMAP_THRESHOLD_": "1000"}, ALL - {TRIM, MMAP}),
        ({TUNABLES: "glibc.cpu.x86_shstk=off"}, ALL - {TUNABLES}),
        ({TUNABLES: "glibc.malloc.mmap_threshold=99"}, ALL - {TUNABLES, TRIM, MMAP}),
        ({TUNABLES: "glibc.malloc.trim_threshold=99:glibc.malloc.arena_max=2"}, set()),
    ],
)
def test_what_a_person_has_decided_is_kept_and_nothing_that_goes_against_it_is_set(
    environ: dict[str, str], still_set: set[str]
) -> None:
    tuning = tune({"HOME": "/h", **environ}, "glibc")
    assert set(tuning.variables) == still_set
    assert tuning.kept == environ
    assert tuning.lines[-1] == f"kept as you set it: {assignments(environ)}"


@pytest.mark.parametrize(
    ("environ", "c_library", "wanted", "reason"),
    [
        ({}, "glibc", False, "switched off"),
        ({}, "", True, "this is another"),
        ({"LD_PRELOAD": "/lib/libssl.so /opt/libjemalloc.so.2"}, "glibc", True, "its own, /opt/libjemalloc.so.2"),
        ({"LD_PRELOAD": "/lib/libssl.so:libtcmalloc_minimal.so"}, "glibc", True, "its own, libtcmalloc_minimal.so"),
        ({MMAP: "0", ARENAS: "1", TUNABLES: ""}, "glibc", True, "all of it is set already"),
    ],
)
def test_where_nothing_is_set_the_reason_is_said(
    environ: dict[str, str], c_library: str, wanted: bool, reason: str
) -> None:
    tuning = tune(environ, c_library, wanted=wanted)
    assert tuning.variables == {}
    assert tuning.lines[0].startswith("no tuning: ")
    assert tuning.lines[0].endswith(reason)
