"""Certificates that are signed by themselves, made by the ``openssl`` command."""

import ipaddress
import shutil
import ssl
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

DAYS = 3650
"""A certificate of ours is trusted for what it is, and its date protects nobody."""

PINNED = ssl.VerifyFlags(ssl.VERIFY_X509_PARTIAL_CHAIN | 0x200000)
"""Flags for whom exactly one certificate is right, on hosts whose clocks are wrong, too (``X509_V_FLAG_NO_CHECK_TIME``,
for which Python has no name)."""

OPENSSL_S = 60.0

_CONFIGURATION = """\
[req]
prompt = no
distinguished_name = who
x509_extensions = what
[who]
CN = {owner}
[what]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
subjectKeyIdentifier = hash
{more}
"""


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate, with those above it, and its private key, both PEM."""

    chain: Path
    key: Path


class NoCertificate(Exception):
    """There is nothing here that makes one, or it could not; says why."""


def make(folder: Path, owner: str, more: Iterable[str] = ()) -> Certificate:
    """A new certificate with a key of its own, P-256, in files that only this user can read.

    Args:
        folder: a folder that nobody else looks into.
        owner: the name in the certificate.
        more: further lines of openssl's configuration.

    Raises:
        NoCertificate: there is no ``openssl``, or it failed.
    """
    openssl = shutil.which("openssl")
    if openssl is None:
        raise NoCertificate("there is no 'openssl' here that could make a certificate")
    made, configuration = Certificate(folder / "chain", folder / "key"), folder / "configuration"
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-sha256", "-nodes"]
    into = ["-config", str(configuration), "-keyout", str(made.key), "-out", str(made.chain)]
    try:
        configuration.write_text(_CONFIGURATION.format(owner=owner, more="\n".join(more)), encoding="ascii")
        subprocess.run(
            [openssl, "req", "-x509", *curve, "-days", str(DAYS), *into],
            check=True,
            capture_output=True,
            text=True,
            timeout=OPENSSL_S,
            stdin=subprocess.DEVNULL,
        )
        made.key.chmod(0o600)
    except (OSError, subprocess.SubprocessError) as error:
        words = getattr(error, "stderr", None) or error
        raise NoCertificate(f"'openssl' made no certificate ({str(words).strip()})") from error
    return made


def alternative_names(names: Iterable[str]) -> str:
    """The line of openssl's configuration with the names and addresses for which a certificate is made out."""
    return f"subjectAltName = {', '.join(map(_alternative, names))}"


def _alternative(name: str) -> str:
    try:
        return f"IP:{ipaddress.ip_address(name)}"
    except ValueError:
        return f"DNS:{name}"
