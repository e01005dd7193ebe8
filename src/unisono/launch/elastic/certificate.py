"""The certificate that a coordinator shows to other hosts: the person's own, or one that is made for the job."""

import ipaddress
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from unisono.errors import JobError

DAYS = 3650
"""A job's certificate is trusted for what it is, and goes with its run folder; its date protects nobody."""

OPENSSL_S = 60.0

END = "-----END CERTIFICATE-----"

CONFIGURATION = """\
[req]
prompt = no
distinguished_name = who
x509_extensions = what
[who]
CN = unisono coordinator
[what]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth
subjectKeyIdentifier = hash
subjectAltName = {names}
"""


@dataclass(frozen=True, slots=True)
class Certificate:
    """What a coordinator needs to speak TLS.

    Attributes:
        chain: the certificate, with those above it, PEM.
        key: its private key, PEM.
    """

    chain: Path
    key: Path


def certificate_file(run_dir: Path) -> Path:
    """Where a run folder keeps the certificate of its coordinator, for others to copy."""
    return run_dir / "certificate.pem"


def share(certificate: Certificate, run_dir: Path) -> None:
    """Put the certificate, without what is above it and without its key, where it is looked for.

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
    """The run folder's own certificate, signed by itself; a new one if it has none yet.

    Args:
        run_dir: the run folder.
        names: names and addresses of this host, for programs that want to see them in it.

    Raises:
        JobError: there is nothing here that makes one, or it could not; says what to do.
    """
    made = Certificate(certificate_file(run_dir), run_dir / "certificate.key")
    if made.chain.exists() and made.key.exists():
        if made.key.stat().st_mode & 0o077:
            raise JobError(f"others can read the key in {made.key}: remove it, and another one is made")
        return made
    openssl = shutil.which("openssl")
    if openssl is None:
        raise JobError(
            "other hosts reach the coordinator over TLS, and there is no 'openssl' here that could make a certificate "
            "for it: install it, or give --tls-cert and --tls-key"
        )
    try:
        with tempfile.TemporaryDirectory(prefix=".certificate-", dir=run_dir) as beside:  # nobody else looks into it
            fresh = _made(openssl, Path(beside), names)
            os.replace(fresh.key, made.key)  # noqa: PTH105 (both as one)
            os.replace(fresh.chain, made.chain)  # noqa: PTH105
    except (OSError, subprocess.SubprocessError) as error:
        words = getattr(error, "stderr", None) or error
        raise JobError(
            f"'openssl' made no certificate for the coordinator ({str(words).strip()}): give --tls-cert and --tls-key"
        ) from error
    return made


def _made(openssl: str, folder: Path, names: Iterable[str]) -> Certificate:
    made = Certificate(folder / "chain", folder / "key")
    configuration = folder / "configuration"
    configuration.write_text(CONFIGURATION.format(names=", ".join(map(_alternative, names))), encoding="ascii")
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-sha256", "-nodes"]
    into = ["-config", str(configuration), "-keyout", str(made.key), "-out", str(made.chain)]
    subprocess.run(
        [openssl, "req", "-x509", *curve, "-days", str(DAYS), *into],
        check=True,
        capture_output=True,
        text=True,
        timeout=OPENSSL_S,
        stdin=subprocess.DEVNULL,
    )
    made.key.chmod(0o600)
    return made


def _alternative(name: str) -> str:
    try:
        return f"IP:{ipaddress.ip_address(name)}"
    except ValueError:
        return f"DNS:{name}"
