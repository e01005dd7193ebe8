"""`make mutants`: each mistake on the list is made in a copy of the repository, and a test has to find it.

Two run at a time, each in a process that is forked from this one. The exit code is 1 if one is not found, or is no
longer possible as it stands on the list.
"""

import argparse
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import pytest
import torch  # noqa: F401 - so that not each process has to load it
from rich.console import Console
from rich.table import Table

from mutants.everything import MUTANTS
from mutants.mutant import Mutant

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 600.0
"""What takes longer hangs, and is found by that."""

FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py\S*)", re.MULTILINE)


@dataclass(frozen=True)
class Verdict:
    """What has become of a mutant.

    Attributes:
        found_by: the test that fails with it; empty if none does.
        seconds: that it took.
        words: more about it, for people.
    """

    found_by: str
    seconds: float
    words: str = ""


def main() -> int:
    """Make all mistakes, or those whose words contain the argument."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("words", nargs="?", default="", help="only mistakes that are described by these words")
    parser.add_argument("--at-once", type=int, default=2, metavar="N", help="how many run at a time (default: 2)")
    wanted = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if wanted.words in mutant.breaks]
    console = Console(width=160 if not sys.stdout.isatty() else None)
    if words := _fault_of_the_tests(chosen):
        console.print(f"the tests fail without any mistake: {words}", style="red", markup=False)
        return 1
    with ThreadPoolExecutor(wanted.at_once) as pool:
        verdicts = list(pool.map(lambda mutant: _told(console, mutant, try_out(mutant)), chosen))
    console.print(_table(chosen, verdicts))
    missed = sum(not verdict.found_by for verdict in verdicts)
    console.print(f"{len(chosen)} mistakes, {missed} not found")
    return int(missed > 0)


def try_out(mutant: Mutant | None, tests: tuple[str, ...] = ()) -> Verdict:
    """Run the tests with a mistake, or without any, in a copy of the repository."""
    begun = perf_counter()
    if mutant is not None and (times := mutant.found(ROOT)) != 1:
        return Verdict("", 0.0, f"its text is in {mutant.file} {times} times")
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder)
        for name in ("src", "tests", "benchmarks", "examples"):
            shutil.copytree(ROOT / name, copy / name)
        shutil.copy2(ROOT / "pyproject.toml", copy)
        if mutant is not None:
            mutant.apply(copy)
            tests = mutant.tests
        found_by, words = _run(copy, tests)
    return Verdict(found_by, perf_counter() - begun, words)


def _run(copy: Path, tests: tuple[str, ...]) -> tuple[str, str]:
    output = copy / "output"
    process = multiprocessing.get_context("fork").Process(target=_test, args=(copy, tests, output))
    process.start()
    process.join(LIMIT_S)
    if process.is_alive():
        process.kill()
        process.join()
        return "the time limit", ""
    if process.exitcode == 0:
        return "", ""
    words = output.read_text(errors="replace")
    failed = FAILED.search(words)
    if failed is not None:
        return failed[1].removeprefix("tests/unit/"), words
    # The time limit of a test ends the whole run, and says which test it was.
    return ("the time limit of a test" if "Timeout" in words else ""), words[-2000:]


def _test(copy: Path, tests: tuple[str, ...], output: Path) -> None:
    """In a process of its own, which has torch loaded already: run tests on a copy."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(copy)
    os.environ.update({"PYTHONPATH": str(copy / "src"), "CI": "true"})
    os.environ.setdefault("UNISONO_BLOWS", "100")  # more than for every change
    sys.path[:0] = [str(copy / "src"), str(copy / "tests"), str(copy)]
    code = pytest.main(["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:xdist", *tests])
    os._exit(int(code))


def _fault_of_the_tests(mutants: list[Mutant]) -> str:
    tests = dict.fromkeys(test for mutant in mutants for test in mutant.tests)
    return try_out(None, tuple(tests)).found_by


def _told(console: Console, mutant: Mutant, verdict: Verdict) -> Verdict:
    how = f"found in {verdict.seconds:.0f} s" if verdict.found_by else "NOT FOUND"
    console.print(f"{how}: {mutant.breaks}", markup=False, highlight=False)
    return verdict


def _table(mutants: list[Mutant], verdicts: list[Verdict]) -> Table:
    table = Table("mistake", "file", "found by", "seconds", show_lines=False)
    for mutant, verdict in zip(mutants, verdicts, strict=True):
        found = verdict.found_by or f"NOT FOUND {verdict.words}"
        table.add_row(mutant.breaks, mutant.file, found, f"{verdict.seconds:.0f}")
    return table


if __name__ == "__main__":
    raise SystemExit(main())
