"""An elastic job: its settings, the address of its coordinator, and the exit code that follows from its end."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.errors import FIRST_SIGNAL, PREEMPTED, JobError
from unisono.host.certificate import Certificate, NoCertificate, alternative_names, make
from unisono.launch.outcome import NOT_MISSED, Blame, JobConclusion, WorkerExit, after_training
from unisono.launch.settings import LaunchSettings
from unisono.membership.token import is_loopback, new_token, read_token
from unisono.received import LONGEST_S, short
from unisono.settings.reading import words_of

if TYPE_CHECKING:  # the command line starts without pydantic
    from unisono.membership.messages import JobOver

# The certificate of a coordinator for other hosts: the person's own, or one that is made for the job.

END = "-----END CERTIFICATE-----"


def certificate_file(run_dir: Path) -> Path:
    """The file in a run folder with the certificate of its coordinator, to be copied to other hosts."""
    return run_dir / "certificate.pem"


def share(certificate: Certificate, run_dir: Path) -> None:
    """Copy the first certificate of the chain, without its key, to the file for other hosts.

    Raises:
        JobError: it cannot be read, or is none.
    """
    try:
        text = certificate.chain.read_text(encoding="ascii")
        first, end, _ = text.partition(END)
        if not end:
            raise JobError(f"--tls-cert {certificate.chain} holds no certificate")
        certificate_file(run_dir).write_text(f"{first}{end}\n", encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"--tls-cert {certificate.chain} cannot be used: {error}") from error


def make_certificate(run_dir: Path, names: Iterable[str]) -> Certificate:
    """The self-signed certificate of a run folder; if it has none yet, a new one for these host names.

    Raises:
        JobError: this host has no program that makes one, or the program failed; says what to do.
    """
    certificate = Certificate(certificate_file(run_dir), run_dir / "certificate.key")
    if certificate.chain.exists() and certificate.key.exists():
        if certificate.key.stat().st_mode & 0o077:
            raise JobError(f"others can read the key in {certificate.key}: remove it, and another one is made")
        return certificate
    try:
        with tempfile.TemporaryDirectory(prefix=".certificate-", dir=run_dir) as folder:  # only this user may read it
            new = make(Path(folder), "unisono coordinator", ["extendedKeyUsage = serverAuth", alternative_names(names)])
            os.replace(new.key, certificate.key)  # noqa: PTH105 (both as one)
            os.replace(new.chain, certificate.chain)  # noqa: PTH105
    except (OSError, NoCertificate) as error:
        raise JobError(
            f"other hosts reach the coordinator over TLS, and {error}: install openssl, or give --tls-cert and "
            f"--tls-key"
        ) from error
    return certificate


# The address of the coordinator of a job, as the person gives it.

LOOPBACK = "127.0.0.1"

HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")

_ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses for documentation. Nothing is sent there: the system says from which of this host's it would send."""


