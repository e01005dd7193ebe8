"""The Secret of a job: its token, and the certificate and key of its coordinator, made before any pod runs."""

import tempfile
from pathlib import Path
from typing import Any

from unisono.errors import JobError
from unisono.host.certificate import NoCertificate, make
from unisono.membership.token import fresh_token

TOKEN, CERTIFICATE, KEY = "token", "certificate.pem", "certificate.key"
"""Its entries."""


def new_secret(name: str, namespace: str | None) -> dict[str, Any]:
    """A Secret with keys that nobody has had.

    Args:
        name: the name of the Secret.
        namespace: the namespace of the Secret; None for the one that kubectl is set to.

    Raises:
        JobError: there is nothing here that makes a certificate.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="unisono-") as folder:  # nobody else looks into it
            made = make(Path(folder), "unisono coordinator", ["extendedKeyUsage = serverAuth"])
            chain, key = made.chain.read_text(encoding="ascii"), made.key.read_text(encoding="ascii")
    except (OSError, NoCertificate) as error:
        raise JobError(f"a coordinator on Kubernetes needs a certificate, and {error}: install openssl") from error
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, **({} if namespace is None else {"namespace": namespace})},
        "type": "Opaque",
        "immutable": True,
        "stringData": {TOKEN: fresh_token(), CERTIFICATE: chain, KEY: key},
    }
