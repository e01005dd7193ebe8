"""Runs the tests that failed once more, one after the other with nothing beside them.

On a busy machine a test of processes may fail because it had to wait. One that passes alone is unsteady: it is named
here, has a fault that should be mended, and does not stop a change. More than a few failures are no chance.
"""

import json
import sys
from pathlib import Path

import pytest

MOST = 3


def main(cache: Path) -> int:
    """Return the exit status of the second try, or 1 without one.

    Args:
        cache: the file in which pytest keeps the tests that failed last.
    """
    failed = sorted(json.loads(cache.read_text())) if cache.exists() else []
    if not 0 < len(failed) <= MOST:
        print(f"==> {len(failed)} tests failed; only up to {MOST} are tried again", flush=True)
        return 1
    print("==> once more, alone:", *failed, sep="\n    ", flush=True)
    status = int(pytest.main(["-p", "no:xdist", *failed]))
    if status == 0:
        print("==> UNSTEADY: these failed beside others, and passed alone:", *failed, sep="\n    ", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(Path(".pytest_cache/v/cache/lastfailed")))