@dataclass(frozen=True, slots=True)
class Entrance:
    """The address at which a coordinator listens, with its certificate.

    Attributes:
        host: a name or address of this host; empty for all of its addresses.
        port: the port; 0 for any that is free.
        certificate: the person's own certificate; None for one that is made for the job.
        towards: another host of the job, if one is known: of several addresses, clients get the one towards this host.
        token_file: a file with the job's token, if that was made before the job.
        known_as: the name by which other hosts know this one, if it is not ``host``; no name server need know it yet.
    """

    host: str = LOOPBACK
    port: int = 0
    certificate: Certificate | None = None
    towards: str = ""
    token_file: Path | None = None
    known_as: str = ""

    @classmethod
    def read(cls, text: str | None, chain: Path | None = None, key: Path | None = None) -> Entrance:
        """The address in a text ``HOST:PORT``, ``:PORT`` or ``[ADDRESS]:PORT``; on loopback for None.

        Raises:
            JobError: the text has another form, or the certificate would not be used.
        """
        if (chain is None) != (key is None):
            raise JobError("--tls-cert and --tls-key belong together: give both, or none")
        if text is None:
            if chain is not None:
                raise JobError("--tls-cert is for a coordinator that other hosts reach: say where with --coordinator")
            return cls()
        host, colon, port = text.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise JobError(f"--coordinator {text}: write an address with colons in brackets, as [{host}]:7777")
        if not colon or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
            raise JobError(f"--coordinator {text}: write HOST:PORT, or :PORT for all addresses of this host")
        return cls(host, int(port), Certificate(chain, key) if chain is not None and key is not None else None)

    def prepared(self, token_file: Path | None, known_as: str | None) -> Entrance:
        """The same address with a token and a host name that were chosen before the host started.

        Raises:
            JobError: the address is local, so that no other host could use them, or the name is no host name.
        """
        if token_file is None and known_as is None:
            return self
        if self.is_local:
            raise JobError("--token-file and --known-as are for a coordinator that other hosts reach: --coordinator")
        if known_as is not None and not HOST_NAME.fullmatch(known_as):
            raise JobError(f"--known-as {short(known_as)}: write the name of a host, without a port")
        return replace(self, token_file=token_file, known_as=known_as or "")

    def token(self, run_dir: Path) -> str:
        """The job's token, which is written into the run folder.

        Raises:
            JobError: it cannot be read or written.
        """
        return new_token(run_dir, None if self.token_file is None else read_token(self.token_file))

    @property
    def is_local(self) -> bool:
        """Whether only this host can reach it."""
        return self.host != "" and is_loopback(self.host)

    def listen(self, backlog: int) -> socket.socket:
        """A listening socket.

        Raises:
            JobError: the system refuses it, or no other host could reach it; says what to do.
        """
        try:
            address: tuple[Any, ...] = ("", self.port)
            family = socket.AF_INET
            if self.host:
                family, _, _, _, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
            listener = socket.create_server(address[:2], family=family, backlog=backlog)
        except (OSError, UnicodeError) as error:  # a name with a part of more than 63 characters is a UnicodeError
            is_taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            free = f"[{self.host}]:0" if ":" in self.host else f"{self.host}:0"
            raise JobError(
                f"the coordinator cannot listen on {self.host or 'all addresses'}, port {self.port}: {error}. "
                + (
                    f"Something else listens there, another job perhaps: --coordinator {free} takes a free port"
                    if is_taken
                    else "--coordinator wants a name or address of this host, or :PORT for all of them"
                )
            ) from error
        bound = listener.getsockname()[0]
        if not self.is_local and is_loopback(bound):
            listener.close()
            raise JobError(
                f"--coordinator {self.host}: on this host that is {bound}, which no other host can reach; give the "
                f"address by which the others know it, or :{self.port or 'PORT'} for all of them"
            )
        return listener

    def name(self, listener: socket.socket) -> str:
        """The name or address of this host in the URL that clients get."""
        if self.known_as or self.host:
            return self.known_as or self.host
        for host in filter(None, (self.towards, _ELSEWHERE[listener.family])):
            with suppress(OSError, UnicodeError), socket.socket(listener.family, socket.SOCK_DGRAM) as probe:
                probe.connect((host, 9))  # sends nothing, but makes the system choose the address to send from
                return str(probe.getsockname()[0])
        return socket.getfqdn()

    def certificate_for(self, run_dir: Path, name: str) -> Certificate | None:
        """The coordinator's certificate; None if only this host can reach the coordinator, which needs no TLS then.

        Raises:
            JobError: there is no certificate, and none can be made.
        """
        if self.certificate is not None:
            share(self.certificate, run_dir)
            return self.certificate
        if self.is_local:
            return None
        return make_certificate(run_dir, dict.fromkeys((name, socket.gethostname())))


MAX_RESTARTS = 3
FAILURE_TIMEOUT_S = 300.0

DEVICES = "communication.devices_per_worker"
"""The setting that joining agents get from the coordinator."""

