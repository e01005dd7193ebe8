"""A host of ours that people reach over ssh: Debian's sshd in its namespaces, with keys of its own."""

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from two_hosts import Host, NoHosts

SSHD = "/usr/sbin/sshd"
PATIENCE_S = 30.0

CONFIGURATION = """
Port 22
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
MaxStartups 50
"""

CLIENT = """
Host refused
    IdentityFile {folder}/other_key
Host {name} stranger
    IdentityFile {folder}/user_key
Host stranger
    HostKeyAlias stranger
Host {name} refused
    HostKeyAlias {address}
Host {name} stranger refused
    HostName {address}
Host nowhere
    HostName {nowhere}
Host *
    User root
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    StrictHostKeyChecking yes
    GlobalKnownHostsFile none
"""
"""``stranger`` is the same host under a name whose key nobody knows; ``refused`` is asked with a key unknown to it."""


@dataclass(frozen=True)
class SshHost:
    """A host that runs sshd.

    Attributes:
        host: the host.
        folder: the folder with keys, and with the configuration of whoever calls.
        pid: the process id of sshd.
    """

    host: Host
    folder: Path
    pid: int

    @property
    def ssh(self) -> str:
        """The command that reaches it, for ``--ssh``."""
        return shlex.join(["ssh", "-F", str(self.folder / "config")])

    @property
    def processes(self) -> list[psutil.Process]:
        """What runs there, but for sshd itself and who holds the namespaces."""
        ours, found = _network_of(self.host.pid), []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if _network_of(process.pid) == ours and process.pid not in (self.pid, self.host.pid):
                    found.append(process)
        return found

    def until_nothing_runs(self) -> None:
        """Wait until all that was started there has ended."""
        begun = time.monotonic()
        while left := self.processes:
            assert time.monotonic() - begun < PATIENCE_S, [process.cmdline() for process in left]
            time.sleep(0.05)


def _network_of(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")  # noqa: PTH115 (as text)


@contextmanager
def ssh_host(host: Host, folder: Path, *, own_files: Path | None = None) -> Iterator[SshHost]:
    """As long as the context lasts.

    Args:
        host: one of the two hosts.
        folder: a new folder for keys and configuration.
        own_files: a folder in which this host has files of its own.

    Raises:
        NoHosts: sshd is not installed.
    """
    if not Path(SSHD).exists() or shutil.which("ssh") is None:
        raise NoHosts("sshd is not installed: 'make ssh' installs it on Debian")
    folder.mkdir()
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    for name in ("host_key", "user_key", "other_key"):
        subprocess.run(["/usr/bin/ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    public = (folder / "host_key.pub").read_text().split()[:2]
    (folder / "known_hosts").write_text(" ".join([host.address, *public]) + "\n")
    (folder / "sshd_config").write_text(CONFIGURATION.format(address=host.address, folder=folder))
    told = {"folder": folder, "address": host.address, "name": host.name, "nowhere": host.address[:-1] + "77"}
    (folder / "config").write_text(CLIENT.format(**told))
    command = [SSHD, "-D", "-e", "-f", str(folder / "sshd_config")]
    if own_files is not None:
        mount = f"mount -t tmpfs none {shlex.quote(str(own_files))} && exec {shlex.join(command)}"
        command = ["unshare", "--mount", "sh", "-c", mount]
    with (folder / "sshd.log").open("wb") as log, subprocess.Popen([*host.enter, *command], stderr=log) as server:
        try:
            _until_it_listens(server, folder)
            yield SshHost(host, folder, server.pid)
        finally:
            server.terminate()


def _until_it_listens(server: "subprocess.Popen[bytes]", folder: Path) -> None:
    begun = time.monotonic()
    while "Server listening" not in (said := (folder / "sshd.log").read_text()):
        assert server.poll() is None, said
        assert time.monotonic() - begun < PATIENCE_S, said
        time.sleep(0.02)
