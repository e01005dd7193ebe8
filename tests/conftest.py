"""What holds for every test: it leaves nothing behind, and it says what kind of test it is."""

import gc
import os
import re
import signal
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

from hosts_table import ENGINES, EVENTS, Tried, table
from leaks import Guard
from scheduling import KINDS, Together, in_order
from spent import SHOWN, SPENT, dearest, processor_s
from torch_settings import TorchSettings

# Read when torch is loaded, here and in every child: a thread that waits for another one leaves it the processor. By
# default it keeps one busy, and where processes share processors a step of two threads costs six times as much.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# The same examples where a failure must be the change's fault; new ones where a person looks at them.
hypothesis.settings.register_profile(
    "unisono", deadline=None, print_blob=True, derandomize=os.environ.get("CI") == "true"
)
hypothesis.settings.load_profile("unisono")

IS_SLOW = re.compile(r"^pytestmark = (\[\n(    .*\n)*?    )?.*pytest\.mark\.slow", re.MULTILINE)
"""The line of a file whose tests are all slow."""

MORE_DRAWS = int(os.environ.get("UNISONO_BLOWS", "40")) / 40
"""How many times as much tests try as they do for a change."""

reported = pytest.StashKey[set[str]]()
begun = pytest.StashKey[float]()


def pytest_configure(config: pytest.Config) -> None:
    """Give the run its own folder for temporary files. Every child inherits it, so it is our mark as well."""
    config.stash[reported] = set()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a shell's background job; its children would ignore it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    patch = pytest.MonkeyPatch()
    config.add_cleanup(patch.undo)
    if "PYTEST_DEBUG_TEMPROOT" not in os.environ:  # tmp_path stays where it was, to be looked at after a failure
        patch.setenv("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = tempfile.TemporaryDirectory(prefix="unisono-", ignore_cleanup_errors=True)
    config.add_cleanup(folder.cleanup)
    patch.setenv("TMPDIR", folder.name)
    patch.setattr(tempfile, "tempdir", folder.name)
    patch.setenv("KERAS_BACKEND", "torch")
    patch.setenv("KERAS_HOME", folder.name)
    (Path(folder.name) / "keras.json").write_text("{}")  # or it writes its own
    gc.disable()  # until all is imported, of which little becomes garbage: a third of the time that it takes
    config.add_cleanup(gc.enable)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """What is there when the first test begins stays: no later collection of garbage looks at it again."""
    gc.freeze()
    gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files whose tests are all slow, where slow tests are: each process would load what they import."""
    is_left_out = "not slow" in config.option.markexpr and collection_path.match("test_*.py")
    return True if is_left_out and IS_SLOW.search(collection_path.read_text()) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a test that does not say what it is: `make check` would miss it, or be slowed down by it.

    The others are put in order.
    """
    wrong = [item.nodeid for item in items if len({*KINDS} & {mark.name for mark in item.iter_markers()}) != 1]
    if wrong:
        names = "\n  ".join(wrong)
        raise pytest.UsageError(
            f"each test has exactly one of the markers unit, cluster and procs; these do not:\n  {names}"
        )
    items[:] = in_order(items, lambda item: item.path.name, _kind)
    for item in items:
        if MORE_DRAWS > 1:  # more is tried in one test, beside others
            mark = item.get_closest_marker("timeout")
            limit_s = mark.args[0] if mark else float(item.config.getini("timeout"))
            item.add_marker(pytest.mark.timeout(MORE_DRAWS * limit_s), append=False)
        for mark in item.iter_markers("hosts"):
            engine, *events = mark.args
            assert engine in ENGINES, item.nodeid
            assert set(events) <= EVENTS.keys(), item.nodeid
            item.user_properties.append(("hosts", mark.args))


def _kind(item: pytest.Item) -> str:
    return next(mark.name for mark in item.iter_markers() if mark.name in KINDS)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """What a test takes begins with its fixtures."""
    item.stash[begun] = processor_s()
    yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """And ends with them."""
    report = yield
    if call.when == "teardown":
        report.user_properties.append((SPENT, processor_s() - item.stash[begun]))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What was dear; and the table of ``make hosts``."""
    reports = [
        (kind, report)
        for kind in ("", "passed", "failed", "error", "skipped")  # those of what comes behind a test have none
        for report in terminalreporter.getreports(kind)
        if isinstance(report, pytest.TestReport)  # a file that is skipped as a whole has another one
    ]
    if config.option.markexpr == "hosts":
        tried = [
            Tried.of(mark, kind, report.duration)
            for kind, report in reports
            for name, mark in report.user_properties
            if name == "hosts" and kind and (kind != "passed" or report.when == "call")
        ]
        terminalreporter.section("what happened to jobs on several hosts")
        for line in table(tried):
            terminalreporter.line(line)
    spent = {
        report.nodeid: seconds
        for _, report in reports
        for name, seconds in report.user_properties
        if name == SPENT and isinstance(seconds, float)
    }
    if len({test.partition("::")[0] for test in spent}) > SHOWN:
        terminalreporter.section("what the tests spent most on")
        for line in dearest(spent):
            terminalreporter.line(line)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object | None:
    """For ``--dist loadgroup``: xdist's own has a test's group in its name, and pytest 9.2 does not."""
    if config.getvalue("dist") != "loadgroup":
        return None
    config.option.loadscopereorder = False  # files that stay whole are collected first
    return Together(config, log)


def _guard() -> Guard:
    return Guard.now(mark=("TMPDIR", tempfile.gettempdir()))


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process, thread, socket, file or setting behind; name what and which test."""
    guard = _guard()
    yield
    leaks = guard.leaks(request.node.nodeid)
    request.config.stash[reported].update(leaks.lines)
    if leaks.lines:
        pytest.fail(str(leaks), pytrace=False)


@pytest.fixture(autouse=True, scope="session")
def nothing_outlives_the_run(request: pytest.FixtureRequest) -> Iterator[None]:
    """The same for fixtures that serve several tests: what they started is gone in the end."""
    guard = _guard()
    yield
    leaks = guard.leaks("a fixture that serves several tests")
    if new := [line for line in leaks.lines if line not in request.config.stash[reported]]:
        pytest.fail("\n  ".join((f"{leaks.culprit} left behind:", *new)), pytrace=False)


@pytest.fixture
def torch_settings_restored() -> Iterator[None]:
    """For a test that calls `unisono.init` in this process: torch's global settings are put back after it."""
    settings = TorchSettings()
    before = settings.look()
    yield
    settings.restore(before)
