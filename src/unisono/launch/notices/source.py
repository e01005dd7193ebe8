"""The addresses of the clouds' metadata services, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from unisono.errors import JobError
from unisono.received import short


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a metadata service.

    Attributes:
        host: the name or address.
        port: the port.
    """

    host: str
    port: int = 80

    @classmethod
    def read(cls, text: str, variable: str) -> Endpoint:
        """``http://HOST:PORT`` or ``HOST:PORT``.

        Args:
            text: the address.
            variable: the variable that has it, for errors.

        Raises:
            JobError: it is no such address.
        """
        try:
            parts = urlsplit(text if "://" in text else f"http://{text}")
            host, port = parts.hostname, parts.port or 80
            (host or "").encode("idna")
        except ValueError:
            host, port = None, 80
        if not host or parts.scheme != "http":
            raise JobError(f"{variable}={short(text)}: write the address of the metadata service as http://HOST:PORT")
        return cls(host, port)


AUTO = "auto"
LINK_LOCAL = Endpoint("169.254.169.254")

VARIABLES = {
    "aws": "AWS_EC2_METADATA_SERVICE_ENDPOINT",
    "gcp": "GCE_METADATA_HOST",
    "azure": "AZURE_POD_IDENTITY_AUTHORITY_HOST",
}
"""The variables by which the clouds' own libraries are told of another address."""


@dataclass(frozen=True, slots=True)
class NoticeSource:
    """The clouds that are listened to.

    Attributes:
        cloud: ``aws``, ``gcp``, ``azure``, or ``auto`` for whichever of them this machine is of.
        endpoints: the address of each one's metadata service.
    """

    cloud: str
    endpoints: Mapping[str, Endpoint]

    @classmethod
    def of_environment(cls, cloud: str, environ: Mapping[str, str]) -> NoticeSource:
        """With the addresses that variables name, and else that of all clouds.

        Raises:
            JobError: there is no such cloud, or a variable is no address.
        """
        if cloud not in (*VARIABLES, AUTO):
            raise JobError(f"--notices {cloud}: the clouds are {', '.join(VARIABLES)}, and {AUTO}")
        named = {name: environ.get(variable, "") for name, variable in VARIABLES.items()}
        found = {name: Endpoint.read(text, VARIABLES[name]) if text else LINK_LOCAL for name, text in named.items()}
        return cls(cloud, found if cloud == AUTO else {cloud: found[cloud]})
