"""A Slurm job that trains: the resources that it requests, and the batch script that starts the workers."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from unisono.errors import FIRST_SIGNAL, PREEMPTED, JobError, LaunchError
from unisono.host.machine import LEVEL, numerics_variables
from unisono.launch.outcome import RUNS
from unisono.launch.settings import Script
from unisono.received import short
from unisono.settings.reading import variables_of
from unisono.settings.table import Settings

# Quoting: for bash, and for the lines of the script that Slurm reads.


CONTROL = re.compile(r"[\x00-\x1f\x7f]")
"""Control characters: a new line would end a directive, others are invisible in a terminal."""


def shell_word(text: str) -> str:
    """A text quoted as one word of bash on one line, in which bash expands nothing.

    Args:
        text: any text without a NUL, as arguments and paths are; with bytes that are no UTF-8 as ``os.fsdecode`` has
            them.

    Returns:
        the text itself if no character of it is special to a shell; otherwise in ``'…'``; or in ``$'…'``, with octal
        escapes, if it holds control characters.
    """
    if not CONTROL.search(text):
        return shlex.quote(text)
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + CONTROL.sub(lambda match: f"\\{ord(match.group()):03o}", escaped) + "'"


def directive(name: str, value: str) -> str:
    """An option of sbatch, quoted as one argument of a ``#SBATCH`` line.

    Slurm does not read these lines as a shell does: a backslash escapes the next character within quotes of either
    kind, and nothing can stand for a new line (``get_argument`` in Slurm's ``src/sbatch/opt.c``).

    Raises:
        JobError: the value is empty, or has control characters, which no such line can hold.
    """
    require_line(f"--{name}", value)
    if re.fullmatch(r"[\w.,:/@%+=-]+", value, re.ASCII):
        return f"--{name}={value}"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'--{name}="{escaped}"'


def require_line(option: str, value: str) -> None:
    """Refuse a value that cannot stand in a line that Slurm reads.

    Raises:
        JobError: the value is empty, has control characters or bytes that are no UTF-8.
    """
    if not value:
        raise JobError(f"{option} is empty")
    control = CONTROL.search(value)
    if control:
        raise JobError(
            f"{option} {short(value)}: Slurm, which reads line by line, takes no value with a {control.group()!r} in it"
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise JobError(f"{option} {short(value)}: not all of it is text in UTF-8") from None


# The time limit of a Slurm job.

NOTICE_S = 120
"""How long before the time limit workers are asked to leave."""

LEAST_S = NOTICE_S + 60
"""The shortest time limit: Slurm may send the signal a minute early."""

FORMS = (
    r"(?P<minutes>\d+)(:(?P<seconds>\d+))?",
    r"(?P<hours>\d+):(?P<minutes>\d+):(?P<seconds>\d+)",
    r"(?P<days>\d+)-(?P<hours>\d+)(:(?P<minutes>\d+)(:(?P<seconds>\d+))?)?",
)
SECONDS_OF = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}


def seconds_of(text: str) -> int:
    """A time limit in seconds, from one of Slurm's forms: ``M``, ``M:S``, ``H:M:S``, ``D-H``, ``D-H:M``, ``D-H:M:S``.

    Raises:
        JobError: it has another form, or is so short that workers would be asked to leave at once.
    """
    for form in FORMS:
        if match := re.fullmatch(form, text, re.ASCII):
            parts = {name: int(value) for name, value in match.groupdict().items() if value is not None}
            return _require_long(text, sum(SECONDS_OF[name] * count for name, count in parts.items()))
    raise JobError(f"--time {short(text)}: write hours:minutes:seconds, as in 00:30:00, or days-hours:minutes:seconds")


def _require_long(text: str, seconds: int) -> int:
    if seconds <= LEAST_S:
        raise JobError(
            f"--time {text}: that is {seconds} s; workers are asked to leave up to {LEAST_S} s before the end, so a "
            f"job needs more than that"
        )
    return seconds


NAME = re.compile(r"\w[\w.,:@/+=~-]*")
"""The name of an account, a partition or a module: no blank, and no dash at its beginning."""

OURS = frozenset(
    (
        *("account", "array", "cpus-per-task", "gpus-per-node", "job-name", "mincpus", "nodes", "ntasks-per-node"),
        *("open-mode", "partition", "requeue", "signal", "time"),
        *("chdir", "export", "ntasks", "wrap"),
    )
)
"""Options of sbatch that we write, or that would contradict those that we write."""


REQUEUES = 100


@dataclass(frozen=True, slots=True)
class Allocation:
    """The resources that the job requests from the cluster.

    Attributes:
        time: the time limit, in one of Slurm's forms.
        nodes: the number of hosts; the largest number, if it may start with fewer.
        gpus: the number of GPUs of each host; 0 for workers on CPUs.
        workers_per_node: the number of workers of each host on CPUs; None with GPUs, each of which has one worker.
        cores: the number of cores of each worker; None for as many as the cluster gives by itself.
        account: the account to charge; None for the person's default.
        partition: the partition in which to run; None for the cluster's default.
        more: further options of sbatch, as ``name=value``.
        least_nodes: the smallest number of hosts with which it may start; None for ``nodes``.
    """

    time: str
    nodes: int = 1
    gpus: int = 0
    workers_per_node: int | None = None
    cores: int | None = None
    account: str | None = None
    partition: str | None = None
    more: tuple[str, ...] = ()
    least_nodes: int | None = None

    @property
    def per_node(self) -> int:
        """The number of workers of each host."""
        return self.gpus or self.workers_per_node or 0

    @property
    def workers(self) -> int:
        """The number of workers for which there is room."""
        return self.nodes * self.per_node

    def check(self) -> None:
        """Refuse options that contradict each other, or are out of range.

        Raises:
            JobError: says which option, and why.
        """
        seconds_of(self.time)
        if self.least_nodes is not None and not 1 <= self.least_nodes <= self.nodes:
            raise JobError(f"--nodes {self.nodes_range}: the smallest number first, and at least 1")
        for name, value, least in (("--nodes", self.nodes, 1), ("--gpus", self.gpus, 0)):
            if value < least:
                raise JobError(f"{name} {value}: at least {least}")
        for name, count in (("--workers-per-node", self.workers_per_node), ("--cores-per-gpu", self.cores)):
            if count is not None and count < 1:
                raise JobError(f"{name} {count}: at least 1")
        if self.gpus and self.workers_per_node is not None:
            raise JobError(f"--gpus {self.gpus} --workers-per-node {self.workers_per_node}: each GPU has one worker")
        if not self.per_node:
            raise JobError("how many workers? --gpus N for one on each of N GPUs of a node, or --workers-per-node N")
        for name, text in (("--account", self.account), ("--partition", self.partition)):
            if text is not None:
                require_name(name, text)
        for option in self.more:
            _require_option(option)

    @property
    def nodes_range(self) -> str:
        """The number of hosts, as Slurm reads it: ``4``, or ``2-4``."""
        return f"{self.nodes}" if self.least_nodes is None else f"{self.least_nodes}-{self.nodes}"

    def directives(self, tasks_per_node: int, cores: int | None) -> list[str]:
        """The requested resources, as options of sbatch."""
        # With a range of nodes and a number of tasks, Slurm 22.05 gives too few nodes.
        size = (
            {"ntasks-per-node": tasks_per_node, "cpus-per-task": cores}
            if self.least_nodes is None
            else {"mincpus": tasks_per_node * (cores or 1)}
        )
        values = {
            "time": self.time,
            "nodes": self.nodes_range,
            **size,
            "gpus-per-node": self.gpus or None,
            "account": self.account,
            "partition": self.partition,
        }
        directives = [directive(name, str(value)) for name, value in values.items() if value is not None]
        return directives + [directive(*option.split("=", 1)) for option in self.more]


@dataclass(frozen=True, slots=True)
class BatchJob:
    """A Slurm job, or an array of them.

    Attributes:
        folder: the folder in which the job starts, absolute; relative paths of the script begin there.
        workers: the number of workers of each element of an array; empty for one job with as many as there is room for.
        study_words: the arguments of a scaling study of the script; None if the job just trains.
        runs: the folder in which run folders are made.
        requeues: the number of times that the job may be started again.
    """

    script: Script
    allocation: Allocation
    name: str
    folder: Path
    python: str
    workers: tuple[int, ...] = ()
    study_words: tuple[str, ...] | None = None
    modules: tuple[str, ...] = ()
    runs: Path = RUNS
    requeues: int = REQUEUES
    options: Settings = field(default_factory=Settings)

    def check(self) -> None:
        """Refuse a job that can work on no cluster.

        Raises:
            JobError: says which option, and why.
        """
        self.allocation.check()
        require_line("--job-name", self.name)
        for module in self.modules:
            require_name("--module", module)
        if not self.python or self.python.startswith("-") or CONTROL.search(self.python):
            raise JobError(f"--python {short(self.python)}: no name or path of an interpreter")
        if self.requeues < 0:
            raise JobError(f"--requeues {self.requeues}: at least 0")
        self._check_array()
        if self.study_words is not None:
            self._check_study(self.study_words)

    def _check_array(self) -> None:
        room = self.allocation.workers
        wrong = [count for count in self.workers if not 1 <= count <= room]
        if wrong:
            raise JobError(f"--workers {wrong[0]}: the job has room for 1 to {room}")
        if self.workers and self.allocation.least_nodes is not None:
            raise JobError(f"--workers with --nodes {self.allocation.nodes_range}: say on how many nodes there is room")
        if len(set(self.workers)) < len(self.workers):
            raise JobError(f"--workers {','.join(map(str, self.workers))}: one of them stands there twice")

    def _check_study(self, words: tuple[str, ...]) -> None:
        if self.allocation.least_nodes is not None or (self.workers and self.allocation.nodes > 1):
            raise JobError(
                f"study with --nodes {self.allocation.nodes_range}: a study of several nodes is one job with all of "
                f"them, which measures each number of workers: --nodes {self.allocation.nodes} … -- study --workers …"
            )
        if self.allocation.cores is None and self.allocation.gpus:
            raise JobError("study: say with --cores-per-gpu how many cores there are for each GPU")
        if self.workers and any(word.partition("=")[0] == "--workers" for word in words):
            raise JobError("--workers stands before study and after it: before it for an array, else after it")

    @property
    def variables(self) -> dict[str, str]:
        """The variables that the script sets for all tasks, before torch is loaded."""
        options = variables_of(self.options)
        return options | numerics_variables(options.get(LEVEL))

    @property
    def study(self) -> bool:
        """Whether it is a scaling study of the script, and not one training."""
        return self.study_words is not None

    @property
    def study_of_nodes(self) -> bool:
        """Whether the study starts its workers on several nodes, by srun."""
        return self.study and self.allocation.nodes > 1

    @property
    def is_array(self) -> bool:
        """Whether it is several jobs, alike but for the number of workers."""
        return bool(self.workers)

    @property
    def nodes(self) -> list[int]:
        """The number of hosts that each element of the array uses."""
        return [-(-count // self.allocation.per_node) for count in self.workers]

    @property
    def cores(self) -> int | None:
        """The cores of each task: of a worker, or of the study, which starts workers by itself."""
        if self.study and not self.study_of_nodes:
            return self.allocation.per_node * (self.allocation.cores or 1)
        return self.allocation.cores

    @property
    def directives(self) -> list[str]:
        """All options of sbatch in the script."""
        last = len(self.workers) - 1
        return [
            directive("job-name", self.name),
            *self.allocation.directives(
                1 if self.study and not self.study_of_nodes else self.allocation.per_node, self.cores
            ),
            *([directive("array", f"0-{last}")] if self.is_array else []),
            "--requeue",
            "--open-mode=append",
            f"--signal=TERM@{NOTICE_S}",
        ]

    @property
    def program(self) -> list[str]:
        """The words after ``python`` in each task."""
        return [*(["-m", "unisono", "study"] if self.study else []), *self._script]

    @property
    def words(self) -> tuple[str, ...]:
        """The arguments of the program."""
        return self.script.args if self.study_words is None else self.study_words

    @property
    def _script(self) -> list[str]:
        if self.script.is_module:
            return ["-m", self.script.target]
        dashed = self.script.target.startswith("-")  # Python would take it for an option
        return [f"./{self.script.target}" if dashed else self.script.target]


def read_nodes(text: str) -> tuple[int | None, int]:
    """The smallest number of hosts, None if only one is given, and the largest, as Slurm reads ``4`` or ``2-4``.

    Raises:
        JobError: it is neither.
    """
    numbers = re.fullmatch(r"(?:([0-9]{1,6})-)?([0-9]{1,6})", text)
    if numbers is None:
        raise JobError(f"--nodes {short(text)}: write a number, as in --nodes 4, or a range, as in --nodes 2-4")
    return None if numbers[1] is None else int(numbers[1]), int(numbers[2])


def require_name(option: str, text: str) -> None:
    """Refuse a text that is no name of an account, a partition or a module.

    Raises:
        JobError: it has blanks, quotes or other characters that no name has, or begins with a dash.
    """
    if not NAME.fullmatch(text):
        raise JobError(f"{option} {short(text)}: no name; it takes letters, digits and any of . , : @ / + = ~ _ -")


def split_words(words: Sequence[str]) -> tuple[bool, tuple[str, ...]]:
    """Whether the words after the script ask for a study, and the arguments of the study or of the script.

    A script whose own first argument is ``study`` gets it after one more ``--``.
    """
    if words and words[0] == "study":
        return True, tuple(words[1:])
    return False, tuple(words[1:] if words and words[0] == "--" else words)


def _require_option(option: str) -> None:
    name, equals, value = option.partition("=")
    if not equals or not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise JobError(f"--sbatch {short(option)}: write name=value, as in --sbatch constraint=v100")
    if name in OURS:
        raise JobError(f"--sbatch {short(option)}: Unisono writes or needs --{name} itself")
    require_line(f"--sbatch {name}=", value)


# The script of a Slurm job: written from a template, checked by bash, and given to sbatch.

TEMPLATE = Path(__file__).with_suffix(".sh.j2")

MARK = "written by: "
"""The beginning of the second line: a file that has it may be overwritten."""

INTERRUPTED = FIRST_SIGNAL + signal.SIGTERM
"""The exit code of a process that SIGTERM ends: a study, which keeps its results; a worker that still loads torch."""

PATIENCE_S = 120.0
"""The longest wait for sbatch, which waits when the cluster is busy."""


def text_of(job: BatchJob, command: Sequence[str]) -> str:
    """The text of a batch script, with the command that made it, for the person who reads it.

    Raises:
        JobError: the job cannot work, or jinja2 is not installed.
    """
    job.check()
    if find_spec("jinja2") is None:
        raise JobError(
            "unisono slurm needs jinja2, which is not installed: pip install '.[study]' in a clone of Unisono"
        )
    from jinja2 import Environment, StrictUndefined

    shell = Environment(trim_blocks=True, undefined=StrictUndefined, autoescape=False)  # noqa: S701 (it is no HTML)
    shell.filters["word"] = lambda value: shell_word(str(value))
    template = shell.from_string(TEMPLATE.read_text(encoding="utf-8"))
    made_by = " ".join(map(shell_word, command))
    asked_to_leave = INTERRUPTED if job.study else PREEMPTED
    rendered: str = template.render(
        job=job, mark=MARK, made_by=made_by, asked_to_leave=asked_to_leave, interrupted=INTERRUPTED
    )
    return rendered + "\n"


def require_valid(script: str) -> None:
    """Have bash read a script without running it.

    Raises:
        LaunchError: bash does not understand it, or there is no bash.
    """
    try:
        code, output = _run(["bash", "-n"], script)  # the one that Slurm will find
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"the script cannot be checked with bash -n: {error}") from error
    if code:
        raise LaunchError(f"bash does not understand the script: {output}")


def _run(command: Sequence[str], script: str) -> tuple[int, str]:
    """The exit code of a command that reads a script, and its output, or its errors if it failed with some."""
    result = subprocess.run(command, input=os.fsencode(script), capture_output=True, timeout=PATIENCE_S, check=False)
    errors, output = (text.decode(errors="backslashreplace").strip() for text in (result.stderr, result.stdout))
    return result.returncode, errors if errors and result.returncode else output


def write(script: str, path: Path) -> None:
    """Write a script into a file: a new one, or one that an earlier call has written.

    Raises:
        JobError: another program wrote the file, or it cannot be written.
    """
    try:
        if path.exists() and not _is_ours(path):
            raise JobError(f"{path} is there already, and unisono slurm did not write it: name another file")
        path.write_bytes(os.fsencode(script))
    except OSError as error:
        raise JobError(f"{path} cannot be written: {error.strerror}") from error


def _is_ours(path: Path) -> bool:
    with path.open("rb") as file:
        return file.readline() == b"#!/bin/bash\n" and file.readline().startswith(f"# {MARK}".encode())


def submit(script: str, path: Path | None) -> str:
    """Give a script, or its file if there is one, to sbatch, and return the output of sbatch.

    Raises:
        LaunchError: there is no sbatch here, it refused, or it did not answer.
    """
    try:
        code, output = _run(["sbatch"] if path is None else ["sbatch", str(path.absolute())], "" if path else script)
    except FileNotFoundError:
        raise LaunchError(
            "there is no sbatch here: --submit needs a host of the cluster from which jobs are submitted. "
            "Without --submit the script is written, and sbatch can be given it there"
        ) from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"sbatch could not be asked: {error}") from error
    if code:
        raise LaunchError(f"sbatch refused (exit code {code}): {output}")
    return output
