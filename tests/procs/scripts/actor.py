"""A worker of an elastic job without training: it says to the coordinator what a training one would.

It works until a file `finish` is in the run folder; `fail-w2` there makes w2 raise an error.
"""

import json
import os
import queue
import sys
from pathlib import Path

from unisono.membership.client import WorkerConnection
from unisono.membership.messages import (
    Arrived,
    Finished,
    JobOver,
    Lost,
    NewGeneration,
    Progress,
    Ready,
    RegroupDue,
    Removed,
    ToWorker,
    Welcome,
    WorkerHello,
)
from unisono.membership.token import read_token

BEAT_S = 0.02

me = os.environ["UNISONO_WORKER"]
run_dir = Path(os.environ["UNISONO_RUN_DIR"])
news: queue.Queue[ToWorker] = queue.Queue()
hello = WorkerHello(worker=me, host="here", pid=os.getpid(), shards=8)
token = read_token(Path(os.environ["UNISONO_TOKEN_FILE"]))
line = WorkerConnection(os.environ["UNISONO_COORDINATOR"], token, hello, news.put, 30.0)
generation = 0
finished = False
roster: list[str] = []
while True:
    try:
        message = news.get(timeout=BEAT_S)
    except queue.Empty:
        if generation and not finished:
            line.send(Progress(acts=1, step=1, samples_per_s=10.0, loop=0))
            if (run_dir / f"fail-{me}").exists():
                raise ValueError("boom") from None
            if (run_dir / "finish").exists():
                finished = True
                if roster[0] == me:
                    (run_dir / "result.json").write_text(
                        json.dumps({"exit_code": 0, "error": None, "steps": 1, "world_size": len(roster)})
                    )
                line.send(Finished(digest="d"))
        continue
    match message:
        case Welcome(joins=joins):
            line.send(Ready(loop=0 if joins else None))
        case NewGeneration():
            generation = line.generation = message.generation
            roster = [one.worker for one in message.here]
            print("generation", generation, "of", roster, "pid", os.getpid())
        case RegroupDue() | Lost() if not finished:
            line.send(Arrived(generation=generation, acts=1, loop=0, at_boundary=True, step=1))
        case Removed(preempted=preempted):
            line.close()
            sys.exit(75 if preempted else 0)
        case JobOver(digest=digest):
            line.close()
            sys.exit(0 if digest else 1)
