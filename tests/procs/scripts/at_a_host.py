"""Starts `unisono` commands on the host that it runs on, and says how they end: ``at_a_host.py VARYING…``.

Each line of its input is a question in JSON, each line of its output the answer. Commands are forked from a process
that has loaded them, and workers from one that has loaded torch.
"""

import json
import os
import socket
import sys
from pathlib import Path

from forks.client import SHARED_FORK_SERVERS
from forks.commands import start, warm_jobs


def main() -> None:
    """Answer, until nobody asks any more."""
    started = {}
    with warm_jobs(varying=sys.argv[1:]):
        _await_torch()
        _say({})
        for line in sys.stdin:
            asked = json.loads(line)
            if "words" in asked:
                with Path(asked["out"]).open("ab") as out, Path(asked["err"]).open("ab") as err:
                    environment = {**os.environ, **asked["settings"]}
                    command = start(*asked["words"], cwd=asked["folder"], env=environment, stdout=out, stderr=err)
                started[command.pid] = command
                _say({"pid": command.pid})
            else:
                _say({"code": started[asked["pid"]].poll()})


def _await_torch() -> None:
    """Until workers can be forked."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as nothing:
        nothing.connect(os.path.join(os.environ[SHARED_FORK_SERVERS], "torch"))  # noqa: PTH118 (as text)
        nothing.shutdown(socket.SHUT_WR)
        nothing.recv(1)  # it hangs up on whoever says nothing, once it has loaded torch


def _say(answer: dict[str, int | None]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
