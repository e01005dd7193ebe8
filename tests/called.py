"""`unisono` commands that tests call in their own process."""

import sys

import pytest

from unisono.cli import app as cli


def unisono(*words: object) -> int:
    """The exit code of ``unisono WORDS``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["unisono", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    return int(ended.value.code or 0)
