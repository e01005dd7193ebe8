"""A cluster of one machine: what stands for sbatch, srun and scontrol, and sets variables as they do.

Jobs run one after the other. Nodes are groups of processes.
"""

import multiprocessing
import os
import re
import runpy
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from unisono.membership.environment import PORTS

COMMANDS = ("sbatch", "srun", "scontrol")
FOLDER = "STAND_IN_FOLDER"


class Cluster:
    """A folder with the commands, and what they have done.

    Args:
        folder: a new one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for name in COMMANDS:
            path = folder / name
            program = (
                f"import sys\nsys.path[:0] = {sys.path!r}\nimport slurm_cluster\nslurm_cluster.{name}(sys.argv[1:])"
            )
            path.write_text(f"#!{sys.executable}\n{program}\n")
            path.chmod(path.stat().st_mode | stat.S_IXUSR)

    @property
    def environ(self) -> dict[str, str]:
        """Variables with which its commands are found."""
        others = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        return {**others, "PATH": f"{self.folder}:{os.environ['PATH']}", FOLDER: str(self.folder)}

    def close(self) -> None:
        """End jobs that still run."""
        for path in self.folder.glob("pid-*"):
            with suppress(ProcessLookupError):
                os.killpg(int(path.read_text()), signal.SIGKILL)

    def wait(self, patience_s: float) -> None:
        """Until all jobs have ended."""
        begun = time.monotonic()
        while not list(self.folder.glob("pid-*")) or any(map(_runs, self.folder.glob("pid-*"))):
            assert time.monotonic() - begun < patience_s, "the job did not end"
            time.sleep(0.05)

    @property
    def calls(self) -> list[str]:
        """The calls of scontrol."""
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []


def directives_of(script: str) -> list[str]:
    """What sbatch takes from a script: ``_opt_batch_script`` in Slurm's src/sbatch/opt.c, line by line."""
    found: list[str] = []
    for line in script.split("\n"):
        if line.startswith("#SBATCH"):
            found += _arguments(line.removeprefix("#SBATCH"))
        elif line.strip(" \t\v\f\r") and not line.lstrip(" \t\v\f\r").startswith("#"):
            break
    return found


def _arguments(line: str) -> list[str]:
    """``get_argument`` there, until nothing is left."""
    found: list[str] = []
    at = 0
    while True:
        argument, escaped, quote = None, False, ""
        while at < len(line) and line[at].isspace():
            at += 1
        assert line[at : at + 1] != ":", line
        while at < len(line) and (quote or not line[at].isspace()):
            char = line[at]
            if escaped:
                escaped = False
            elif char == "\\":
                at += 1
                escaped = True
                continue
            elif quote and char == quote:
                quote = ""
                at += 1
                continue
            elif not quote and char in "\"'":
                quote = char
                at += 1
                continue
            elif not quote and char == "#":
                break
            argument = (argument or "") + char
            at += 1
        assert not quote, line
        if argument is None:
            return found
        found.append(argument)


def sbatch(arguments: Sequence[str]) -> None:
    """Note a job and run it, in a process of its own."""
    script = Path(arguments[0]).read_text() if arguments else sys.stdin.read()
    options = dict(one.removeprefix("--").partition("=")[::2] for one in directives_of(script))
    folder = Path(os.environ[FOLDER])
    spool = folder / "slurm_script"
    spool.write_text(script)
    job = _free_job()
    if pid := os.fork():
        (folder / f"pid-{job}").write_text(str(pid))
        sys.stdout.write(f"Submitted batch job {job}\n")
        return
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    first, last = map(int, options.get("array", "0-0").split("-"))
    for element in range(first, last + 1):
        own = {"SLURM_ARRAY_JOB_ID": str(job), "SLURM_ARRAY_TASK_ID": str(element)} if "array" in options else {}
        own["SLURM_JOB_ID"] = str(job if element == last else _free_job())
        _run(spool, options, own)


