"""Keys of a network between workers, made once for all tests of a process: openssl takes a while."""

import threading
from functools import cache

from unisono.reduce.data_network import NetworkKeys

_making = threading.Lock()


@cache
def _made() -> NetworkKeys:
    return NetworkKeys.private()


def private() -> NetworkKeys:
    """With a certificate."""
    with _making:
        return _made()