SAME_EVENT_S = 2.0
"""Failures within this time are one event; the job has survived those before."""


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers of workers that a job may have."""

    smallest: int
    largest: int

    @classmethod
    def read(cls, text: str) -> Range:
        """The range in a text such as ``4`` or ``2:8``.

        Raises:
            JobError: the text has another form.
        """
        numbers = re.fullmatch(r"(-?\d{1,9})(?::(-?\d{1,9}))?", text.strip(), re.ASCII)
        if numbers is None:
            raise JobError(f"--workers {text}: write a number, such as 4, or a range, such as 2:8")
        smallest = int(numbers[1])
        return cls(smallest, int(numbers[2]) if numbers[2] else smallest)

    @property
    def is_fixed(self) -> bool:
        """Whether the range has only one number."""
        return self.smallest == self.largest

    def within(self, number: int) -> int:
        """The number in the range that is nearest to another."""
        return max(self.smallest, min(self.largest, number))

    def __str__(self) -> str:
        return str(self.smallest) if self.is_fixed else f"{self.smallest}:{self.largest}"


@dataclass(frozen=True, slots=True)
class ElasticSettings:
    """The settings with which the workers of an elastic job run on this host.

    Attributes:
        launch: the settings of the workers on this host, with the most workers that it may run.
        workers: the numbers of workers that the job may have, on all hosts together.
        begin_with: the number of workers to begin with; None for as many as the hosts can run.
        max_restarts: the number of new workers that each place of the job may get, on average.
        failure_timeout_s: the seconds of silence after which a worker, an agent or the coordinator counts as lost.
    """

    launch: LaunchSettings
    workers: Range
    begin_with: int | None = None
    max_restarts: int = MAX_RESTARTS
    restart_on_error: bool = False
    failure_timeout_s: float = FAILURE_TIMEOUT_S
    entrance: Entrance = field(default_factory=Entrance)

    def with_devices(self, count: int | None) -> ElasticSettings:
        """The settings with this number of devices for each worker."""
        return replace(self, launch=self.launch.with_options({"communication.devices_per_worker": count}))

    def words(self, *without: str) -> list[str]:
        """The last words of a command of the job: its options, except these settings or groups, and the script."""
        is_default = self.failure_timeout_s == FAILURE_TIMEOUT_S
        timeout = [] if is_default else ["--failure-timeout-s", f"{self.failure_timeout_s:g}"]
        options = words_of(self.launch.options, without=(*without, DEVICES))
        return [*options, *timeout, *self.launch.script.argv]

    @property
    def devices_words(self) -> list[str]:
        """The option that says how many devices each worker has, if the person has set it."""
        is_set = "devices_per_worker" in self.launch.options.communication.specified
        return ["--devices-per-worker", str(self.launch.devices)] if is_set else []

    def check(self, *, is_here: bool = True) -> None:
        """Refuse settings that cannot work, before anything is started.

        Raises:
            JobError: a number is out of range, or the script cannot be run; names it.
        """
        if self.workers.smallest < 1:
            raise JobError(f"--workers {self.workers}: at least 1 is needed")
        if self.workers.largest < self.workers.smallest:
            raise JobError(f"--workers {self.workers}: the smaller number comes first")
        if self.max_restarts < 0:
            raise JobError(f"--max-restarts {self.max_restarts}: needs a number of 0 or more")
        if not 0 < self.failure_timeout_s <= LONGEST_S:
            raise JobError(
                f"--failure-timeout-s {self.failure_timeout_s:g}: needs a number of seconds above 0, and at most "
                f"{LONGEST_S:g}"
            )
        self.launch.check(fewest=0, is_here=is_here)  # the coordinator's host may have none


@dataclass(frozen=True, slots=True)
class AgentEnd:
    """The end of an agent that the launcher has started on another host.

    Attributes:
        agent: the id of the agent.
        where: its host or node, in words.
        code: its exit code, which is that of its workers' scripts; None if it was killed or lost, and they with it.
    """

    agent: str
    where: str
    code: int | None


def conclusion_of(over: JobOver, agent_ends: Sequence[AgentEnd] = ()) -> JobConclusion:
    """The exit code of the launcher and its reason, when the job is over and no worker of this host is to blame."""
    if over.is_done:
        failed = _failed_agent(over, agent_ends)
        return JobConclusion(0, over.reason) if failed is None else _failed_after_training(failed, over)
    if over.preempted:
        return JobConclusion(PREEMPTED, over.reason)
    codes = [end.code or 0 for end in agent_ends]  # another code than 1 says more than that the job has failed
    return JobConclusion(next((code for code in codes if code > 1 and code != PREEMPTED), 1), over.reason)


def _failed_agent(over: JobOver, agent_ends: Sequence[AgentEnd]) -> AgentEnd | None:
    # By the rules of exits_that_count.
    main = [end for end in agent_ends if end.agent == over.main_agent]
    others = [end for end in agent_ends if end.agent in over.agents and end.code is not None]
    return next((end for end in (*main, *others) if end.code not in (0, PREEMPTED)), None)


def _failed_after_training(failed: AgentEnd, over: JobOver) -> JobConclusion:
    if failed.code is None:
        reason = f"the main worker was killed or lost on {failed.where} with its agent, after run.finish"
        return JobConclusion(FIRST_SIGNAL + signal.SIGKILL, reason + after_training(over.digest))
    reason = (
        f"a script on {failed.where} has failed after run.finish (exit code {failed.code}): its lines above say why"
    )
    return JobConclusion(failed.code, reason + after_training(over.digest))


def lines_about(over: JobOver, agent_ends: Sequence[AgentEnd]) -> list[str]:
    """The lines about agents that were lost after complete training, and did not have the main worker."""
    others = {*over.agents} - {over.main_agent}
    lost = [end for end in agent_ends if end.code is None and end.agent in others]
    return [f"an agent on {end.where} was killed or lost ({NOT_MISSED})" for end in lost]


def exits_that_count(exits: Sequence[WorkerExit], over: JobOver) -> tuple[WorkerExit, ...]:
    """The exits that decide the end of a job whose training is complete.

    Workers that have finished training run the script's last lines, each for itself. An error in these counts. A worker
    that is killed then counts only if it is the main worker, whose last lines the job needs. A worker that has not
    finished training came too late, or was not needed any more.
    """
    return tuple(
        end
        for end in exits
        if end.rank == over.main or (end.rank in over.finished and (end.code >= 0 or end.failure is not None))
    )


def exits_that_ended_it(
    exits: Sequence[WorkerExit], over: JobOver | None, interrupted: int | None = None
) -> tuple[WorkerExit, ...]:
    """The exits that explain how a job ended: the good ones, and the last failures, which the job has not survived.

    If a worker's script has ended the job, other workers' ends without an error do not count; and if that worker was on
    another host, no worker here is to blame.
    """
    good = [end for end in exits if end.blame(interrupted) is Blame.NONE]
    failed = [end for end in exits if end.blame(interrupted) in (Blame.CAUSE, Blame.CONSEQUENCE)]
    if over is not None and over.worker:
        is_here = any(end.rank == over.worker for end in failed)
        failed = [end for end in failed if is_here and (end.failure is not None or end.rank == over.worker)]
    last = max((end.time for end in failed), default=0.0)
    return (*good, *(end for end in failed if end.time >= last - SAME_EVENT_S))