def _runs(path: Path) -> bool:
    return bool(psutil.pid_exists(int(path.read_text())))


def _run(spool: Path, options: Mapping[str, str], own: Mapping[str, str]) -> None:
    name = (
        f"{own['SLURM_ARRAY_JOB_ID']}_{own['SLURM_ARRAY_TASK_ID']}"
        if "SLURM_ARRAY_JOB_ID" in own
        else own["SLURM_JOB_ID"]
    )
    per_node, nodes = int(options["ntasks-per-node"]), int(options["nodes"])
    environ = {
        **os.environ,
        **own,
        "SLURM_JOB_NAME": options["job-name"],
        "SLURM_NNODES": str(nodes),
        "SLURM_NTASKS": str(nodes * per_node),
        "SLURM_NTASKS_PER_NODE": str(per_node),
        "SLURM_JOB_NODELIST": _nodelist(nodes),
        "SLURMD_NODENAME": "localhost",
        **dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), "0"),
    }
    with Path(f"slurm-{name}.out").open("ab") as output:
        for restarts in range(5):
            again = {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
            done = subprocess.run(
                ["/bin/bash", spool], env={**environ, **again}, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                check=False,
            )  # fmt: skip
            output.write(f"ended with {done.returncode}\n".encode())
            wish = spool.parent / f"requeue-{name}"
            if not wish.exists():
                return
            wish.unlink()


def srun(arguments: Sequence[str]) -> None:
    """Start the tasks of a step, and end with the highest of their exit codes."""
    begin = next(at for at, one in enumerate(arguments) if not one.startswith("--"))
    options = dict(one.removeprefix("--").partition("=")[::2] for one in arguments[:begin])
    tasks, nodes = int(options["ntasks"]), int(options["nodes"])
    per_node = -(-tasks // nodes)
    most = int(os.environ["SLURM_NTASKS_PER_NODE"])
    assert per_node <= int(options.get("ntasks-per-node", most)) <= most
    assert nodes <= int(os.environ["SLURM_NNODES"])
    import unisono.train.start  # noqa: F401 (torch, too: once, and not in each task, since they are forked)

    started = []
    for rank in range(tasks):
        variables = {
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": str(tasks),
            "SLURM_STEP_NODELIST": _nodelist(nodes),
            "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{nodes})" if nodes > 1 else str(per_node),
            "SLURM_NTASKS": str(tasks),
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank % per_node),
            "SLURM_NODEID": str(rank // per_node),
            "SLURMD_NODENAME": _nodelist(nodes).split(",")[rank // per_node],
        }
        started.append(multiprocessing.get_context("fork").Process(target=_task, args=(arguments[begin:], variables)))
        started[-1].start()
    for one in started:
        one.join()
    sys.exit(max(code if code >= 0 else 128 - code for one in started if (code := one.exitcode) is not None))


def _task(command: Sequence[str], variables: Mapping[str, str]) -> None:
    """What Python would do with the words behind it."""
    python, script, *_ = command
    assert python == sys.executable
    os.environ.update(variables)
    sys.argv[:] = command[1:]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


def scontrol(arguments: Sequence[str]) -> None:
    """Note that a job is to be started again."""
    folder = Path(os.environ[FOLDER])
    with (folder / "calls").open("a") as calls:
        calls.write(" ".join(arguments) + "\n")
    action, condition, job = arguments
    assert (action, condition) == ("requeue", "incomplete"), arguments
    assert re.fullmatch(r"\d+(_\d+)?", job), job
    (folder / f"requeue-{job}").touch()


def _nodelist(nodes: int) -> str:
    return ",".join(["localhost", *(f"node{number}" for number in range(1, nodes))])


def _free_job() -> int:
    """A job's number whose first step has a port that is free."""
    for _ in range(1000):
        job = int.from_bytes(os.urandom(3))
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", PORTS[job * 31 % len(PORTS)]))
                return job
            except OSError:
                continue
    raise AssertionError("no port is free")
