"""Python loads this when it begins, with this folder on its path: a launcher then asks the shared fork servers."""

import os
import sys

if "SHARED_FORK_SERVERS" in os.environ and sys.argv[0] == "-m" and sys.orig_argv[-len(sys.argv)] == "unisono":
    from forks.starts import replace

    replace()
