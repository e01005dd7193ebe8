"""Runs a command that the kernel ends with the process that has started it: ``PARENT COMMAND…``."""

import os
import sys

from unisono.host.process import end_with_parent

if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606  no shell is wanted
