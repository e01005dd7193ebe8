"""Certificates that are signed by themselves, made by the ``openssl`` command."""

import ipaddress
import shutil
import ssl
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

DAYS = 3650
"""The days for which a certificate is valid. Since exactly this one is trusted, an earlier end would protect nobody."""

PINNED = ssl.VerifyFlags(ssl.VERIFY_X509_PARTIAL_CHAIN | 0x200000)
"""The flags for trust in exactly one certificate, also on hosts whose clocks are wrong: the number is
``X509_V_FLAG_NO_CHECK_TIME``, for which Python has no name."""

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
    """The reason why no certificate could be made."""


def make(folder: Path, owner: str, more: Iterable[str] = ()) -> Certificate:
    """Make a certificate with a new key, P-256, in files that only this user can read.

    Args:
        folder: a folder that no other user can read.
        owner: the name in the certificate.
        more: further lines of openssl's configuration.

    Raises:
        NoCertificate: there is no ``openssl``, or it failed.
    """
    openssl = shutil.which("openssl")
    if openssl is None:
        raise NoCertificate("there is no 'openssl' here that could make a certificate")
    certificate, configuration = Certificate(folder / "chain", folder / "key"), folder / "configuration"
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-sha256", "-nodes"]
    files = ["-config", str(configuration), "-keyout", str(certificate.key), "-out", str(certificate.chain)]
    try:
        configuration.write_text(_CONFIGURATION.format(owner=owner, more="\n".join(more)), encoding="ascii")
        subprocess.run(
            [openssl, "req", "-x509", *curve, "-days", str(DAYS), *files],
            check=True,
            capture_output=True,
            text=True,
            timeout=OPENSSL_S,
            stdin=subprocess.DEVNULL,
        )
        certificate.key.chmod(0o600)
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        raise NoCertificate(f"'openssl' made no certificate ({str(reason).strip()})") from error
    return certificate


def alternative_names(names: Iterable[str]) -> str:
    """The line of openssl's configuration with the names and addresses for which a certificate is made out."""
    return f"subjectAltName = {', '.join(map(_alternative, names))}"


def _alternative(name: str) -> str:
    try:
        return f"IP:{ipaddress.ip_address(name)}"
    except ValueError:
        return f"DNS:{name}"
