"""Whom workers, agents and people believe to be the coordinator, before they show it the job's token."""

import ipaddress
import ssl
from pathlib import Path
from urllib.parse import urlsplit


def is_private(url: str) -> bool:
    """Whether nobody can read a token that is sent there: over TLS, or without leaving this host."""
    try:
        found = urlsplit(url)
        return found.scheme == "https" or (found.scheme == "http" and is_loopback(found.hostname or ""))
    except ValueError:  # an address that is none
        return False


def is_loopback(host: str) -> bool:
    """Whether a name or address is this host's own, whatever a name server says."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def context_for(url: str, certificate: Path | None) -> ssl.SSLContext | None:
    """What is trusted; None without TLS.

    A certificate that can vouch for no other one is pinned: whoever shows it and has its key is the coordinator, by
    whatever name or address it was reached. Any other has to be made out for the name in the URL.

    Args:
        url: of the coordinator.
        certificate: a file with the coordinator's certificate, or with those of who may vouch for it, PEM; None for
            those that this system trusts.

    Raises:
        OSError: the file cannot be read, or holds no certificate.
    """
    if not url.startswith("https:"):
        return None
    context = ssl.create_default_context(cafile=certificate)
    if certificate is not None:
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        found = context.cert_store_stats()
        context.check_hostname = (found["x509"], found["x509_ca"]) != (1, 0)
    return context
