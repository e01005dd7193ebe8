"""The fixtures of the suite's conftest.py, seen from outside: runs of pytest whose tests leak on purpose."""

import shlex
import textwrap
from pathlib import Path

import pytest

import leaks

pytestmark = [pytest.mark.procs, pytest.mark.slow]  # what the tests themselves are made of
pytest_plugins = ["pytester"]

TESTS = Path(leaks.__file__).parent

LEAKY_TESTS = """
    import os, pathlib, signal, socket, subprocess, sys, tempfile, threading
    import pytest

    pytestmark = pytest.mark.unit
    kept = []

    def test_leaks_a_child():
        kept.append(subprocess.Popen(["sleep", "601"], start_new_session=True))

    def test_leaks_an_orphan():
        subprocess.run(["sh", "-c", "sleep 602 >/dev/null 2>&1 &"], check=True, start_new_session=True)

    def test_leaks_a_zombie():
        kept.append(subprocess.Popen(["true"]))

    def test_leaks_a_thread():
        threading.Thread(target=threading.Event().wait, name="lost-thread", daemon=True).start()

    def test_leaks_a_socket():
        kept.append(socket.create_server(("127.0.0.1", 0)))

    def test_leaks_a_segment():
        from multiprocessing import resource_tracker, shared_memory
        kept.append(shared_memory.SharedMemory(create=True, size=1))
        pathlib.Path("segment").write_text(kept[-1].name)

    def test_leaks_a_file():
        kept.append(tempfile.mkstemp(suffix="-lost-file"))

    def test_leaks_a_variable():
        os.environ["LOST_VARIABLE"] = "1"

    def test_leaks_the_folder():
        os.chdir("..")

    def test_leaks_a_handler():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def test_leaks_torch_settings():
        import torch
        torch.use_deterministic_algorithms(True)
        torch.set_default_dtype(torch.float64)

    def test_leaks_nothing_after_all_that():
        import torch
        assert "LOST_VARIABLE" not in os.environ
        assert torch.get_default_dtype() is torch.float32
        assert pathlib.Path("segment").exists()

    @pytest.fixture(scope="module")
    def shared():
        kept.append(subprocess.Popen(["sleep", "603"]))

    def test_uses_what_a_wider_fixture_leaks(shared):
        pass
"""

BLAMED = {
    "test_leaks_a_child": r"process \d+ \(sleep 601\), in a session of its own",
    "test_leaks_an_orphan": r"process \d+ \(sleep 602\)",
    "test_leaks_a_zombie": r"process \d+ \(ended, but nobody waited for it\)",
    "test_leaks_a_thread": r"thread 'lost-thread' \(daemon\)",
    "test_leaks_a_socket": r"socket 127\.0\.0\.1:\d+ LISTEN, descriptor \d+",
    "test_leaks_a_segment": r"shared memory /dev/shm/psm_\w+",
    "test_leaks_a_file": r"temporary file /\S+-lost-file",
    "test_leaks_a_variable": r"environment variable LOST_VARIABLE: was not set, now '1'",
    "test_leaks_the_folder": r"working folder path: was '/\S+', now '/\S+'",
    "test_leaks_a_handler": r"signal handler SIGTERM: was <Handlers\.SIG_DFL: 0>, now <Handlers\.SIG_IGN: 1>",
    "test_leaks_torch_settings": r"torch setting default dtype: was 'torch\.float32', now 'torch\.float64'",
}


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    """A folder whose tests run under the conftest.py of this suite."""
    pytester.makeini(f"[pytest]\npythonpath = {shlex.quote(str(TESTS))}\nmarkers =\n  unit: \n  procs: \n")
    hurry = "\nimport leaks\nleaks.PATIENCE_S = 0.3\n"  # these leaks stay for good
    pytester.makeconftest(TESTS.joinpath("conftest.py").read_text() + hurry)
    return pytester


def run(suite: pytest.Pytester, *options: str) -> pytest.RunResult:
    return suite.runpytest_subprocess("-p", "no:cacheprovider", *options, timeout=100)


def test_each_kind_of_leak_is_blamed_on_the_test_that_left_it(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_leaky=textwrap.dedent(LEAKY_TESTS))

    result = run(suite)

    for test, leak in BLAMED.items():
        result.stdout.re_match_lines([rf".*ERROR at teardown of {test} .*"])
        result.stdout.re_match_lines([rf"test_leaky\.py::{test} left behind:", rf"  {leak}.*"], consecutive=True)
    result.stdout.no_re_match_line(r".*ERROR at teardown of test_leaks_nothing.*")
    result.stdout.re_match_lines(
        [r"a fixture that serves several tests left behind:", r"  process \d+ \(sleep 603\)"],
        consecutive=True,
    )
    result.assert_outcomes(passed=13, errors=len(BLAMED) + 1)


def test_leaked_processes_are_ended_so_that_the_next_test_is_alone(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        test_leaky="""
        import subprocess
        import psutil
        import pytest

        pytestmark = pytest.mark.unit

        def test_leaks():
            subprocess.run(["sh", "-c", "sleep 604 >/dev/null 2>&1 &"], check=True)

        def test_is_alone():
            assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "604"]]
        """
    )

    run(suite).assert_outcomes(passed=2, errors=1)


def test_a_failing_test_is_still_told_what_it_left(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        test_leaky="""
        import os
        import pytest

        @pytest.mark.unit
        def test_fails():
            os.environ["LOST_VARIABLE"] = "1"
            assert False, "the reason"
        """
    )

    result = run(suite)

    result.assert_outcomes(failed=1, errors=1)
    result.stdout.fnmatch_lines_random(["*the reason*", "*environment variable LOST_VARIABLE*"])


def test_a_test_of_no_kind_or_of_two_kinds_is_refused(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        test_kinds="""
        import pytest

        def test_of_no_kind():
            pass

        @pytest.mark.unit
        def test_of_one_kind():
            pass

        @pytest.mark.unit
        @pytest.mark.procs
        def test_of_two_kinds():
            pass
        """
    )

    result = run(suite)

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    refused = ["test_kinds.py::test_of_no_kind", "test_kinds.py::test_of_two_kinds"]
    result.stderr.fnmatch_lines(["*exactly one of the markers*", *(f"*{name}" for name in refused)], consecutive=True)


def test_the_suites_folder_for_temporary_files_is_removed_in_the_end(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        test_folder="""
        import pathlib, tempfile
        import pytest

        @pytest.mark.unit
        def test_says_where_temporary_files_go():
            pathlib.Path("where").write_text(tempfile.gettempdir())
        """
    )

    run(suite).assert_outcomes(passed=1)

    assert not Path((suite.path / "where").read_text()).exists()
